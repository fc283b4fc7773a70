"""Every field of a config, from the models themselves: type, default, bounds, and what it is for.

`tidemill check --fields` shows them; docs/config.md is made from them too.
"""

import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.text import Text

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.services.console.text.tree import name_table

SIGNS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
ANY_NAME = "<name>"
"""Stands for the names that a config gives to entries of its own."""


class FieldFacts(NamedTuple):
    """One field, by its dotted name."""

    name: str
    kind: str
    default: str
    bounds: str
    text: str


class SectionFacts(NamedTuple):
    """A section: its dotted name (empty for the top of the file), what it is for, and its own fields."""

    name: str
    text: str
    fields: list[FieldFacts]


def read_sections(model: type[BaseModel] = RunConfig, name: str = "") -> Iterator[SectionFacts]:
    """A section, then those inside it, depth first."""
    own, inner = [], []
    prefix = f"{name}." if name else ""
    for field, info in model.model_fields.items():
        section, has_names = _section_of(info.annotation)
        default = ... if info.is_required() else info.get_default(call_default_factory=True)
        if section is None or has_names or default is None:
            text = " ".join((info.description or "").split())
            shown = "required" if default is ... else f"default {_shown(default)}"
            own.append(FieldFacts(prefix + field, _kind(info.annotation), shown, _bounds(info), text))
        if section is not None:
            inner.append((section, f"{prefix}{field}.{ANY_NAME}" if has_names else prefix + field))
    yield SectionFacts(name, " ".join((model.__doc__ or "").strip().partition("\n\n")[0].split()), own)
    for section, path in inner:
        yield from read_sections(section, path)


def print_fields(wanted: str, console: Console | None = None) -> None:
    """Show the fields of a section and of those inside it; all, where no section is given."""
    console = console or Console(highlight=False)
    sections = list(read_sections())
    chosen = [s for s in sections if not wanted or s.name == wanted or s.name.startswith(f"{wanted}.")]
    if not chosen:
        names = ", ".join(section.name for section in sections if section.name)
        raise ConfigError(f"there is no section {wanted!r}; sections are {names}")
    for section in chosen:
        console.print(Text.assemble((section.name or "top of the file", "bold cyan"), f"  {section.text}"))
        table = name_table("bold")
        for field in section.fields:
            details = ", ".join(part for part in (field.kind, field.bounds) if part)
            table.add_row(field.name, Text.assemble((f"{details}; {field.default}\n", "dim"), field.text))
        console.print(table)


def _section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section that a field holds, and whether it holds any number of them under names of their own."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    if get_origin(annotation) is typing.Annotated:
        return _section_of(get_args(annotation)[0])
    if get_origin(annotation) in (dict, list):
        return _section_of(get_args(annotation)[-1])[0], True
    found = [_section_of(part) for part in get_args(annotation) if _is_union(annotation)]
    sections = [part for part in found if part[0] is not None]
    return sections[0] if len(sections) == 1 else (None, False)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _kind(annotation: Any) -> str:
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is typing.Annotated:
        return _kind(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return " | ".join(str(value) for value in get_args(annotation))
    if _is_union(annotation):
        return " | ".join(_kind(part) for part in get_args(annotation))
    if arguments := [part for part in get_args(annotation) if part is not Ellipsis]:
        return f"{get_origin(annotation).__name__}[{', '.join(_kind(part) for part in arguments)}]"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return str(getattr(annotation, "__name__", annotation))


def _bounds(info: FieldInfo) -> str:
    found = []
    for constraint in info.metadata:
        limits = [(sign, getattr(constraint, name, None)) for name, sign in SIGNS]
        found += [f"{sign} {limit:.15g}" for sign, limit in limits if limit is not None]
        if pattern := getattr(constraint, "pattern", None):
            found.append(f"matches {pattern}")
    return ", ".join(found)


def _shown(value: Any) -> str:
    if isinstance(value, BaseModel):
        return "as below"
    for plain, text in ((None, "null"), (True, "true"), (False, "false")):
        if value is plain:
            return text
    return '""' if value == "" else str(list(value) if isinstance(value, tuple) else value)
