"""Reads a run's YAML file and its `--set` overrides, with errors that name field, value and remedy."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tidemill.common.config.algorithm import is_known_advantage
from tidemill.common.config.algorithms.table import PRESETS
from tidemill.common.config.run import RunConfig
from tidemill.common.config.section import number_of
from tidemill.common.errors import ConfigError
from tidemill.common.wire.surrogates import REMEDY, find_halves

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
    if _names_moved_algorithms(tree):
        from tidemill.common.config.algorithms.moved import with_examples

        tree = with_examples(tree)
    return parse_config(tree, origin)


def _names_moved_algorithms(tree: dict[str, Any]) -> bool:
    """Whether the algorithm has a name that this release does not know."""
    trainer = tree.get("trainer")
    algorithm = trainer.get("algorithm") if isinstance(trainer, dict) else None
    if not isinstance(algorithm, dict):
        return False
    preset = algorithm.get("preset")
    advantage = algorithm.get("advantage")
    has_other_preset = isinstance(preset, str) and preset not in PRESETS
    return has_other_preset or (isinstance(advantage, str) and not is_known_advantage(advantage))


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
        from tidemill.common.config.problems import explain_problems, find_guesses, find_unknown

        items = error.errors(include_url=False)
        problems = explain_problems(items)
        noun = "problem" if len(problems) == 1 else "problems"
        lines = "".join(f"\n  {problem}" for problem in problems)
        refusal = ConfigError(f"{origin}: {len(problems)} {noun}{lines}")
        refusal.unknown_fields = tuple(find_unknown(items))
        refusal.guesses = find_guesses(items)
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
    """Set one value in the tree; the value is read as YAML, so numbers, lists and null work. Where the field
    is text, so is a value that YAML would read otherwise: `bad.py:` is a map to it, `2026-01-31` a date."""
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
    is_plain = not raw.lstrip().startswith(("{", "[", "!", "&"))
    if is_plain and not isinstance(value, str | None):
        from tidemill.common.config.problems import is_text

        value = raw.strip() if is_text(keys) else value
    node = tree
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {key} is not a section but {child!r}")
        node = child
    node[keys[-1]] = value
