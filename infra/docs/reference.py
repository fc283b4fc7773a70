"""Pages, or last parts of pages, that are made from the code: `python -m infra.docs.reference` writes them.

`--check` only says which are not current. Each module has the heading with which its part begins, and makes
the part; what stands before the heading is written by hand.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from infra.docs import api_page, config_page, fits_table, metric_table

DOCS = Path(__file__).parents[2] / "docs"
MADE: dict[str, ModuleType] = {
    "api.md": api_page,
    "config.md": config_page,
    "metrics.md": metric_table,
    "operations/sizing.md": fits_table,
}


def current(page: str) -> str:
    """The whole text that a page should have."""
    made = MADE[page]
    text: str = (DOCS / page).read_text(encoding="utf-8").partition(made.HEADING)[0] + made.as_markdown()
    return text


def main(arguments: Sequence[str]) -> int:
    """Write the pages that changed, or with `--check` name them. Returns the exit code."""
    is_check = "--check" in arguments
    changed = {page: text for page in MADE if (text := current(page)) != (DOCS / page).read_text("utf-8")}
    for page, text in changed.items():
        print(f"docs/{page} is not current: python -m infra.docs.reference" if is_check else f"docs/{page}")
        if not is_check:
            (DOCS / page).write_text(text, encoding="utf-8")
    return int(is_check and bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
