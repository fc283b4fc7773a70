"""A problem of a config as a line: the field, what it expects, what it got, and what to write.

Pydantic finds the problem; what helps is read off the sections: their fields, options, types and defaults.
"""

import difflib
import json
import math
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from tidemill.common.config.run import RunConfig
from tidemill.common.config.section import Section, read_later

_TAG = re.compile(r"^(constrained-)?(float|int|str)$|[]>]$")
"""Parts of pydantic's path that name no field: `float`, `constrained-int` and `list[str]` say which type of a
union was tried, `[key]` that a name in a map is wrong."""
_SECTION_TYPES = ("model_type", "model_attributes_type")
_LIST_TYPES = ("tuple_type", "list_type", "set_type", "frozen_set_type")
"""Pydantic's kinds of errors: a value of another type in place of a section, or of a list."""
_EXPECTED = {
    **dict.fromkeys(_SECTION_TYPES, "must be a section with fields of its own"),
    **dict.fromkeys(_LIST_TYPES, "must be a list"),
    "dict_type": "must be a map of names to values",
    "string_type": "must be text",
}
"""Pydantic's kind of error -> what is expected."""
_EXPECTED_SCALARS = {
    "int_": "must be a whole number",
    "float_": "must be a number",
    "bool_": "must be true or false",
}
"""Beginning of pydantic's kind of error -> what is expected."""


def explain_problem(item: Any) -> str:
    """One pydantic error as a line.

    Example: `trainer.steps: must be a whole number, got 'ten'`.
    """
    loc = item["loc"]
    kind = item["type"]
    field = ".".join(_names_in(loc)) or "config"
    if kind == "extra_forbidden":
        return f"{field}: no such field{_similar(loc)}"
    if kind == "missing":
        return f"{field}: required, but not given"
    if kind == "value_error":  # in our own words
        return f"{field}: {_in_sentence(item)}"
    remedy = _remedy(item)
    hint = f"; {remedy}" if remedy else ""
    return f"{field}: {_expected(item)}, got {item['input']!r}{hint}"


def _names_in(loc: tuple[Any, ...]) -> list[str]:
    """The names of sections and fields, of lists' places, and of the user's in pydantic's path."""
    return [str(key) for key in loc if not _TAG.search(str(key))]


def _in_sentence(item: Any, beginning: str = "") -> str:
    """Pydantic's message without this beginning, to follow a colon."""
    message = str(item["msg"]).removeprefix("Value error, ").removeprefix(beginning)
    return f"{message[:1].lower()}{message[1:]}"


def _expected(item: Any) -> str:
    """What the field expects."""
    kind = item["type"]
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    for beginning, expected in _EXPECTED_SCALARS.items():
        if kind.startswith(beginning):
            return expected
    return _in_sentence(item, "Input ").replace("should be", "must be")


def _remedy(item: Any) -> str:
    """What to write in place of the value; empty where that is not clear."""
    kind = item["type"]
    value = item["input"]
    names = _names_in(item["loc"])
    name = names[-1] if names else ""
    information = _field_at(item["loc"])
    if kind in _SECTION_TYPES:
        return _as_section(information, name, value)
    if kind in _LIST_TYPES:
        return f"write {name}: {_as_list(information, value)}"
    if kind == "dict_type":
        is_single = isinstance(value, str | int | float) and not isinstance(value, bool)
        return f"write {name}: {_yaml({'NAME': value if is_single else 'VALUE'})}"
    if kind == "string_type":
        if isinstance(value, list | tuple | dict):
            return "give one value"
        return f"write it in quotes: {name}: {json.dumps(str(value))}"
    if kind == "literal_error" and information is not None:
        options = [str(option) for option in _options_of(information.annotation)]
        close = difflib.get_close_matches(str(value), options, n=1)
        return f"did you mean {close[0]!r}?" if close else ""
    return ""


_MAIN_FIELDS = {
    "RewardConfig": "function",
    "EnvironmentConfig": "use",
    "LoraConfig": "rank",
    "EvaluationConfig": "every",
    "ArchiveConfig": "enabled",
    "ExpectConfig": "eval_gain",
    "OptimizerConfig": "lr",
}
"""The field that a user most likely means who gives a value in place of the section."""


def _as_section(information: FieldInfo | None, name: str, value: Any) -> str:
    """How a value that stands in place of a section can be written within it, or which fields there are.

    `reward: gsm8k` gives "write reward: {function: gsm8k}": `function` is the section's main field.
    """
    section = _section_in(information.annotation) if information else RunConfig
    if section is None:
        return ""
    main = _MAIN_FIELDS.get(section.__name__, "")
    for field, inner in section.model_fields.items():
        is_text = isinstance(value, str)
        is_option = is_text and value in _options_of(inner.annotation)
        is_main = field == main or (is_text and inner.is_required())
        has_type = type(value) in _types_of(inner.annotation)
        if is_option or (is_main and has_type):
            return f"write {name}: {_yaml({field: value})}"
    return f"fields here: {', '.join(sorted(section.model_fields))}"


def _as_list(information: FieldInfo | None, value: Any) -> str:
    """A value as the list that was meant; where that is not clear, the default shows the form.

    "a, 2" gives [a, 2], and 3 gives [3]; but 0.9 for `betas` gives their default, [0.9, 0.999].
    """
    if isinstance(value, str):
        words = [word.strip() for word in value.split(",")]
        return _yaml([int(word) if word.isdecimal() else word for word in words])
    default = list(information.default) if information and isinstance(information.default, tuple) else []
    if isinstance(value, dict) or len(default) > 1:
        return _yaml(default) if default else "[A, B]"
    return _yaml([value])


def _options_of(annotation: Any) -> list[Any]:
    """The values that a field of options takes, also where it takes others too."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    options: list[Any] = []
    for inner in get_args(annotation):
        options += _options_of(inner)
    return options


def _types_of(annotation: Any) -> set[type]:
    """The plain types that a field takes."""
    if annotation in (str, int, bool):
        return {annotation}
    if annotation is float:
        return {int, float}
    types: set[type] = set()
    for inner in get_args(annotation):
        types |= _types_of(inner)
    return types


def _field_at(loc: tuple[Any, ...]) -> FieldInfo | None:
    """The field at a place in the config; None for the whole of it."""
    section: Any = RunConfig
    information: FieldInfo | None = None
    for name in loc:
        fields = getattr(section, "model_fields", {})
        if name in fields:  # else it is a name of the user's, or a place in a list
            information = fields[name]
            section = _section_in(fields[name].annotation)
    return information


def _yaml(value: Any) -> str:
    """A value in one line of YAML."""
    # "\n...": YAML's end of a document, which follows a plain value.
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).strip().removesuffix("\n...")


def _similar(loc: tuple[Any, ...]) -> str:
    """What may be meant by the unknown field at `loc`: a field of this name in other sections, one of a
    similar name in this section, or else any field of this section."""
    section: Any = RunConfig
    for key in loc[:-1]:
        if key in section.model_fields:  # else it is a name of the user's, or a place in a list
            section = _section_in(section.model_fields[key].annotation) or Section
    unknown = str(loc[-1])
    elsewhere = [path for path in _field_paths(RunConfig) if path.rpartition(".")[2] == unknown]
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere[:3])}?"
    names = sorted(section.model_fields)
    close = difflib.get_close_matches(unknown, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; fields here: {', '.join(names)}" if names else ""


def _field_paths(section: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields of a section and of the sections in it."""
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = _section_in(field.annotation)
        if inner:
            users_name = "<name>." if get_origin(field.annotation) is dict else ""
            yield from _field_paths(inner, f"{prefix}{name}.{users_name}")


def _section_in(annotation: Any) -> Any:
    """The section that a field holds, by itself or by names; None where it holds none."""
    annotation = read_later(annotation)
    if hasattr(annotation, "model_fields"):
        return annotation
    for inner in get_args(annotation):
        section = _section_in(inner)
        if section is not None:
            return section
    return None
