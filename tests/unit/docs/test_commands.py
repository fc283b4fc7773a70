"""Every command of the pages is run by a test, or does what another test does, or says what it needs."""

import re
import shlex
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from infra.docs.commands import PROGRAMS, blocks_of, commands_of, program_of, table
from infra.docs.pages import REPO, Page, all_pages
from tidemill.services.console.__main__ import app

PAGES = [page for page in all_pages() if page.name != "CHANGELOG.md"]
FATES = table()
WRITTEN = {command: page.name for page in PAGES for command in commands_of(page)}
RUN = [fate.run for fate in FATES.values()]
OURS = [command for command in (*FATES, *RUN) if program_of(command) == "tidemill"]


def test_every_command_of_every_page_has_a_fate_and_no_fate_is_left_over() -> None:
    assert {command: page for command, page in WRITTEN.items() if command not in FATES} == {}
    assert [command for command in FATES if command not in WRITTEN] == []


def test_the_tests_that_are_named_exist() -> None:
    for fate in FATES.values():
        file, _, name = fate.tested.partition("::")
        assert (REPO / file).exists(), file
        assert not name or f"def {name}(" in (REPO / file).read_text(encoding="utf-8"), fate.tested


@cache
def whole_command() -> Any:
    """`tidemill` with all its commands, as click has them."""
    return typer.main.get_command(app)


@pytest.mark.parametrize("command", dict.fromkeys(OURS))
def test_a_command_of_ours_has_the_options_that_it_uses(command: str) -> None:
    """Also of those that are not run: click parses them, and nothing is called."""
    words = shlex.split(command.partition(" > ")[0])
    while words.pop(0).rpartition("/")[2] != "tidemill":
        pass  # variables before it
    current = whole_command()
    while hasattr(current, "commands"):
        name = words.pop(0)
        assert name in current.commands, command
        current = current.commands[name]
    names = {
        option for parameter in current.params for option in (*parameter.opts, *parameter.secondary_opts)
    }
    used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert used - names - {"--help"} == set()


def test_no_block_begins_with_a_program_that_is_not_known() -> None:
    begins = [
        (page.name, program_of(block.strip().splitlines()[0]))
        for page in PAGES
        for language, block in blocks_of(page)
        if language in ("", "sh")
    ]
    assert [
        beginning for beginning in begins if beginning[1] not in PROGRAMS and shutil.which(beginning[1])
    ] == []


def test_commands_are_found_in_each_kind_of_block(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n\n    tidemill up a.yaml   # does it\n"
        "    A=1 python -m tidemill.services.reward \\\n        --run x\n\n"
        "```\n$ tidemill status a\nstatus of a\n```\n\n```sh\ncd folder\n```\n\n```yaml\nmake: no\n```\n"
    )
    assert commands_of(Page(page)) == [
        "tidemill up a.yaml",
        "A=1 python -m tidemill.services.reward --run x",
        "tidemill status a",
        "cd folder",
    ]
    page.write_text("```sh\nfrobnicate --now\n```\n")
    with pytest.raises(ValueError, match="frobnicate"):
        commands_of(Page(page))
