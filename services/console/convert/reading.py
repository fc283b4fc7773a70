"""Reads what people have: YAML, JSON, TOML, shell scripts, Python with a GRPOConfig. Nothing of it is run."""

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from tidemill.common.errors import ConfigError
from tidemill.services.console.convert.python_calls import read_calls
from tidemill.services.console.convert.shell import read_commands

Project = Literal["verl", "trl", "prime-rl"]
_HYDRA = re.compile(r"^\+{0,2}[A-Za-z_][\w]*(\.[\w]+)+=")
_VARIABLE = re.compile(r"^[A-Z_][A-Z0-9_]*=")
_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_REFERENCE = re.compile(r"^\$\{([\w.]+)\}$")


def read_options(
    path: Path, overrides: Iterable[str], project: Project | None
) -> tuple[Project, dict[str, Any]]:
    """Which project a file is for, and its options by dotted name; overrides win.

    Raises:
        ConfigError: the file cannot be read, is of no known kind, or holds no options.
    """
    text = _text_of(path)
    given = list(overrides)
    kind = path.suffix.lower()
    if kind in (".sh", ".bash", ".slurm"):
        found = _from_script(text, [word for word in given if _VARIABLE.match(word)], project)
        given = [word for word in given if not _VARIABLE.match(word)]
        project = project or ("verl" if any("." in name for name in found) else "trl")
    elif kind == ".py":
        project, found = project or "trl", {"file": path.name, **read_calls(text, path)}
    elif kind == ".toml":
        project, found = project or "prime-rl", flatten(_parsed(tomllib.loads, text, path))
    elif kind in (".yaml", ".yml", ".json"):
        found = flatten(_parsed(json.loads if kind == ".json" else yaml.safe_load, text, path))
        project = project or (
            "verl" if any(name.startswith("actor_rollout_ref.") for name in found) else "trl"
        )
    else:
        raise ConfigError(f"{path} ends in {kind or 'nothing'}; expected .yaml, .json, .toml, .sh or .py")
    found = _resolved(found | dict(_from_words(given)))
    if not found:
        raise ConfigError(f"{path} holds no options of verl, TRL or prime-rl")
    return project, found


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _parsed(parse: Any, text: str, path: Path) -> dict[str, Any]:
    try:
        tree = parse(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be parsed: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold a mapping of options, got {type(tree).__name__}")
    return tree


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree as dotted names; lists stay values."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{name}.")
        elif not isinstance(value, Mapping):
            flat[f"{prefix}{name}"] = number(value)
    return flat


def number(value: Any) -> Any:
    """YAML reads `1e-6` as text; people mean the number."""
    is_number = isinstance(value, str) and _SCIENTIFIC.fullmatch(value.strip())
    return float(value) if is_number else value


def _resolved(options: Mapping[str, Any]) -> dict[str, Any]:
    """References to other options followed; what refers to anything else counts as not given."""
    resolved = {}
    for name, value in options.items():
        for _ in range(8):
            if not isinstance(value, str) or not (found := _REFERENCE.match(value)):
                break
            value = options.get(found[1], "${}")
        if not (isinstance(value, str) and value.startswith("${")) and value != "???":
            resolved[name] = value
    return resolved


def _from_words(words: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Options of a command line: `key=value`, Hydra's `+key=value`, `--key value`, `--key=value`, `--key`."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, raw = word.removeprefix("--").lstrip("+").partition("=")
        if equals:
            yield name, _value(raw)
        elif word.startswith("--"):
            values = []
            while rest and not rest[0].startswith("--"):
                values.append(_value(rest.pop(0)))
            yield name, True if not values else values[0] if len(values) == 1 else values
        else:
            raise ConfigError(f"{word!r} is no option: expected key=value or --key value")


def _value(raw: str) -> Any:
    try:
        return number(yaml.safe_load(raw)) if raw else ""
    except yaml.YAMLError:
        return raw


def _from_script(text: str, variables: Iterable[str], project: Project | None) -> dict[str, Any]:
    """The options of the last command that has any."""
    environment = {"HOME": "~"} | dict(word.split("=", 1) for word in variables)
    commands = read_commands(text, environment)
    processes = _processes(commands)
    for words in reversed(commands):
        hydra = [word for word in words if _HYDRA.match(word)]
        if hydra and project != "trl":
            module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
            return {"module": module, **dict(_from_words(hydra))}
    for words in reversed(commands):
        start = next((at for at, word in enumerate(words) if word == "grpo" or word.endswith(".py")), None)
        if start is not None:
            return processes | dict(_from_words(words[start + 1 :]))
    return processes


def _processes(commands: list[list[str]]) -> dict[str, Any]:
    """How many processes `accelerate launch` or `torchrun` starts."""
    for words in reversed(commands):
        for name in ("--num_processes", "--nproc_per_node", "--nproc-per-node"):
            if name in words[:-1] and (count := words[words.index(name) + 1]).isdigit():
                return {"num_processes": int(count)}
            for word in words:
                if word.startswith(name + "=") and word.partition("=")[2].isdigit():
                    return {"num_processes": int(word.partition("=")[2])}
    return {}
