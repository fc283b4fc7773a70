"""The runbook: paragraphs of docs/operations.md that panels and alerts refer to, by their headings.

Headings become anchors as GitHub makes them, so one name serves the file, the alerts and Grafana.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
OPERATIONS = REPO / "docs" / "operations.md"
RUNBOOK_UID = "tidemill-runbook"
RUNBOOK_TITLE = "Runbook"
SECTIONS = ("Dashboards", "Alerts: what to do")
"""Sections of docs/operations.md; each heading below one of them begins a paragraph."""

_HEADING = re.compile(r"^(#+) +(.+?) *$")
_LINK = re.compile(r"\[([^]]+)\]\((#[^)]+)\)")


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
        """The text with links to paragraphs leading to their panels; other links would lead nowhere."""
        urls = {f"#{other.anchor}": paragraph_url(other.panel_id) for other in others}

        def replaced(link: re.Match[str]) -> str:
            url = urls.get(link[2])
            return f"[{link[1]}]({url})" if url else f"{link[1]} (docs/operations.md)"

        return _LINK.sub(replaced, self.body)


def paragraph_url(panel_id: int) -> str:
    """Where Grafana shows one paragraph, and it alone."""
    return f"/d/{RUNBOOK_UID}?viewPanel=panel-{panel_id}"


def anchor_of(heading: str) -> str:
    """`Worker silent, or gone` becomes `worker-silent-or-gone`."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def read_runbook(path: Path = OPERATIONS) -> tuple[Paragraph, ...]:
    """All paragraphs, in the order of the file."""
    found: list[tuple[str, list[str]]] = []
    is_inside, level = False, 0
    for line in path.read_text(encoding="utf-8").splitlines():
        heading = _HEADING.match(line)
        if heading is None:
            if is_inside and found:
                found[-1][1].append(line)
        elif heading[2] in SECTIONS:
            is_inside, level = True, len(heading[1])
        elif is_inside and len(heading[1]) <= level:
            is_inside = False
        elif is_inside:
            found.append((heading[2], []))
    return tuple(
        Paragraph(heading, "\n".join(lines).strip() + "\n", number)
        for number, (heading, lines) in enumerate(found, start=1)
    )
