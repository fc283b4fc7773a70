"""Pages, or last parts of pages, that are made from the code: `python -m infra.docs.reference` writes them.

`--check` only says which are not current. Each module has the heading with which its part begins, and makes
the part; what stands before the heading is written by hand. docs/algorithms.md has two tables that are made.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from infra.docs import algorithm_tables, api_page, config_page, fits_table, metric_table
from infra.docs.made import keep

DOCS = Path(__file__).parents[2] / "docs"
MADE: dict[Path, ModuleType] = {
    DOCS / "api.md": api_page,
    DOCS / "config.md": config_page,
    DOCS / "metrics.md": metric_table,
    DOCS / "operations/sizing.md": fits_table,
}


def main(arguments: Sequence[str]) -> int:
    """Write the pages that changed, or with `--check` name them. Returns the exit code."""
    texts = {
        path: path.read_text(encoding="utf-8").partition(page.HEADING)[0] + page.as_markdown()
        for path, page in MADE.items()
    }
    algorithms = DOCS / "algorithms.md"
    texts[algorithms] = algorithm_tables.with_tables(algorithms.read_text(encoding="utf-8"))
    return keep(texts, "infra.docs.reference", arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
