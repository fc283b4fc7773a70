"""A problem of a config as a line: the field, what it expects, what it got, and what to write.

Pydantic finds the problem; what helps is read off the sections: their fields, options, types and defaults.
"""

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from tidemill.common.config.run import RunConfig
from tidemill.common.config.section import Section, read_later

_TAG = re.compile(r"^(constrained-)?(float|int|str|bool)$|[]>]$")
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


_FORMS = {
    (
        "weights",
        "url",
    ): "the address of a weight server (http:// or https://) or of a store (s3://bucket/folder, "
    "gs:// or az://), or empty",
    (
        "streams",
        "claim_check_url",
    ): "the address of a store, such as s3://bucket/folder (gs:// and az:// work too), or empty",
    ("api_key_env",): "the name of an environment variable, such as JUDGE_KEY: letters, digits and _",
    ("run_id",): "letters, digits, '.', '_' and '-', at most 100, of which the first is a letter or digit",
    ("keep_best",): "score, accuracy, pass_at_k or pass_at_N, perhaps of one set, as in SET/score; or empty",
    (
        "train",
        "name",
    ): "letters, digits, '.', '_' and '-', at most 64, of which the first is a letter or digit",
    ("rewards",): "a name of letters, digits, '_' and '-', at most 64",
    ("servers",): "a name of letters, digits, '_' and '-', at most 64",
    ("choices",): "a word that is not blank",
}
"""Names of sections and fields, or of the map whose key is wrong -> the form of text that is expected."""


def explain_problems(items: Sequence[Any]) -> list[str]:
    """Pydantic's errors as lines: one for each field. A field of several types has an error of each.

    Example: `reward.on_failure: must be 'drop_sample' or 'drop_group', or a number, got 'zero'`.
    """
    by_field: dict[str, list[Any]] = {}
    for number, item in enumerate(items):
        last_name = str(item["loc"][-1]) if item["loc"] else ""
        is_tried = bool(_TAG.search(last_name)) and last_name != "[key]"
        # What is no type of a union that was tried stands by itself.
        group = ".".join(_names_in(item["loc"])) if is_tried else f"{number}."
        by_field.setdefault(group, []).append(item)
    return [_explain(of_field) for of_field in by_field.values()]


def _explain(items: Sequence[Any]) -> str:
    if len(items) == 1:
        return explain_problem(items[0])
    field = ".".join(_names_in(items[0]["loc"]))
    expected = [_expected(item).removeprefix("must be ") for item in items]
    hints = [hint for hint in map(_remedy, items) if hint]
    hint = f"; {hints[0]}" if hints else ""
    return f"{field}: must be {', or '.join(expected)}, got {items[0]['input']!r}{hint}"


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
    form = _form_of(item["loc"]) if kind == "string_pattern_mismatch" else ""
    if form:
        return f"must be {form}"
    for beginning, expected in _EXPECTED_SCALARS.items():
        if kind.startswith(beginning):
            return expected
    return _in_sentence(item, "Input ").replace("should be", "must be")


def _form_of(loc: tuple[Any, ...]) -> str:
    """The form of text that is expected there, in words; empty where it has none."""
    names = [str(key) for key in loc if not isinstance(key, int) and not str(key).startswith("<")]
    if names[-1] == "[key]":
        names = names[:-2]
    for ending, form in _FORMS.items():
        if tuple(names[-len(ending) :]) == ending:
            return form
    return ""


def _remedy(item: Any) -> str:
    """What to write in place of the value; empty where that is not clear."""
    kind = item["type"]
    value = item["input"]
    names = _names_in(item["loc"])
    # A place in a list has no name.
    beginning = f"{names[-1]}: " if names and not isinstance(item["loc"][-1], int) else ""
    information = _field_at(item["loc"])
    if kind in _SECTION_TYPES:
        return _as_section(information, beginning, value)
    if kind in _LIST_TYPES:
        return f"write {beginning}{_as_list(information, value)}"
    if kind == "dict_type":
        is_single = isinstance(value, str | int | float) and not isinstance(value, bool)
        return f"write {beginning}{_yaml({'NAME': value if is_single else 'VALUE'})}"
    if kind == "string_type":
        if isinstance(value, list | tuple | dict):
            return "give one value"
        return f"write it in quotes: {beginning}{json.dumps(str(value))}"
    if kind == "literal_error" and information is not None:
        options = [str(option) for option in _options_of(information.annotation)]
        close = difflib.get_close_matches(str(value), options, n=1)
        return f"did you mean {close[0]!r}?" if close else ""
    return ""


_MAIN_FIELDS = {
    "RewardConfig": "function",
    "NamedRewardConfig": "function",
    "SourceConfig": "path",
    "EnvironmentConfig": "use",
    "LoraConfig": "rank",
    "EvaluationConfig": "every",
    "ArchiveConfig": "enabled",
    "ExpectConfig": "eval_gain",
    "OptimizerConfig": "lr",
}
"""The field that a user most likely means who gives a value in place of the section."""


def _as_section(information: FieldInfo | None, beginning: str, value: Any) -> str:
    """How a value that stands in place of a section can be written within it, or which fields there are.

    `reward: gsm8k` gives "write reward: {function: gsm8k}": `function` is the section's main field. Other
    fields that it requires have a placeholder: "write {name: NAME, path: b.jsonl}".
    """
    section = _section_in(information.annotation) if information else RunConfig
    if section is None:
        return ""
    main = _MAIN_FIELDS.get(section.__name__, "")
    for field, inner in section.model_fields.items():
        is_text = isinstance(value, str)
        is_option = is_text and value in _options_of(inner.annotation)
        is_main = field == main if main else is_text and inner.is_required()
        has_type = type(value) in _types_of(inner.annotation)
        if is_option or (is_main and has_type):
            required = [name for name, each in section.model_fields.items() if each.is_required()]
            placeholders = {name: name.upper() for name in required if name != field}
            return f"write {beginning}{_yaml(placeholders | {field: value})}"
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
    elsewhere = _fields_called(unknown)
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere[:3])}?"
    names = sorted(section.model_fields)
    close = difflib.get_close_matches(unknown, names, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; fields here: {', '.join(names)}" if names else ""


def _fields_called(name: str) -> list[str]:
    """Dotted names of the fields of this name in all sections."""
    return [path for path in _field_paths(RunConfig) if path.rpartition(".")[2] == name]


def find_unknown(items: Iterable[Any]) -> dict[str, tuple[Any, ...]]:
    """Unknown fields by their dotted names, each with its path as pydantic gives it."""
    unknown = [item["loc"] for item in items if item["type"] == "extra_forbidden"]
    return {".".join(_names_in(loc)): loc for loc in unknown}


def find_guesses(items: Iterable[Any]) -> dict[str, str]:
    """The ends of the lines on unknown fields, by field, that only guess: from names that look similar."""
    unknown = find_unknown(items)
    return {field: _similar(loc) for field, loc in unknown.items() if not _fields_called(str(loc[-1]))}


def is_text(path: Sequence[str]) -> bool:
    """Whether the field at this place in the config takes text, and nothing else but perhaps null."""
    information = _field_at(tuple(path))
    return information is not None and _takes_only_text(information.annotation)


def _takes_only_text(annotation: Any) -> bool:
    if get_origin(annotation) is Annotated:
        return _takes_only_text(get_args(annotation)[0])
    inner = [each for each in get_args(annotation) if each is not type(None)]
    is_union = get_origin(annotation) in (Union, UnionType)
    return annotation is str or (is_union and all(map(_takes_only_text, inner)))


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
