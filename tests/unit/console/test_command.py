"""The command line itself: version, completion, runs by every name."""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from tidemill import __main__ as entry
from tidemill.common.errors import ConfigError
from tidemill.services.console.__main__ import app, main
from tidemill.services.console.options import runs_here
from tidemill.services.console.run.folder import RunFolder, find_run


def answer(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_the_version_is_said_and_shells_can_complete() -> None:
    said = answer("--version")
    assert said.exit_code == 0 and said.output.startswith("tidemill")
    assert "--install-completion" in answer("--help").output


def test_a_path_that_cannot_be_used_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tidemill", "status", "one"])
    monkeypatch.setattr(
        "tidemill.services.console.status.dashboard.show_status", lambda given: tmp_path.read_bytes()
    )
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"{tmp_path}: Is a directory" in capsys.readouterr().err


def test_a_run_is_named_by_its_place_or_by_an_option_on_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tidemill.services.console.status.dashboard.show_status", lambda given: print(given.run_id)
    )
    monkeypatch.setattr(
        "tidemill.services.console.exports.export.list_versions", lambda given: print(given.run_id)
    )
    for command in (["status"], ["export"]):
        for words in (["one"], ["--run", "one"], ["one", "--run", "one"]):
            assert answer(*command, *words).output == "one\n"
        said = answer(*command, "one", "--run", "two")
        assert isinstance(said.exception, ConfigError) and "two runs are named" in str(said.exception)


def test_a_run_is_found_by_id_folder_and_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    (runs / "one").mkdir(parents=True)
    (runs / "latest").symlink_to("one")
    elsewhere = tmp_path / "elsewhere" / "two"
    elsewhere.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for given in ("one", "runs/one", "runs/one/", str(runs / "one"), "latest", "runs/latest", None):
        assert find_run(given, runs) == RunFolder(runs, "one"), given
    assert find_run(str(elsewhere), runs) == RunFolder(elsewhere.parent, "two")
    assert find_run("gone/three", runs) == RunFolder(runs, "three")
    assert runs_here("o") == ["one"] and runs_here("x") == []
    os.chdir(elsewhere)
    assert runs_here("") == []


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Importing(ModuleType):
        def __getattr__(self, name: str) -> NoReturn:
            raise KeyboardInterrupt

    name = "tidemill.services.console.__main__"
    monkeypatch.setitem(sys.modules, name, Importing(name))
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130
