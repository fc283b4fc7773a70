"""Reads YAML, JSON, TOML, shell scripts, and Python with a GRPOConfig. No code in them is run.

In a script, a variable that is set in a condition, or by a program, has no known value: what depends on it is
`Unknown`, and so is a value in Python that is no literal.
"""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from operator import add, floordiv, mod, mul, sub
from pathlib import Path
from typing import Any

import yaml

from tidemill.common.config.loading import UNREADABLE
from tidemill.common.config.section import flatten, number_of
from tidemill.common.errors import ConfigError
from tidemill.services.console.convert.table import Project

LAUNCHER = "launch."
"""Before the names of options of the program that starts a script."""
SCRIPTS = (".sh", ".bash", ".slurm")
_HYDRA = re.compile(r"^\+{0,2}[A-Za-z_]\w*(\.\w+)+=")
_OVERRIDE = re.compile(r"^\+{0,2}[A-Za-z_][\w./@]*=")
_HYDRA_FLAGS = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}
_REDIRECTION = re.compile(r"^(\d|&)?[<>]{1,2}&?(?!\$<)")
_NODES = re.compile(r"--nnodes[= ](\d+)(?= |$)")
_SCRIPT_VARIABLE = re.compile(r"^[A-Z_][A-Z0-9_]*=")
_REFERENCE = re.compile(r"^\$\{([\w.]+)\}$")
_PROCESSES = re.compile(r"--(?:num[_-]processes|nproc[_-]per[_-]node|num[_-]gpus)[= ](\d+)(?= |$)")
_OBJECTS = ("reward_funcs", "train_dataset", "eval_dataset", "peft_config", "tools", "environment_factory")
"""Arguments of GRPOTrainer that no literal can be: their source says what they are."""
_POSITIONAL = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")
"""Arguments of GRPOTrainer that may be given without their names."""


class Unknown(str):
    """Source text in place of a value that only running the file would give."""

    __slots__ = ()


def read_options(
    path: Path, overrides: Iterable[str], project: Project | None
) -> tuple[Project, dict[str, Any]]:
    """Which project a file is for, and its options by dotted name; overrides win."""
    words = list(overrides)
    kind = path.suffix.lower()
    try:
        text = path.read_text(encoding="utf-8")
        if kind in SCRIPTS:
            variables = dict(word.split("=", 1) for word in words if _SCRIPT_VARIABLE.match(word))
            words = [word for word in words if not _SCRIPT_VARIABLE.match(word)]
            options = _of_script(Script(variables).read(text), project)
        elif kind == ".py":
            project = project or "trl"
            options = {"file": path.name, **_of_calls(text, path)}
        elif kind == ".toml":
            project = project or "prime-rl"
            options = _flat(tomllib.loads(text))
        elif kind in (".yaml", ".yml", ".json"):
            options = _flat(json.loads(text) if kind == ".json" else yaml.safe_load(text))
        else:
            raise ConfigError(f"{path} ends in {kind or 'nothing'}; expected .yaml, .json, .toml, .sh or .py")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (SyntaxError, *UNREADABLE) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    of_script = [name for name in options if not name.startswith(LAUNCHER)]
    is_verl = any(
        "." in name if kind in SCRIPTS else name.startswith("actor_rollout_ref.") for name in of_script
    )
    options = _resolved(options | dict(_of_words(words)))
    if not options:
        raise ConfigError(f"{path} holds no options of verl, TRL or prime-rl")
    return project or ("verl" if is_verl else "trl"), options


def _flat(tree: Any) -> dict[str, Any]:
    if not isinstance(tree, Mapping) or not tree:
        raise ValueError(f"it must hold a mapping of options, got {type(tree).__name__}")
    return {name: number_of(value) for name, value in flatten(tree).items()}


def _resolved(options: Mapping[str, Any]) -> dict[str, Any]:
    """Resolves references to other options; an option that refers to anything else counts as not given."""
    resolved = {}
    for name, value in options.items():
        for _ in range(8):
            if isinstance(value, str) and (reference := _REFERENCE.match(value)):
                value = options.get(reference[1], "${}")
        is_open = isinstance(value, str) and value.startswith("${") and not isinstance(value, Unknown)
        if not is_open and value != "???":
            resolved[name] = value
    return resolved


def _of_words(words: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Options of a command line: `key=value`, Hydra's `+key=value`, `--key value`, `--key=value`, `--key`."""
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, raw = word.removeprefix("--").lstrip("+").partition("=")
        if equals:
            yield name, Unknown(raw) if isinstance(word, Unknown) else _value(raw)
        elif word.startswith("--"):
            values = []
            while remaining and not remaining[0].startswith("--"):
                values.append(_value(remaining.pop(0)))
            if not values:
                yield name, True
            elif len(values) == 1:
                yield name, values[0]
            else:
                yield name, values
        elif isinstance(word, Unknown):
            yield word, word
        else:
            raise ConfigError(f"{word!r} is no option: expected key=value or --key value")


def _value(raw: str) -> Any:
    if isinstance(raw, Unknown) or not raw:
        return raw
    try:
        return number_of(yaml.safe_load(raw))
    except UNREADABLE:
        return raw


def _of_script(commands: list[list[str]], project: Project | None) -> dict[str, Any]:
    """The options of the last command that has any: Hydra's, or those behind `grpo` or a Python file."""
    for words in reversed(commands if project != "trl" else []):
        if any(map(_HYDRA.match, words)):
            return _of_hydra(_without_redirections(words))
    values: dict[str, Any] = {}
    for words in commands:
        values |= _num_processes(words)
    for words in reversed(commands):
        for at, word in enumerate(words):
            if word == "grpo" or word.endswith(".py"):
                options = _without_redirections(words[at + 1 :])
                return values | _of_launcher(words[:at]) | dict(_of_words(options))
    return values


def _of_hydra(words: list[str]) -> dict[str, Any]:
    """Options of a command with Hydra's overrides. Its other words are kept under their own names: all
    are converted or listed."""
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    scripts = [word for word in words if word.endswith(".py")]
    first = next(at for at, word in enumerate(words) if _HYDRA.match(word))
    if module or scripts:
        first = words.index(module or scripts[-1]) + 1
    options: dict[str, Any] = {"module": module}
    remaining = words[first:]
    while remaining:
        word = remaining.pop(0)
        if isinstance(word, Unknown) or _OVERRIDE.match(word):
            options |= dict(_of_words([word]))
        elif word.startswith("-") and "=" not in word and remaining and not remaining[0].startswith("-"):
            options[_HYDRA_FLAGS.get(word, word)] = remaining.pop(0)
        else:
            name, _, value = word.partition("=")
            options[_HYDRA_FLAGS.get(name, name)] = value or True
    return options


def _num_processes(words: list[str]) -> dict[str, Any]:
    """How many processes a launcher starts: accelerate says all, torchrun those of one machine."""
    line = " ".join(words)
    count = _PROCESSES.search(line)
    if not count:
        return {}
    nodes = _NODES.search(line) if "nproc" in count[0] else None
    return {"num_processes": int(count[1]) * int(nodes[1] if nodes else 1)}


def _of_launcher(words: list[str]) -> dict[str, Any]:
    """Options of the program that starts the script, such as `launch.config_file`."""
    first = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    options: dict[str, Any] = {}
    for word in words[first:]:
        name, _, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and not _PROCESSES.search(f"{word} 1"):
            options[LAUNCHER + name.replace("-", "_")] = _value(value) if value else True
        elif options and not word.startswith("-"):
            last = next(reversed(options))
            options[last] = _value(word) if options[last] is True else options[last]
    return options


def _without_redirections(words: list[str]) -> list[str]:
    """A command's words without what sends its output to a file."""
    kept: list[str] = []
    is_target = False
    for word in words:
        if is_target:
            is_target = False
        elif match := _REDIRECTION.match(word):
            is_target = match.end() == len(word)
        else:
            kept.append(word)
    return kept


BREAKS = ";&|\n"
OPENING = ("if", "case", "for", "while", "until", "{")
CLOSING = ("fi", "esac", "done", "}")
BETWEEN = ("then", "else", "elif", "do", "!", "export", "local", "declare", "readonly", "function")
_INSIDE = r"(?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*"
"""Text between parentheses, with up to three levels of parentheses in it."""
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_NO_COMMAND = re.compile(
    r"""(\\.|"(?:\\.|[^"\\])*"|'[^']*')|(?:^|(?<=[\s;]))#[^\n]*"""
    r"""|(?<!<)<<-?\s*(["']?)([A-Za-z_]\w*)\2([^\n#]*)[^\n]*\n.*?^\t*\3$""",
    re.MULTILINE | re.DOTALL,
)
"""A comment, or a text that a program reads up to a line with its mark; or what is quoted, which stays."""
_PROGRAM = re.compile(rf"\$\((?!\(){_INSIDE}\)")
_SUM = re.compile(rf"\$\(\(({_INSIDE})\)\)")
_ARRAY = re.compile(rf"(?<=\w=)\({_INSIDE}\)|(?<=\+=)\({_INSIDE}\)")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?[-=]([^${}]*))?\}|\$([A-Za-z_]\w*)|\$[@*\d]")
_WHOLE = re.compile(r"\$\{?(\w+)(?:\[[@*]\])?\}?")
_OPEN = re.compile(r"\$<|\$\{(?![\w.]+\})")
"""An expansion of the shell that could not be done; `${section.option}` is Hydra's."""
_OPERATORS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: floordiv, ast.Mod: mod}


class Script:
    """The commands of a shell script. Assignments set `variables` as it is read; those in `overrides` win."""

    def __init__(self, overrides: Mapping[str, str]) -> None:
        self.overrides = overrides
        self.variables: dict[str, str | list[str]] = {"HOME": "~", **overrides}
        self.depth = 0
        """Number of blocks (if, for, ...) around the command."""

    def read(self, text: str) -> list[list[str]]:
        """The words of each command, in order.

        Raises:
            ValueError: a quotation does not end.
        """
        text = _NO_COMMAND.sub(r"\1\4", text).replace("\\\n", " ")
        text = _SUM.sub(lambda match: re.sub(r"\s", "", match[0]), text)  # one word each, as arrays are
        text = _ARRAY.sub(lambda match: shlex.quote(match[0]), _PROGRAM.sub("$<program>", text))
        lexer = shlex.shlex(f"{text}\n", posix=True, punctuation_chars=BREAKS)
        lexer.whitespace = " \t\r"
        lexer.commenters = ""
        lexer.whitespace_split = True
        commands: list[list[str]] = []
        words: list[str] = []
        is_tied = False
        for token in lexer:
            if not set(token) <= set(BREAKS):
                words.append(token)
                continue
            command = self._do(words, is_tied)
            if command:
                commands.append(command)
            words = []
            is_tied = token.endswith(("&&", "||"))
        return commands

    def _do(self, words: list[str], is_tied: bool) -> list[str]:
        """Sets the variables that a command sets; returns its words, none if that is all."""
        while words and (words[0] in (*OPENING, *CLOSING, *BETWEEN) or re.fullmatch(r"[^=]*\)", words[0])):
            self.depth += (words[0] in OPENING) - (words[0] in CLOSING)
            words = words[1:]
        while words and (assignment := _ASSIGNMENT.fullmatch(words[0])):
            self._assign(assignment[1], bool(assignment[2]), assignment[3], self.depth > 0 or is_tied)
            words = words[1:]
        return [it for word in words for it in self._expanded(word)]

    def _assign(self, name: str, appends: bool, text: str, is_conditional: bool) -> None:
        if name in self.overrides:
            return
        before = self.variables.get(name)
        new: str | list[str] = self._filled(text)
        if text.startswith("("):
            new = [it for word in shlex.split(text[1:-1]) for it in self._expanded(word)]
            new = [*(before if appends and isinstance(before, list) else ()), *new]
        elif appends and not isinstance(new, Unknown):
            new = before if isinstance(before, Unknown) else f"{before or ''}{new}"
        self.variables[name] = Unknown(f"${name}") if is_conditional and new != before else new

    def _expanded(self, word: str) -> list[str]:
        """The words that one word becomes: several for an array, or a variable with spaces."""
        if word in ("$@", "$*"):
            return []
        variable = _WHOLE.fullmatch(word)
        if variable is None:
            return [self._filled(word)]
        value = self.variables.get(variable[1], Unknown(word))
        if isinstance(value, list):
            return value
        return [Unknown(word)] if isinstance(value, Unknown) else shlex.split(value)

    def _filled(self, word: str) -> str:
        """The word with variables and sums in place; `Unknown` where one of them is not known."""
        text = word
        try:
            for _ in range(4):  # defaults may hold variables
                text = _VARIABLE.sub(self._value, text)
            text = _SUM.sub(lambda match: str(self._computed(ast.parse(match[1], mode="eval").body)), text)
        except (KeyError, ValueError, SyntaxError, ZeroDivisionError):
            return Unknown(word)
        return Unknown(word) if _OPEN.search(text) else text

    def _value(self, match: re.Match[str]) -> str:
        """The value of a variable. Raises KeyError, ValueError: it is not known."""
        name = match[1] or match[3]
        if not name:
            return ""
        value = self.variables.get(name) or match[2]
        value = self.variables[name] if value is None else value
        if isinstance(value, Unknown):
            raise ValueError(value)
        return value if isinstance(value, str) else " ".join(value)

    def _computed(self, node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            operate = _OPERATORS[type(node.op)]
            return int(operate(self._computed(node.left), self._computed(node.right)))
        return int(self._filled(f"${node.id}") if isinstance(node, ast.Name) else ast.literal_eval(node))


def _of_calls(text: str, path: Path) -> dict[str, Any]:
    """Arguments of `GRPOConfig(...)` and `GRPOTrainer(...)`, and attributes of such a config that are set
    later; `args.name` is the default of `add_argument`."""
    names: dict[str, ast.expr] = {}
    calls: list[tuple[str, ast.Call]] = []
    configs: set[str] = set()
    attributes: list[tuple[str, str, ast.expr]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign):
            names |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    attributes.append((ast.unparse(target.value), target.attr, node.value))
                elif isinstance(node.value, ast.Call) and _called(node.value) == "GRPOConfig":
                    configs.add(ast.unparse(target))
        elif isinstance(node, ast.Call):
            calls.append((_called(node), node))
    for name, call in calls:
        if name == "add_argument" and call.args and isinstance(call.args[0], ast.Constant):
            option = str(call.args[0].value).lstrip("-").replace("-", "_")
            names |= {f"args.{option}": item.value for item in call.keywords if item.arg == "default"}
    if not any(name in ("GRPOConfig", "GRPOTrainer") for name, _ in calls):
        raise ConfigError(f"{path} has no call of GRPOConfig or GRPOTrainer")
    options: dict[str, Any] = {}
    for name, call in calls:
        if name not in ("GRPOConfig", "GRPOTrainer"):
            continue
        if name == "GRPOTrainer":
            for argument, value in zip(_POSITIONAL, call.args, strict=False):
                options[argument] = _literal(value, names, argument in _OBJECTS)
        for item in call.keywords:
            if item.arg is None:
                source = f"**{ast.unparse(item.value)}"
                options[source] = Unknown(source)
            else:
                is_object = item.arg in _OBJECTS or (name == "GRPOTrainer" and item.arg != "model")
                options[item.arg] = _literal(item.value, names, is_object)
    options |= {name: _literal(value, names, False) for of, name, value in attributes if of in configs}
    options.pop("args", None)
    return options


def _called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


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
