"""The options of verl, TRL and prime-rl with ours: the converter's tables, as part of docs/coming-from.md."""

from tidemill.services.console.convert.table import FILES, OptionRow, table_of

HEADING = "## Options"

PREAMBLE = f"""{HEADING}

From the tables of `tidemill convert` (`python -m infra.docs.reference`); `*` is any name. Listed
are options that differ in more than their name. `convert` copies the others and names those without a
counterpart; a config with an option of theirs is refused with our name for it.
"""


def as_markdown() -> str:
    """Heading, and for each project what differs."""
    lines = [PREAMBLE]
    for table in map(table_of, FILES):
        rows = [row for row in table.rows if not row.is_automatic]
        lines += [f"### {table.project}", ""]
        lines += [f"* {_theirs(row)}: {_ours(row)}; {row.note}" for row in rows if row.to and row.note]
        lines.append("")
    return "\n".join(lines)


def _theirs(row: OptionRow) -> str:
    return ", ".join(f"`{option}`" for option in row.options)


def _ours(row: OptionRow) -> str:
    return ", ".join(f"`{target}`" for target in row.targets)
