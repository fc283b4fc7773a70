"""The arguments of `GRPOConfig(...)` and `GRPOTrainer(...)` in a Python file, which is parsed, never run."""

import ast
from pathlib import Path
from typing import Any

from common.errors import ConfigError

TRAINER_ARGUMENTS = (
    "model",
    "reward_funcs",
    "train_dataset",
    "eval_dataset",
    "peft_config",
    "tools",
    "environment_factory",
)


def read_calls(text: str, path: Path) -> dict[str, Any]:
    """Arguments by name: literals as they are, everything else as its source text.

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
    if isinstance(node, ast.Name) and node.id in names and depth < 8:
        return _literal(names[node.id], names, depth + 1)
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item, names, depth + 1) for item in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
