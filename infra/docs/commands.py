"""The shell commands of the pages: what a reader would type, one string each.

Commands are the lines that begin with a program, in blocks that are marked `sh` or not marked at all.
Where a block has lines that begin with `$ `, those are its commands and the rest is what they print.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import yaml

from infra.docs.pages import FENCE, INDENTED, REPO, Page

TABLE = REPO / "infra" / "docs" / "commands.yml"
"""How each command is tested, or why it is not."""
PROGRAMS = frozenset(yaml.safe_load(TABLE.read_text(encoding="utf-8"))["programs"])
"""What a line must begin with to be a command; variables may come before it."""

_ASSIGNED = re.compile(r"^(?:[A-Z_]+=\S* )+")
_NOTE = re.compile(r"(?: +#|\s{3,}|\t).*$")
"""What follows a command in its line: a comment, or a second column that says what it does."""


def program_of(line: str) -> str:
    """The first word that is no variable: `tidemill` of `CUDA_VISIBLE_DEVICES=0 tidemill up`."""
    words = _ASSIGNED.sub("", line.strip()).split()
    return words[0].rsplit("/", 1)[-1] if words else ""


def blocks_of(page: Page) -> Iterator[tuple[str, str]]:
    """Language and text of each block, in the order of the page; a block by indentation has no language."""
    text = page.path.read_text(encoding="utf-8")
    blocks = [(block.start(), block[2], block[3]) for block in FENCE.finditer(text)]
    hidden = FENCE.sub(lambda block: re.sub(r"[^\n]", ".", block[0]), text)
    blocks += [(block.start(), "", block[0]) for block in INDENTED.finditer(hidden)]
    for _, language, block in sorted(blocks):
        yield language, block


def commands_of(page: Page) -> list[str]:
    """Every command of a page, without comments, with single spaces, continued lines joined.

    Raises:
        ValueError: a block is marked `sh` and has a line that begins with no known program.
    """
    commands = []
    for language, block in blocks_of(page):
        if language not in ("", "sh"):
            continue
        lines = re.sub(r"\\\n\s*", " ", block).splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            command = " ".join(_NOTE.sub("", line.strip()).split())
            if command and program_of(command) in PROGRAMS:
                commands.append(command)
            elif command and language == "sh" and not command.startswith("#"):
                raise ValueError(f"{page.path}: {command!r} begins with no program of commands.yml")
    return commands


@dataclass(frozen=True)
class Fate:
    """How one command is tested, or why it is not: one of the three is set."""

    run: str = ""
    """What a test runs in its place; the command itself where it needs no other words."""
    tested: str = ""
    """The file of tests, or `file::test`, that does what the command does."""
    needs: str = ""
    """Why no test here can run it."""


def table() -> dict[str, Fate]:
    """Every command of `commands.yml`, in its order.

    Raises:
        ValueError: a command stands twice.
    """
    tree = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    pairs: list[tuple[str, Fate]] = []
    for entry in tree["run"]:
        for command, run in entry.items() if isinstance(entry, dict) else [(entry, entry)]:
            pairs.append((command, Fate(run=run)))
    for kind in ("tested", "needs"):
        for why, commands in tree[kind].items():
            pairs += [(command, Fate(**{kind: why})) for command in commands]
    counts = Counter(command for command, _ in pairs)
    if twice := [command for command, number in counts.items() if number > 1]:
        raise ValueError(f"{TABLE.name}: each command stands once; twice: {', '.join(twice)}")
    return dict(pairs)
