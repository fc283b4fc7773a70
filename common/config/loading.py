"""Reads a run's YAML file and its `--set` overrides, with errors that name field, value and remedy."""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from tidemill.common.config.algorithms.moved import with_examples
from tidemill.common.config.run import RunConfig
from tidemill.common.config.section import Section, number_of
from tidemill.common.errors import ConfigError
from tidemill.common.wire.surrogates import REMEDY, find_halves

_TAG = re.compile(r"^(constrained-)?(float|int|str)$|[]>]$")
"""Parts of pydantic's path that name no field: `float`, `constrained-int` and `list[str]` say which type of a
union was tried, `[key]` that a name in a map is wrong."""
UNREADABLE = (yaml.YAMLError, ValueError, RecursionError)
"""What reading YAML raises: ValueError for a date that does not exist (2026-02-30) or a number of thousands
of digits, RecursionError for lists or sections nested too deep."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice: the first one, perhaps a whole section, would be lost in silence."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        places: dict[tuple[str, Any], yaml.Mark] = {}
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in places:
                problem = f"found {key.value!r} again; keep one of them"
                raise yaml.composer.ComposerError("it is here", places[name], problem, key.start_mark)
            places[name] = key.start_mark
        return node


def load_config(
    path: Path,
    overrides: Iterable[str] = (),
    fitted: Callable[[dict[str, Any]], dict[str, Any]] = lambda tree: tree,
) -> RunConfig:
    """Read `path`, apply overrides of the form `section.field=value`, and validate.

    Relative paths in the file are relative to the file's folder. `fitted` changes the tree after the
    overrides and before the validation.

    Raises:
        ConfigError: the file is missing or not YAML, an override has the wrong form, or a field is bad.
    """
    tree = _read_tree(path)
    for override in overrides:
        _apply_override(tree, override)
    return parse_config(fitted(tree), str(path), path.resolve().parent)


def load_recorded(path: Path) -> RunConfig:
    """The config that a run has written into its folder, complete.

    Raises:
        ConfigError: there is none, or this release does not understand it.
    """
    return parse_recorded(_read_tree(path), str(path))


def parse_recorded(tree: dict[str, Any], origin: str) -> RunConfig:
    """As `parse_config`, for a config that a run has recorded, perhaps under an earlier release: names that
    were built in there, and are examples now, are no error."""
    return parse_config(with_examples(tree), origin)


def _read_tree(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {path}: {error.strerror}. Give an existing YAML file."
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error}") from None
    try:
        tree = _Loader(text).get_single_data()
    except UNREADABLE as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(tree).__name__}")
    return tree


def parse_config(tree: dict[str, Any], origin: str, base: Path | None = None) -> RunConfig:
    """Validate a tree of plain values; `origin` names it in errors, and paths are relative to `base`."""
    # Half of a surrogate pair in a text: no tokenizer can encode it.
    half = next(find_halves(tree, ""), None)
    if half:
        raise ConfigError(f"{origin}: {half}; {REMEDY}.")
    try:
        return RunConfig.model_validate(tree, context={"base": base})
    except ValidationError as error:
        items = error.errors(include_url=False)
        noun = "problem" if len(items) == 1 else "problems"
        lines = "".join(f"\n  {_explain(item)}" for item in items)
        refusal = ConfigError(f"{origin}: {len(items)} {noun}{lines}")
        unknown = (item["loc"] for item in items if item["type"] == "extra_forbidden")
        refusal.unknown_fields = tuple(".".join(map(str, loc)) for loc in unknown)
        raise refusal from None


def override_config(config: RunConfig, overrides: Iterable[str]) -> RunConfig:
    """The config with some fields replaced, for one process only.

    Raises:
        ConfigError: as in `load_config`.
    """
    tree = config.model_dump(mode="json")
    for override in overrides:
        _apply_override(tree, override)
    return parse_config(tree, "--set")


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one value in the tree; the value is read as YAML, so numbers, lists and null work."""
    dotted, equals, raw = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"--set {override!r} must have the form section.field=value")
    try:
        value = _Loader(raw).get_single_data()
    except UNREADABLE:
        value = raw
    # Where YAML reads the value as text, it may still be a number: `1e-4`.
    if value == raw.strip():
        value = number_of(value)
    node = tree
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {key} is not a section but {child!r}")
        node = child
    node[keys[-1]] = value


def _explain(item: Any) -> str:
    """One pydantic error as a line: field, what is allowed, what was given."""
    field = ".".join(str(key) for key in item["loc"] if not _TAG.search(str(key))) or "config"
    if item["type"] == "extra_forbidden":
        return f"{field}: no such field{_similar(item['loc'])}"
    if item["type"] == "missing":
        return f"{field}: required, but not given"
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{field}: {message[:1].lower()}{message[1:]}"
    value = item["input"]
    expected, remedy = _expected(item)
    if not expected:
        expected = message.removeprefix("Input ")
        expected = f"{expected[:1].lower()}{expected[1:]}".replace("should be", "must be")
    hint = f"; {remedy}" if remedy else ""
    return f"{field}: {expected}, got {value!r}{hint}"


def _expected(item: Any) -> tuple[str, str]:
    """What a field expects where it got a value of another type, and what to write; both may be empty."""
    kind = item["type"]
    value = item["input"]
    loc = item["loc"]
    names = [str(name) for name in loc if not _TAG.search(str(name))]
    name = names[-1] if names else ""
    information = _field_at(loc)
    if kind in ("model_type", "model_attributes_type"):
        return "must be a section with fields of its own", _as_section(information, name, value)
    if kind == "dict_type":
        is_single = isinstance(value, str | int | float) and not isinstance(value, bool)
        example = _yaml({"NAME": value if is_single else "VALUE"})
        return "must be a map of names to values", f"write {name}: {example}"
    if kind in ("tuple_type", "list_type", "set_type", "frozen_set_type"):
        return "must be a list", f"write {name}: {_as_list(information, value)}"
    if kind == "string_type":
        is_several = isinstance(value, list | tuple | dict)
        hint = "give one value" if is_several else f"write it in quotes: {name}: {json.dumps(str(value))}"
        return "must be text", hint
    for prefix, expected in _SCALARS.items():
        if kind.startswith(prefix):
            return expected, ""
    if kind == "literal_error" and information is not None:
        options = [str(option) for option in _options_of(information.annotation)]
        close = difflib.get_close_matches(str(value), options, n=1)
        return "", f"did you mean {close[0]!r}?" if close else ""
    return "", ""


_SCALARS = {"int_": "must be a whole number", "float_": "must be a number", "bool_": "must be true or false"}
"""Prefix of pydantic's kind of error -> what is expected."""
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
    if hasattr(annotation, "model_fields"):
        return annotation
    for inner in get_args(annotation):
        section = _section_in(inner)
        if section is not None:
            return section
    return None
