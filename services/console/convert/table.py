"""What another project calls what we have: a row for each option, read by converter, docs and error messages.

There are four kinds of rows. `same`: the value is copied, perhaps in other words. `computed`: the converter
makes it from several options. `automatic`: it needs no option here. `missing`: there is no counterpart.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from tidemill.common.config import RunConfig

Kind = Literal["same", "computed", "automatic", "missing"]
NOT_GIVEN: Any = object()


@dataclass(frozen=True, slots=True)
class Row:
    """One option of theirs, or several that go together."""

    option: str
    """Dotted name, several with `, ` between; `*` stands for anything."""
    kind: Kind
    target: str = ""
    """Our field or fields, dotted, with `, ` between."""
    note: str = ""
    """How they differ, or what becomes of it."""
    default: Any = NOT_GIVEN
    """Their default where ours is another: it is written even if the option was not given."""
    words: Callable[[Any], Any] | None = None
    """The value in our words."""
    off: Any = None
    """With this value nothing is lost, though there is no counterpart; nor with false, 0 or nothing."""

    @property
    def options(self) -> tuple[str, ...]:
        """Each name in it."""
        return tuple(self.option.split(", "))

    @property
    def targets(self) -> tuple[str, ...]:
        """Each of our fields in it."""
        return tuple(self.target.split(", ")) if self.target else ()

    def matches(self, option: str) -> bool:
        """Whether it is about this option."""
        return any(option == name or fnmatchcase(option, name) for name in self.options)


def same(
    option: str,
    target: str,
    note: str = "",
    default: Any = NOT_GIVEN,
    words: Callable[[Any], Any] | None = None,
) -> Row:
    """The value is copied."""
    return Row(option, "same", target, note, default, words)


def computed(option: str, target: str, note: str = "") -> Row:
    """The converter makes our field from these options, perhaps with others."""
    return Row(option, "computed", target, note)


def automatic(option: str, note: str) -> Row:
    """It needs no option here; `note` says why."""
    return Row(option, "automatic", note=note)


def missing(option: str, note: str, off: Any = None) -> Row:
    """There is no counterpart; `note` says what comes near."""
    return Row(option, "missing", note=note, off=off)


def section_of(annotation: Any) -> Any:
    """The section that a field holds, also where it may be null; None where it holds a value."""
    found = [kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields")]
    return found[0] if found else None


def is_field(target: str) -> bool:
    """Whether our config has a field; `<name>` stands for a name that the user gives."""
    section: Any = RunConfig
    *outer, last = (name for name in target.split(".") if name != "<name>")
    for name in outer:
        if name not in section.model_fields:
            return False
        found = section.model_fields[name].annotation
        section = section_of(found) or next(filter(None, map(section_of, get_args(found))), section)
    return last in section.model_fields


@dataclass(frozen=True, slots=True)
class Table:
    """All rows of one project."""

    project: str
    """How people call it."""
    rows: Sequence[Row]

    def find(self, option: str) -> Row | None:
        """The row about an option: one that names it before one with a pattern."""
        found = [row for row in self.rows if row.matches(option)]
        return next((row for row in found if option in row.options), found[0] if found else None)

    def by_last_name(self, name: str) -> Iterable[Row]:
        """Rows with a target for an option whose last part is `name`."""
        for row in self.rows:
            if row.target and any(option.rpartition(".")[2] == name for option in row.options):
                yield row
