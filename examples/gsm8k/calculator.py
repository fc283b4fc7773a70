"""A calculator as a tool: arithmetic on numbers, and nothing else of Python."""

import ast
import operator

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MAX_CHARS = 200


def calculate(expression: str) -> str:
    """
    Compute an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % and brackets, for example "(12 + 7) * 3 / 2".
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"an expression has at most {MAX_CHARS} characters")
    value = _value(ast.parse(expression.replace(",", ""), mode="eval").body)
    return f"{value:.10g}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return float(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return float(OPERATORS[type(node.op)](_value(node.operand)))
    raise ValueError("only numbers with + - * / // % and brackets can be computed")
