"""The pages: links lead somewhere, every file, module and command that they name is there, and so is what the
glossary names."""

import re
from collections import defaultdict
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import isclass
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel

from infra.docs import architecture
from infra.docs.pages import REPO, ROOMS, Page, all_pages, anchor_of, broken_links
from tidemill.common.config import RunConfig
from tidemill.services.console.__main__ import app

PAGES = [page for page in all_pages() if page.name != "CHANGELOG.md"]
"""The changelog names files as they were."""

TOP = (*ROOMS, "common", "requirements", ".ci")
PATH = re.compile(rf"(?:{'|'.join(map(re.escape, TOP))})/[\w./*-]*")
FILE = re.compile(r"[\w./-]+\.(?:py|sh|yml|yaml|conf|acl|lua|toml|lock|jinja)")
MODULE = re.compile(r"python -m ((?:services|infra|benchmarks|tests|common)[\w.]*)")
FORBIDDEN = {"utils.py"}
"""Named as what there must not be."""
READERS_OWN = {"docs/tutorial.md", "README.md", "docs/algorithms.md", "docs/models.md", "docs/debugging.md"}
READERS_OWN |= {f"docs/{name}.md" for name in ("troubleshooting", "metrics", "sessions")}
"""Pages in which a bare name, such as `reward.py`, is a file of the reader's."""


def is_there(page: Page, path: str) -> bool:
    """Whether a path exists, from the root of the repository or from the page's folder; stars match."""
    return any(any(folder.glob(path.rstrip("/"))) for folder in (REPO, page.path.parent))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_a_page_names_exists(page: Page) -> None:
    everything = {f"{top}/*" for top in TOP}
    paths = [name for name in page.named if PATH.fullmatch(name) and name not in everything]
    assert [path for path in paths if not is_there(page, path)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_exists(page: Page) -> None:
    if page.name in READERS_OWN:
        pytest.skip("bare names are files of the reader's")
    is_of_service = page.path.name == "README.md" and page.name.startswith("services/")
    rooms = [page.path.parent] if is_of_service else [REPO / room for room in TOP]
    files = [
        name
        for name in page.named
        if FILE.fullmatch(name) and not PATH.fullmatch(name) and name not in FORBIDDEN
    ]
    for file in files:
        assert any(is_in(room, file) for room in (*rooms, REPO)), file


def is_in(folder: Path, file: str) -> bool:
    """Whether a file of this name, with the folders that are named, lies in a folder or below it."""
    if folder == REPO or file.startswith("../"):
        return (folder / file).exists()
    return any(path.endswith(f"/{file}") for path in paths_below(folder))


@cache
def paths_below(folder: Path) -> list[str]:
    """All that lies in a folder or below it."""
    return [path.as_posix() for path in folder.rglob("*")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_module_that_a_page_runs_exists(page: Page) -> None:
    modules = {name.rstrip(".") for name in MODULE.findall(page.path.read_text(encoding="utf-8"))}
    assert {module for module in modules if find_spec(module) is None} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_command_that_a_page_names_exists(page: Page) -> None:
    rules = (REPO / "Makefile").read_text() + (REPO / "infra/release/release.mk").read_text()
    targets = set(re.findall(r"^([a-z-]+):.*##", rules, re.MULTILINE))
    text = page.path.read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^    |&& )make ([a-z-]+)", text, re.MULTILINE))
    assert named - targets == set()


def test_every_test_that_the_page_of_tests_names_exists() -> None:
    files: dict[str, str] = defaultdict(str)
    for path in (REPO / "tests").rglob("test_*.py"):
        files[path.stem] += path.read_text(encoding="utf-8")
    text = (REPO / "tests" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`(?:[a-z]+/)?(test_\w+)(?:::(\w+))?`", text)
    assert len(named) > 40
    assert [f"{file}::{test}" for file, test in named if test and f"def {test}(" not in files[file]] == []
    assert [file for file, _ in named if file not in files] == []


def test_every_link_and_anchor_leads_somewhere() -> None:
    assert list(broken_links(all_pages())) == []


def test_broken_links_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.docs.pages.REPO", tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "other.md").write_text("# A heading, here\n\n    # not one\n")
    links = ["other.md", "other.md#a-heading-here", "other.md#not-one", "gone.md", "folder", "#none"]
    (tmp_path / "page.md").write_text("\n".join(f"[x]({link})" for link in links) + "\n`[y](code.md)`\n")
    broken = list(broken_links([Page(tmp_path / "other.md"), Page(tmp_path / "page.md")]))
    assert [line.split()[1] for line in broken] == ["other.md#not-one", "gone.md", "folder", "#none"]


def test_an_anchor_is_that_of_github() -> None:
    assert anchor_of("Users, passwords, TLS") == "users-passwords-tls"
    assert anchor_of("What `requeue` does: [more](page.md)") == "what-requeue-does-more"


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = (REPO / "infra" / "docs" / "mkdocs.yml").read_text()
    assert [page.name for page in all_pages() if f": {page.name}\n" not in menu] == []


def test_the_drawing_is_current_and_shows_every_room() -> None:
    drawing = architecture.DRAWING.read_text(encoding="utf-8")
    assert drawing == architecture.draw()
    assert all(f">{room}<" in drawing for room in architecture.rooms_of("services/trainer"))
    assert "prefers-color-scheme: dark" in drawing


def test_a_stream_that_nobody_draws_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architecture, "FLOWS", architecture.FLOWS[1:])
    with pytest.raises(SystemExit, match="prompts"):
        architecture.check_flows()


def commands_of(group: Any) -> set[tuple[str, ...]]:
    """The names of all commands: `("up",)`, `("dead", "list")`, ..."""
    commands: set[tuple[str, ...]] = set()
    for name, command in getattr(group, "commands", {}).items():
        commands |= {(name,), *((name, *below) for below in commands_of(command))}
    return commands


@cache
def all_commands() -> set[tuple[str, ...]]:
    """Those of `tidemill`."""
    return commands_of(typer.main.get_command(app))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_tidemill_command_that_a_page_names_exists(page: Page) -> None:
    commands = all_commands()
    groups = {command[0] for command in commands if len(command) > 1}
    text = page.path.read_text(encoding="utf-8")
    named = re.findall(r"(?:`|^ {4}|^\$ |^|&& |console )tidemill ([a-z-]+)(?: ([a-z]+))?", text, re.MULTILINE)
    used = {(first, second) if first in groups and second else (first,) for first, second in named}
    assert used - commands == set()


ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "glossary.md"


def words() -> list[list[str]]:
    """The rows of the tables, without their heads."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    rows = []
    for line in lines:
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if row[0] not in ("word", "---"):
            rows.append(row)
    return rows


WORDS = words()


def exists(name: str) -> bool:
    """Whether a path, a field of the config, or a symbol of a module is there."""
    if "/" in name:
        return (ROOT / name).exists()
    if name.startswith(("tidemill.common.", "tidemill.services.")):
        module, _, symbol = name.rpartition(".")
        return hasattr(import_module(module), symbol)
    return is_field(RunConfig, name.split("."))


def is_field(section: Any, names: list[str]) -> bool:
    """Whether `trainer.group_size`, for one, is a field."""
    if not names:
        return True
    if not (isclass(section) and issubclass(section, BaseModel) and names[0] in section.model_fields):
        return False
    return is_field(section.model_fields[names[0]].annotation, names[1:])


@pytest.mark.parametrize("word", WORDS, ids=lambda row: row[0])
def test_a_word_says_what_it_means_and_where_the_code_has_it(word: list[str]) -> None:
    name, meaning, where = word
    places = re.findall(r"`([^`]+)`", where)
    assert name and meaning and places
    assert [path for path in places if not exists(path)] == []


def test_every_word_stands_once() -> None:
    names = [row[0] for row in WORDS]
    assert sorted(names) == sorted(set(names))
