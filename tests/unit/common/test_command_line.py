"""A command in a hint works as it is printed, wherever the process was started."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill.common.command_line import command_line

NAMES = {
    "console/up/node.py: as of tidemill up",
    "console/up/local_run.py: tidemill up: ",
    "console/up/start.py: tidemill up: a metric left its healthy range (--fail-on-warning)",
    "console/run/folder.py:  does not answer: its `tidemill up` was probably killed. Continue the run with `",
    'console/web/server.py: Basic realm="tidemill web: the token is the password", charset="UTF-8"',
}
"""Texts that name a command, and are nothing to type."""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The programs of an environment below the working directory, which is not active."""
    programs = tmp_path / "clone" / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "tidemill"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path / "clone")
    return programs


def test_where_the_environment_is_not_active_the_program_is_named(environment: Path) -> None:
    assert command_line("web", "a run") == ".venv/bin/tidemill web 'a run'"


def test_where_it_is_active_its_name_is_enough(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(environment))
    assert command_line("web") == "tidemill web"


def test_a_link_to_it_on_the_path_is_it(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "tidemill").symlink_to(environment / "tidemill")
    assert command_line("web") == "tidemill web"


def test_another_environment_that_is_active_is_not_taken_for_it(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "tidemill").write_text("#!/bin/sh\n")
    (tmp_path / "tidemill").chmod(0o755)
    assert command_line("web") == ".venv/bin/tidemill web"


def test_elsewhere_its_whole_path_is_given(environment: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    assert command_line("web") == f"{environment}/tidemill web"
    monkeypatch.chdir(environment)
    assert command_line("web") == "./tidemill web"


def test_a_clone_that_is_not_installed_is_run_as_a_module(environment: Path) -> None:
    (environment / "tidemill").unlink()
    assert command_line("web") == ".venv/bin/python -m tidemill web"


def test_texts_for_users_name_the_program_as_it_can_be_typed() -> None:
    """Commands that are printed come from `command_line`: the plain name needs an active environment."""
    typed = re.compile(
        r"(?:^|[^A-Za-z])tidemill (?:archive|check|dead|export|status|step|streams|trace|up|web)\b"
    )
    services = Path(__file__).parents[3] / "services"
    texts = [(path, path.read_text()) for path in services.rglob("*.html")]
    texts += [(path, text) for path in services.rglob("*.py") for text in _texts_of(path)]
    plain = {f"{path.relative_to(services)}: {text[:80]}" for path, text in texts if typed.search(text)}
    assert plain - NAMES == set()


def _texts_of(path: Path) -> Iterator[str]:
    """The literals of a module but for docstrings, which are expressions of their own."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value
