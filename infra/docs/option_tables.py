"""The options of verl, TRL and prime-rl with ours: the converter's tables, as part of docs/coming-from.md."""

from tidemill.services.console.convert.table import FILES, OptionRow, table_of

HEADING = "## Options"

PREAMBLE = f"""{HEADING}

From the tables of `tidemill convert` (`python -m infra.docs.reference`); `*` is any name. Options that
mean the same under another name are not listed: `convert` copies them, and a config with one of them is
refused with our name for it.
"""


def as_markdown() -> str:
    """Heading, and for each project what differs and what has no counterpart."""
    lines = [PREAMBLE]
    for table in map(table_of, FILES):
        rows = [row for row in table.rows if not row.is_automatic]
        lines += [f"### {table.project}", "", "With a difference:", ""]
        lines += [f"* {_theirs(row)}: {_ours(row)}; {row.note}" for row in rows if row.to and row.note]
        lines += ["", "Without a counterpart:", ""]
        lines += [*(f"* {_theirs(row)}: {row.note}" for row in rows if not row.to), ""]
    return "\n".join(lines)


def _theirs(row: OptionRow) -> str:
    return ", ".join(f"`{option}`" for option in row.options)


def _ours(row: OptionRow) -> str:
    return ", ".join(f"`{target}`" for target in row.targets)
