"""Reads YAML, JSON, TOML, shell scripts, and Python with a GRPOConfig. Nothing of it is run."""

import ast
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tidemill.common.errors import ConfigError
from tidemill.services.console.convert.script import Script, Unknown
from tidemill.services.console.convert.table import Project

SCRIPTS = (".sh", ".bash", ".slurm")
_HYDRA = re.compile(r"^\+{0,2}[A-Za-z_]\w*(\.\w+)+=")
_VARIABLE = re.compile(r"^[A-Z_][A-Z0-9_]*=")
_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_REFERENCE = re.compile(r"^\$\{([\w.]+)\}$")
_PROCESSES = re.compile(r"--(?:num_processes|nproc[_-]per[_-]node)[= ](\d+)(?= |$)")
_OBJECTS = ("reward_funcs", "train_dataset", "eval_dataset", "peft_config", "tools", "environment_factory")
"""Arguments of GRPOTrainer that no literal can be: their source says what they are."""


def read_options(
    path: Path, overrides: Iterable[str], project: Project | None
) -> tuple[Project, dict[str, Any]]:
    """Which project a file is for, and its options by dotted name; overrides win.

    Raises:
        ConfigError: the file cannot be read, is of no known kind, or holds no options.
    """
    given, kind = list(overrides), path.suffix.lower()
    try:
        text = path.read_text(encoding="utf-8")
        if kind in SCRIPTS:
            variables = dict(word.split("=", 1) for word in given if _VARIABLE.match(word))
            given = [word for word in given if not _VARIABLE.match(word)]
            found = _of_script(Script(variables).read(text), project)
        elif kind == ".py":
            project, found = project or "trl", {"file": path.name, **_of_calls(text, path)}
        elif kind == ".toml":
            project, found = project or "prime-rl", _flat(tomllib.loads(text))
        elif kind in (".yaml", ".yml", ".json"):
            found = _flat(json.loads(text) if kind == ".json" else yaml.safe_load(text))
        else:
            raise ConfigError(f"{path} ends in {kind or 'nothing'}; expected .yaml, .json, .toml, .sh or .py")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, SyntaxError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    is_verl = any("." in name if kind in SCRIPTS else name.startswith("actor_rollout_ref.") for name in found)
    found = _resolved(found | dict(_of_words(given)))
    if not found:
        raise ConfigError(f"{path} holds no options of verl, TRL or prime-rl")
    return project or ("verl" if is_verl else "trl"), found


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """A tree as dotted names; lists stay values."""
    if not isinstance(tree, Mapping):
        raise ValueError(f"it must hold a mapping of options, got {type(tree).__name__}")
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = _number(value)
    return flat


def _number(value: Any) -> Any:
    """YAML reads `1e-6` as text; the number is meant."""
    is_number = isinstance(value, str) and _SCIENTIFIC.fullmatch(value.strip())
    return float(value) if is_number else value


def _resolved(options: Mapping[str, Any]) -> dict[str, Any]:
    """References to other options followed; what refers to anything else counts as not given."""
    resolved = {}
    for name, value in options.items():
        for _ in range(8):
            if isinstance(value, str) and (found := _REFERENCE.match(value)):
                value = options.get(found[1], "${}")
        is_open = isinstance(value, str) and value.startswith("${") and not isinstance(value, Unknown)
        if not is_open and value != "???":
            resolved[name] = value
    return resolved


def _of_words(words: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Options of a command line: `key=value`, Hydra's `+key=value`, `--key value`, `--key=value`, `--key`."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, raw = word.removeprefix("--").lstrip("+").partition("=")
        if equals:
            yield name, Unknown(raw) if isinstance(word, Unknown) else _value(raw)
        elif word.startswith("--"):
            values = []
            while rest and not rest[0].startswith("--"):
                values.append(_value(rest.pop(0)))
            yield name, True if not values else values[0] if len(values) == 1 else values
        elif isinstance(word, Unknown):
            yield word, word
        else:
            raise ConfigError(f"{word!r} is no option: expected key=value or --key value")


def _value(raw: str) -> Any:
    if isinstance(raw, Unknown) or not raw:
        return raw
    try:
        return _number(yaml.safe_load(raw))
    except yaml.YAMLError:
        return raw


def _of_script(commands: list[list[str]], project: Project | None) -> dict[str, Any]:
    """The options of the last command that has any: Hydra's, or those behind `grpo` or a Python file."""
    found = [count[1] for words in commands if (count := _PROCESSES.search(" ".join(words)))]
    processes = {"num_processes": int(found[-1])} if found else {}
    for words in reversed(commands):
        first = next((at for at, word in enumerate(words) if _HYDRA.match(word)), None)
        if first is not None and project != "trl":
            module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
            options = [word for word in words[first:] if _HYDRA.match(word) or isinstance(word, Unknown)]
            return {"module": module, **dict(_of_words(options))}
    for words in reversed(commands):
        start = next((at for at, word in enumerate(words) if word == "grpo" or word.endswith(".py")), None)
        if start is not None:
            return processes | dict(_of_words(words[start + 1 :]))
    return processes


def _of_calls(text: str, path: Path) -> dict[str, Any]:
    """Arguments of `GRPOConfig(...)` and `GRPOTrainer(...)`; `args.name` is the default of `add_argument`."""
    names: dict[str, ast.expr] = {}
    calls = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign):
            names |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Call):
            calls.append((ast.unparse(node.func).rpartition(".")[2], node))
    for name, call in calls:
        if name == "add_argument" and call.args and isinstance(call.args[0], ast.Constant):
            option = str(call.args[0].value).lstrip("-").replace("-", "_")
            names |= {f"args.{option}": item.value for item in call.keywords if item.arg == "default"}
    found = {
        item.arg: _literal(item.value, names, item.arg in _OBJECTS)
        for name, call in calls
        for item in call.keywords
        if item.arg and (name == "GRPOConfig" or (name == "GRPOTrainer" and item.arg in (*_OBJECTS, "model")))
    }
    if not any(name in ("GRPOConfig", "GRPOTrainer") for name, _ in calls):
        raise ConfigError(f"{path} has no call of GRPOConfig or GRPOTrainer")
    return found


def _literal(node: ast.expr, names: Mapping[str, ast.expr], is_object: bool, depth: int = 0) -> Any:
    source = ast.unparse(node)
    if source in names and depth < 8:
        return _literal(names[source], names, is_object, depth + 1)
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item, names, is_object, depth + 1) for item in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return source if is_object else Unknown(source)
