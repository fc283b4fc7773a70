"""docs/config.md: every field of a config."""

from tidemill.services.console.check.fields import read_sections

HEADING = "# Config reference"
PREAMBLE = f"""{HEADING}

One YAML file describes a run. `tidemill check CONFIG` finds its mistakes, `--set section.field=value`
overrides a field, and `tidemill check --fields [SECTION]` prints this reference. This page is generated:
`python -m infra.docs.reference`.
"""


def as_markdown() -> str:
    """The page."""
    parts = [PREAMBLE]
    for section in read_sections():
        parts.append(f"\n## {f'`{section.name}`' if section.name else 'Top of the file'}\n\n{section.text}\n")
        if section.fields:
            parts.append("\n| field | type | default | what it is for |\n|---|---|---|---|\n")
        for field in section.fields:
            kind = _cell(", ".join(part for part in (field.kind, field.bounds) if part))
            parts.append(f"| `{field.name}` | {kind} | {_cell(field.default)} | {_cell(field.text)} |\n")
    return "".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
