"""How large a function of product code may be."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tidemill.common.process.programs import ROOT

MAX_FUNCTION_LINES, MAX_PARAMETERS = 60, 10
ROOMS = ("common", "services", "tidemill")
NO_CODE = {"__pycache__", "static", "templates"}


def too_large(sizes: dict[str, int], limit: int) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if size > limit}


def folders() -> Iterator[Path]:
    for room in ROOMS:
        for folder in sorted([ROOT / room, *(ROOT / room).rglob("*")]):
            if folder.is_dir() and not NO_CODE & set(folder.parts):
                yield folder


@cache
def functions() -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    return [
        (f"{path.relative_to(ROOT)}::{node.name}", node)
        for folder in folders()
        for path in sorted(folder.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """All that a caller may give; `self` and `cls` are not given."""
    arguments = function.args
    named = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(named) - (named[:1] in (["self"], ["cls"]))


def test_no_function_is_longer_than_60_lines() -> None:
    sizes = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions()}
    assert too_large(sizes, MAX_FUNCTION_LINES) == {}


def test_no_function_takes_more_than_10_parameters() -> None:
    sizes = {name: num_parameters(node) for name, node in functions()}
    assert too_large(sizes, MAX_PARAMETERS) == {}
