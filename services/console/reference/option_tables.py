"""The options of verl, TRL and prime-rl with ours: the converters' tables, as part of docs/coming-from.md.

`python -m tidemill.services.console.reference.option_tables docs/coming-from.md` writes them;
`--check` says whether they are current.
"""

import sys
from collections.abc import Iterator, Sequence

from tidemill.services.console.convert.aliases import TABLES
from tidemill.services.console.convert.table import Row, Table
from tidemill.services.console.reference.page_part import write_or_check

HEADING = "## Every option"

PREAMBLE = f"""{HEADING}

Generated from the tables of `tidemill convert`: `python -m tidemill.services.console.reference.option_tables
docs/coming-from.md`. "-" is no counterpart, "automatic" needs no option here; `*` stands for any name.
"""


def as_markdown() -> str:
    """Heading and tables."""
    lines = [PREAMBLE]
    for table in TABLES:
        lines += [f"### {table.project}", "", f"| {table.project} | Tidemill | difference |", "|---|---|---|"]
        lines += [*_rows(table), ""]
    return "\n".join(lines)


def _rows(table: Table) -> Iterator[str]:
    for row in table.rows:
        theirs = ", ".join(f"`{option}`" for option in row.options)
        yield f"| {theirs} | {_ours(row)} | {row.note.replace('|', chr(92) + '|')} |"


def _ours(row: Row) -> str:
    if row.targets:
        return ", ".join(f"`{target}`" for target in row.targets)
    return "automatic" if row.kind == "automatic" else "-"


def main(arguments: Sequence[str]) -> int:
    """Write the tables into a file, or check them with `--check`; returns the exit code."""
    return write_or_check(arguments, HEADING, as_markdown)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
