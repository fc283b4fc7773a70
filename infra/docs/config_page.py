"""docs/config.md: every field of a config, a line each."""

from tidemill.services.console.check.fields import FieldFacts, SectionFacts, read_sections

HEADING = "# Config reference"
PREAMBLE = f"""{HEADING}

One YAML file describes a run. `tidemill check CONFIG` finds its mistakes, `--set section.field=value`
overrides a field, `tidemill check --fields [SECTION]` prints this reference. This page is generated:
`python -m infra.docs.reference`.

A line has name, default, type where the default does not show it, bounds (`(0,1]`: above 0, at most 1) and
meaning. A field without a default is required.
"""
LEAST_SHARED = 3
"""Fields that two sections must share before the second one names them instead of repeating them."""


def as_markdown() -> str:
    """The page."""
    parts = [PREAMBLE]
    seen: dict[tuple[str, ...], str] = {}
    for section in read_sections():
        heading = f"`{section.name}`" if section.name else "Top of the file"
        parts.append(f"\n## {heading}\n\n{section.text}\n\n")
        shared = _shared(section, seen)
        parts += [_line(section, field) for field in section.fields if field.name not in shared]
        if shared:
            names = ", ".join(f"`{name.rpartition('.')[2]}`" for name in shared)
            parts.append(f"* as in `{next(iter(shared.values()))}`: {names}\n")
        seen |= {_facts(section, field): section.name for field in reversed(section.fields)}
    return "".join(parts).replace("\n\n\n", "\n\n")


def _shared(section: SectionFacts, seen: dict[tuple[str, ...], str]) -> dict[str, str]:
    """The fields that one earlier section has too, exactly alike, with its name; none where they are few."""
    found = {field.name: seen.get(_facts(section, field)) for field in section.fields}
    places = [place for place in found.values() if place]
    most = max(places, key=places.count, default="")
    if places.count(most) < LEAST_SHARED:
        return {}
    return {name: most for name, place in found.items() if place == most}


def _facts(section: SectionFacts, field: FieldFacts) -> tuple[str, ...]:
    return (_own_name(section, field), field.kind, field.default, field.bounds, field.text)


def _own_name(section: SectionFacts, field: FieldFacts) -> str:
    return field.name.removeprefix(f"{section.name}.")


def _line(section: SectionFacts, field: FieldFacts) -> str:
    default = field.default.removeprefix("default ")
    is_required = field.default == "required"
    kind = field.kind.replace(" | ", "|").replace(", ", ",")
    kind = kind.removesuffix("|null") if default == "null" else kind
    shows_kind = kind in ("bool", "int", "float") and default != "null" and not is_required
    code = (
        _own_name(section, field)
        + ("" if is_required else f"={default}")
        + ("" if shows_kind else f" ({kind})")
    )
    bounds = f" {_interval(field.bounds)}" if field.bounds else ""
    return f"* `{code}`{bounds} {field.text}\n"


def _interval(bounds: str) -> str:
    """`> 0, <= 1` as `(0,1]`; a pattern as it is."""
    found = dict(part.split(" ", 1) for part in bounds.split(", ") if part[0] in "<>")
    pattern = bounds.partition("matches ")[2]
    if not found:
        return f"`{pattern}`"
    low = f"[{found['>=']}" if ">=" in found else f"({found['>']}" if ">" in found else "("
    high = f"{found['<=']}]" if "<=" in found else f"{found['<']})" if "<" in found else ")"
    return f"`{low},{high}`" + (f" `{pattern}`" if pattern else "")
