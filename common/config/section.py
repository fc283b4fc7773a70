"""The base of every configuration section: frozen, closed, documented; and what sections share."""

import glob
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Self, get_args

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationInfo, model_validator
from pydantic_core import CoreSchema
from pydantic_core.core_schema import with_info_plain_validator_function

OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads `off` as false."""


Rules = Iterator[str]
"""Reasons why a section is refused; the first one is shown."""


class Section(BaseModel):
    """A part of the run's one YAML file. Unknown fields are errors; values never change after start."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def rules(self) -> Rules:
        """Checks between fields, made when each field is valid by itself."""
        yield from ()

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        reason = next(self.rules(), "")
        if reason:
            raise ValueError(reason)
        return self


class LaterSection:
    """In an annotation: a section that few runs have. Its class is imported where a config has it, and then
    checks it as if it stood here itself.

    Example: `LaterSection("images:ImagesConfig")`: the class `ImagesConfig` in `images.py` beside this file.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def read(self) -> type[Section]:
        file, _, name = self.path.partition(":")
        section: type[Section] = getattr(importlib.import_module(f"{__package__}.{file}"), name)
        return section

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return with_info_plain_validator_function(self._checked)

    def _checked(self, value: Any, info: ValidationInfo) -> Section:
        # With the context: paths are relative to the config's folder.
        return self.read().model_validate(value, context=info.context)


def later(path: str) -> Any:
    """The annotation of such a section; for type checkers, the class itself is imported beside it."""
    return Annotated[Any, LaterSection(path)]


def read_later(annotation: Any) -> Any:
    """The class of a section that is imported where a config has it; any other annotation as it is."""
    for item in get_args(annotation):
        if isinstance(item, LaterSection):
            return item.read()
    return annotation


def resolved(value: str, info: ValidationInfo) -> str:
    """A path of a config file as an absolute one, where it is relative to the file's folder and exists there;
    also one with a name in the file (`.py:name`), a split (`folder@split`), or a pattern."""
    base: Path | None = (info.context or {}).get("base")
    if base is None or not value or Path(value).is_absolute():
        return value
    folder, at, split = value.rpartition("@")
    if at and (base / folder).is_dir():
        return f"{(base / folder).resolve()}@{split}"
    file = value
    colon = ""
    name = ""
    if ".py:" in value:
        file, colon, name = value.rpartition(":")
    is_pattern = glob.has_magic(value) and any(glob.iglob(str(base / value), recursive=True))
    # A function's file is a path also where it is missing: elsewhere may be another of that name.
    if value.startswith(".") or name.replace(".", "_").isidentifier() or is_pattern or (base / file).exists():
        return f"{(base / file).resolve()}{colon}{name}"
    return value


def _read_template(value: str, info: ValidationInfo) -> str:
    """The template's text, because workers elsewhere may lack the file. A value without `{` and newlines
    would show nothing of the sample: it is the name of a file."""
    base: Path | None = (info.context or {}).get("base")
    if base is None or not value or any(sign in value for sign in "{\n"):
        return value
    try:
        return (base / value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read the file {base / value}: {error}") from None


PathText = Annotated[str, AfterValidator(resolved)]
"""A path, or a name with a path in it, relative to the config file."""
Template = Annotated[str, AfterValidator(_read_template)]
"""A Jinja template, or a file with one, relative to the config file."""


def _ascends(bounds: tuple[float, float]) -> tuple[float, float]:
    if not bounds[0] < bounds[1]:
        raise ValueError(f"must be [lowest, highest], got {list(bounds)}")
    return bounds


Range = Annotated[tuple[float, float], AfterValidator(_ascends)]
"""Lowest and highest value."""


def read_table(name: str) -> dict[str, Any]:
    """The table in `NAME.yml` beside this file."""
    text = resources.files(__package__).joinpath(f"{name}.yml").read_text(encoding="utf-8")
    # Like `safe_load`, which is pure Python and slow: every process reads these tables as it starts.
    table: dict[str, Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()
    return table


def number_of(value: Any) -> Any:
    """YAML reads `1e-6` as text; the number is meant."""
    is_number = isinstance(value, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", value.strip())
    return float(value) if is_number else value


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """The values of a tree of sections by dotted names; lists and empty sections are values."""
    if not isinstance(tree, Mapping) or not tree:
        return {prefix.removesuffix("."): tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= flatten(value, f"{prefix}{name}.")
    return flat


def filled_in(settings: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A section's fields with `values` in place of defaults, also within sections; what is given wins."""
    filled = {**values, **settings}
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(settings.get(name), dict):
            filled[name] = value | settings[name]
    return filled


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
