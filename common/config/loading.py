"""Reads a run's YAML file and its `--set` overrides, with errors that name field, value and remedy."""

import glob
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from tidemill.common.config.data import TRAIN_KINDS
from tidemill.common.config.run import RunConfig
from tidemill.common.errors import ConfigError

_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def load_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read `path`, apply overrides of the form `section.field=value`, and validate.

    Relative paths in the file are relative to the file's folder.

    Raises:
        ConfigError: the file is missing or not YAML, an override has the wrong form, or a field is bad.
    """
    tree = read_tree(path)
    for override in overrides:
        _apply_override(tree, override)
    _resolve_paths(tree, path.resolve().parent)
    return parse_config(tree, str(path))


def read_tree(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ConfigError: the file is missing, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {path}: {error.strerror}. Give an existing YAML file."
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error}") from None
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of sections, got {type(tree).__name__}")
    return tree


def parse_config(tree: dict[str, Any], origin: str) -> RunConfig:
    """Validate a tree of plain values; `origin` names it in errors."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        items = error.errors(include_url=False)
        lines = "".join(f"\n  {_explain(item)}" for item in items)
        refusal = ConfigError(f"{origin}: {len(items)} problem(s){lines}")
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
        value = yaml.safe_load(raw)
    except yaml.YAMLError:
        value = raw
    if value == raw.strip() and _SCIENTIFIC.fullmatch(value):
        value = float(value)  # YAML reads `1e-5` as text; people mean the number
    node = tree
    for key in keys[:-1]:
        child = node.setdefault(key, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override!r}: {key} is not a section but {child!r}")
        node = child
    node[keys[-1]] = value


def _resolve_paths(tree: dict[str, Any], base: Path) -> None:
    """Make paths relative to the config file absolute where they exist there."""

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if isinstance(value, str) and value and not Path(value).is_absolute():
            file, colon, name = value.rpartition(":") if ".py:" in value else (value, "", "")
            folder, at, split = value.rpartition("@")  # a split of a dataset's folder
            if at and (base / folder).is_dir():
                return f"{(base / folder).resolve()}@{split}"
            if value.startswith((".", "/")) or (base / file).exists() or any(_matches(base, value)):
                return f"{(base / file).resolve()}{colon}{name}"
        return value

    model, data, reward, trainer = (tree.get(name) for name in ("model", "data", "reward", "trainer"))
    algorithm = trainer.get("algorithm") if isinstance(trainer, dict) else None
    if isinstance(algorithm, dict):
        algorithm |= {name: resolve(algorithm[name]) for name in ("advantage", "loss") if name in algorithm}
    rollout = tree.get("rollout")
    environment = rollout.get("environment") if isinstance(rollout, dict) else None
    if isinstance(environment, dict):
        names = [name for name in ("use", "tools", "agent") if name in environment]
        environment |= {name: resolve(environment[name]) for name in names}
    if isinstance(model, dict) and "path" in model:
        model["path"] = resolve(model["path"])
    if isinstance(data, dict):
        data["train"] = resolve(data.get("train"))
        for source in data["train"] if isinstance(data["train"], list) else ():
            if isinstance(source, dict) and "path" in source:
                source["path"] = resolve(source["path"])
        if isinstance(data.get("eval"), dict):
            data["eval"] = {name: resolve(value) for name, value in data["eval"].items()}
    servers = tree.get("servers")
    for section in servers.values() if isinstance(servers, dict) else ():
        if isinstance(section, dict) and "local" in section and "model" in section:
            section["model"] = resolve(section["model"])
    if isinstance(reward, dict):
        named = reward.get("rewards")
        for section in (reward, *(named.values() if isinstance(named, dict) else ())):
            for name in ("function", "group", "tokenizer"):
                if isinstance(section, dict) and name in section:
                    section[name] = resolve(section[name])
            if isinstance(section, dict):
                _resolve_asking(section, resolve, base)


def _matches(base: Path, value: str) -> Iterator[str]:
    """The files of a pattern such as `data/*.parquet`."""
    return glob.iglob(str(base / value), recursive=True) if glob.has_magic(value) else iter(())


def _resolve_asking(section: dict[str, Any], resolve: Callable[[Any], Any], base: Path) -> None:
    """The paths of rewards that ask servers; a template is read here, for workers elsewhere."""
    for kind in ("judge", "model", "teacher"):
        asking = section.get(kind)
        if not isinstance(asking, dict):
            continue
        if isinstance(verdict := asking.get("verdict"), dict) and "function" in verdict:
            verdict["function"] = resolve(verdict["function"])
        template = asking.get("template")
        if isinstance(template, str) and template and not any(sign in template for sign in "{\n"):
            try:  # a text without a field would show nothing of the sample, so it names a file
                asking["template"] = (base / template).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{kind}.template: cannot read the file {base / template}: {error}"
                ) from None


def _explain(item: Any) -> str:
    """One pydantic error as a line: field, what is allowed, what was given."""
    field = ".".join(str(part) for part in item["loc"] if part not in TRAIN_KINDS) or "config"
    if item["type"] == "extra_forbidden":
        return f"{field}: no such field{_similar(item['loc'])}"
    if item["type"] == "missing":
        return f"{field}: required, but not given"
    message = str(item["msg"]).removeprefix("Value error, ")
    given = f", got {item['input']!r}" if item["type"] != "value_error" else ""
    return f"{field}: {message[:1].lower()}{message[1:]}{given}"


def _field_paths(section: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields of a section and of the sections in it."""
    for name, found in section.model_fields.items():
        yield prefix + name
        if hasattr(found.annotation, "model_fields"):
            yield from _field_paths(found.annotation, f"{prefix}{name}.")


def _similar(loc: tuple[Any, ...]) -> str:
    """Suggest the field that was probably meant."""
    import difflib

    section: Any = RunConfig
    for part in loc[:-1]:
        found = section.model_fields.get(part)
        section = getattr(found, "annotation", None)
        if not hasattr(section, "model_fields"):
            return ""
    names = sorted(section.model_fields)
    if elsewhere := [path for path in _field_paths(RunConfig) if path.rpartition(".")[2] == str(loc[-1])]:
        return f"; did you mean {' or '.join(elsewhere[:3])}?"
    close = difflib.get_close_matches(str(loc[-1]), names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; fields here: {', '.join(names)}"
