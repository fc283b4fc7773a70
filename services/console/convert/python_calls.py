"""The arguments of `GRPOConfig(...)` and `GRPOTrainer(...)` in a Python file, which is parsed, never run."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tidemill.common.errors import ConfigError

TRAINER_ARGUMENTS = (
    "model",
    "reward_funcs",
    "train_dataset",
    "eval_dataset",
    "peft_config",
    "tools",
    "environment_factory",
)


class Source(str):
    """What stands in place of a value: an expression that only running the file would evaluate."""

    __slots__ = ()


def read_calls(text: str, path: Path) -> dict[str, Any]:
    """Arguments by name: literals as they are, everything else as its source text; `args.name` is the default
    that `add_argument` gives it.

    Raises:
        ConfigError: the file is not Python, or has no such call.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{path} line {error.lineno} is not Python: {error.msg}") from None
    names = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    names |= dict(_command_line(tree))
    found: dict[str, Any] = {}
    has_call = False
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if name not in ("GRPOConfig", "GRPOTrainer"):
            continue
        has_call = True
        for keyword in node.keywords:
            if keyword.arg and (name == "GRPOConfig" or keyword.arg in TRAINER_ARGUMENTS):
                found[keyword.arg] = _literal(keyword.value, names)
    if not has_call:
        raise ConfigError(f"{path} has no call of GRPOConfig or GRPOTrainer")
    return found


def _literal(node: ast.expr, names: dict[str, ast.expr], depth: int = 0) -> Any:
    name = node.id if isinstance(node, ast.Name) else ast.unparse(node)
    if name in names and depth < 8:
        return _literal(names[name], names, depth + 1)
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item, names, depth + 1) for item in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Source(ast.unparse(node))


def _command_line(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """`args.name` and its default, for each `parser.add_argument("--name", default=...)`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith(".add_argument"):
            continue
        option = next((item.value for item in node.args if isinstance(item, ast.Constant)), "")
        default = next((keyword.value for keyword in node.keywords if keyword.arg == "default"), None)
        if default is not None:
            yield f"args.{str(option).lstrip('-').replace('-', '_')}", default
