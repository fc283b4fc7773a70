"""The runbook: paragraphs of docs/troubleshooting.md that panels and alerts refer to, by their headings.

Headings become anchors as GitHub makes them, so one name serves the file, the alerts and Grafana.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.docs.pages import REPO, anchor_of

RUNBOOK = REPO / "docs" / "troubleshooting.md"
RUNBOOK_UID = "tidemill-runbook"
RUNBOOK_TITLE = "Runbook"

_HEADING = re.compile(r"^(#+) +(.+?) *$")
_LINK = re.compile(r"\[([^]]+)\]\(([^):]*)\)")


@dataclass(frozen=True, slots=True)
class Paragraph:
    """One heading and the text below it."""

    heading: str
    body: str
    panel_id: int

    @property
    def anchor(self) -> str:
        """The part of the address after `#`."""
        return anchor_of(self.heading)

    def linked(self, others: Sequence["Paragraph"]) -> str:
        """The text, in which links to paragraphs lead to their panels, and other links become file names."""
        urls = {f"#{paragraph.anchor}": paragraph_url(paragraph.panel_id) for paragraph in others}

        def replaced(link: re.Match[str]) -> str:
            url = urls.get(link[2])
            page = (RUNBOOK.parent / (link[2].partition("#")[0] or RUNBOOK.name)).resolve()
            return f"[{link[1]}]({url})" if url else f"{link[1]} ({page.relative_to(REPO)})"

        return _LINK.sub(replaced, self.body)


def paragraph_url(panel_id: int) -> str:
    """Address at which Grafana shows only one paragraph."""
    return f"/d/{RUNBOOK_UID}?viewPanel=panel-{panel_id}"


def read_runbook(path: Path = RUNBOOK) -> tuple[Paragraph, ...]:
    """All paragraphs, in the order of the file; each begins with a heading of the third level."""
    sections: list[tuple[str, list[str]]] = []
    is_inside = False
    for line in path.read_text(encoding="utf-8").splitlines():
        heading = _HEADING.match(line)
        if heading:
            is_inside = len(heading[1]) == 3
            if is_inside:
                sections.append((heading[2], []))
        elif is_inside:
            sections[-1][1].append(line)
    return tuple(
        Paragraph(heading, "\n".join(lines).strip() + "\n", number)
        for number, (heading, lines) in enumerate(sections, start=1)
    )
