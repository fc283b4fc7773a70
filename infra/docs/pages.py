"""The pages of the repository: every Markdown file that people read, and what its links lead to."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
ROOMS = ("docs", "examples", "infra", "services", "tests", "benchmarks")
"""Folders whose pages belong to the site, beside those at the root."""
INSTRUCTION = "instruction.md"
"""What a task of examples/containers says to a model: no page."""

FENCE = re.compile(r"^(```|~~~) *(\w*).*?\n(.*?)^\1 *$", re.MULTILINE | re.DOTALL)
"""A block of code: its fence, language and text."""
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n|\n(?= {4}))+")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_LINK = re.compile(r"\[[^]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """Its path below the root of the repository."""
        return self.path.relative_to(REPO).as_posix()

    @cached_property
    def prose(self) -> str:
        """The text without blocks of code, whose brackets and headings mean something else."""
        return INDENTED.sub("\n", FENCE.sub("", self.path.read_text(encoding="utf-8")))

    @cached_property
    def anchors(self) -> frozenset[str]:
        """What links may name after `#`."""
        return frozenset(anchor_of(heading) for heading in _HEADING.findall(self.prose))

    @property
    def links(self) -> list[str]:
        """Links to files and headings of the repository, as they are written."""
        links = _LINK.findall(_CODE.sub("", self.prose))
        return [link for link in links if not re.match(r"[a-z]+:", link)]

    @property
    def named(self) -> list[str]:
        """Everything in backticks on one line."""
        return _CODE.findall(self.prose)

    def target(self, link: str) -> Path:
        """The file that a link leads to."""
        file = link.partition("#")[0]
        return (self.path.parent / file).resolve() if file else self.path


def anchor_of(heading: str) -> str:
    """`Worker silent, or gone` becomes `worker-silent-or-gone`; Markdown in a heading counts as its text."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def all_pages() -> list[Page]:
    """Every page, in the order of its path."""
    files = list(REPO.glob("*.md"))
    for room in ROOMS:
        files += (REPO / room).rglob("*.md")
    return [Page(file) for file in sorted(files) if file.name != INSTRUCTION]


def broken_links(pages: list[Page]) -> Iterator[str]:
    """What is wrong with links: no such file, a folder in place of its page, no such heading."""
    by_path = {page.path: page for page in pages}
    for page in pages:
        for link in page.links:
            target = page.target(link)
            anchor = link.partition("#")[2]
            if not target.exists():
                yield f"{page.name}: {link} leads to no file"
            elif target.is_dir():
                yield f"{page.name}: {link} is a folder; name its README.md or a file"
            elif anchor and (target not in by_path or anchor not in by_path[target].anchors):
                yield f"{page.name}: {link} leads to no heading"
