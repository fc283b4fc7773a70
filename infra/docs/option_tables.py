"""The options of verl, TRL and prime-rl with ours: the converter's tables, as part of docs/coming-from.md.

`python -m infra.docs.option_tables docs/coming-from.md` writes them; `--check` says whether they are current.
"""

import sys
from collections.abc import Sequence

from tidemill.services.console.convert.table import FILES, Row, table_of
from tidemill.services.console.reference.page_part import write_or_check

HEADING = "## Options"

PREAMBLE = f"""{HEADING}

From the tables of `tidemill convert` (`python -m infra.docs.option_tables docs/coming-from.md`).
`*` stands for any name. Options that need none here are left out.
"""


def as_markdown() -> str:
    """Heading, and for each project what is copied, what differs and what has no counterpart."""
    lines = [PREAMBLE]
    for table in map(table_of, FILES):
        rows = [row for row in table.rows if not row.is_automatic]
        lines += [f"### {table.project}", "", "Copied, their name and ours:", ""]
        lines += [f"* {_theirs(row)}: {_ours(row)}" for row in rows if row.to and not row.note]
        lines += ["", f"| {table.project} | Tidemill | difference |", "|---|---|---|"]
        lines += [f"| {_theirs(row)} | {_ours(row)} | {row.note} |" for row in rows if row.to and row.note]
        lines += ["", "Without a counterpart:", ""]
        lines += [*(f"* {_theirs(row)}: {row.note}" for row in rows if not row.to), ""]
    return "\n".join(lines)


def _theirs(row: Row) -> str:
    return ", ".join(f"`{option}`" for option in row.options)


def _ours(row: Row) -> str:
    return ", ".join(f"`{target}`" for target in row.targets)


def main(arguments: Sequence[str]) -> int:
    """Write the tables into a file, or check them with `--check`; returns the exit code."""
    return write_or_check(arguments, HEADING, as_markdown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
