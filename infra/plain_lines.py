"""Counts lines that need a second reading: `python -m infra.plain_lines`; `--check` is for `make check`.

Four rules, for code in Python. Ruff has no rule for any of them.

* `names`: an assignment has one target. It may have several for
    * the result of a call: `quotient, rest = divmod(x, y)`,
    * one value that is a tuple already: a variable, an attribute or an item: `rows, columns = matrix.shape`,
    * a swap: `a, b = b, a`;
  and the head of a loop may have several. Not so values side by side (`a, b = x, y`), a comprehension, one of
  two values (`x if ... else y`, `x or y`), and names in a row (`a = b = 0`).
* `walrus`: `:=` stands in the head of an `if`, `elif` or `while`, once, and not in a comprehension there.
* `nested`: no comprehension is in another one. One with several `for` is fine.
* `vague`: variables, parameters and fields say what they hold; those in `VAGUE` do not. `other` is fine in
  `__eq__` and its like, where it is Python's word; and so are names that users see (`SEEN_BY_USERS`).
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
FOLDERS = ("common", "services", "infra", "examples", "benchmarks", "tests")
RULES = ("names", "walrus", "nested", "vague")
VAGUE = frozenset(
    [
        *("found", "own", "one", "other", "given", "known", "made", "shown"),
        *("taken", "rest", "left", "part", "place", "what", "told"),
    ]
)
SEEN_BY_USERS = {
    ("common/config/algorithm_sections.py", "place"),
    ("common/process/failures.py", "what"),
    ("services/console/compare/diff.py", "what"),
    ("services/trainer/machine.py", "what"),
}
"""Fields whose names are settings or keys of JSON, and stay."""

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


@dataclass(frozen=True)
class Violation:
    """`services/rollout/worker.py:88: names: assigns several values side by side: give each name a line`."""

    file: str
    line: int
    rule: str
    advice: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.advice}"


@dataclass(frozen=True)
class Source:
    """A file that was read: its path from the root, how many lines it has, and which of them break a rule."""

    file: str
    num_lines: int
    violations: list[Violation]


def violations_in(text: str, file: str) -> list[Violation]:
    """What breaks a rule in the source `text`, by line."""
    nodes = list(ast.walk(ast.parse(text, file)))
    advices_by_rule = {
        "names": _several_names(nodes),
        "walrus": _walruses(nodes),
        "nested": _nested_comprehensions(nodes),
        "vague": _vague_names(nodes, file),
    }
    violations = [
        Violation(file, line, rule, advice)
        for rule, advices in advices_by_rule.items()
        for line, advice in advices
    ]
    return sorted(violations, key=lambda violation: violation.line)


def _several_names(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        if len(node.targets) > 1:
            yield node.lineno, "assigns one value to several names in a row: give each a line"
            continue
        target = node.targets[0]
        is_unpacking = isinstance(target, ast.Tuple | ast.List) and len(target.elts) > 1
        if not is_unpacking or _is_one_value(node.value) or _is_swap(target, node.value):
            continue
        if isinstance(node.value, ast.Tuple | ast.List):
            yield node.lineno, "assigns several values side by side: give each name a line"
        elif isinstance(node.value, COMPREHENSIONS):
            yield node.lineno, "unpacks a comprehension: give each name a line, or write a loop"
        else:
            yield node.lineno, "unpacks one of two values: write an if, with one assignment a line"


def _is_one_value(value: ast.expr) -> bool:
    if isinstance(value, ast.Await):
        return _is_one_value(value.value)
    return isinstance(value, ast.Call | ast.Name | ast.Attribute | ast.Subscript)


def _is_swap(target: ast.expr, value: ast.expr) -> bool:
    if not isinstance(target, ast.Tuple | ast.List) or not isinstance(value, ast.Tuple | ast.List):
        return False
    assigned = sorted(ast.unparse(element) for element in target.elts)
    values = sorted(ast.unparse(element) for element in value.elts)
    return assigned == values


def _walruses(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    in_heads = set()
    for node in nodes:
        if isinstance(node, ast.If | ast.While):
            walruses = [inner for inner in _outside_scopes(node.test) if isinstance(inner, ast.NamedExpr)]
            in_heads.update(walruses[:1])
    for node in nodes:
        if isinstance(node, ast.NamedExpr) and node not in in_heads:
            yield node.lineno, f"assigns {node.target.id} inside an expression: assign it on a line before"


def _outside_scopes(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and what is in it in the order of the source, without comprehensions and lambdas."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*COMPREHENSIONS, ast.Lambda)):
            yield from _outside_scopes(child)


def _nested_comprehensions(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    nested = set()
    for outer in nodes:
        if not isinstance(outer, COMPREHENSIONS):
            continue
        for inner in ast.walk(outer):
            if isinstance(inner, COMPREHENSIONS) and inner is not outer:
                nested.add(inner)
    for inner in nested:
        yield inner.lineno, "is a comprehension in a comprehension: give one of them a name, or write a loop"


def _vague_names(nodes: list[ast.AST], file: str) -> Iterator[tuple[int, str]]:
    of_operators: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("__"):
            of_operators.update(argument for argument in node.args.args if argument.arg == "other")
    for node in nodes:
        for name in _names_bound_by(node):
            is_public = isinstance(getattr(node, "ctx", None), ast.Store) and (file, name) in SEEN_BY_USERS
            if name in VAGUE and node not in of_operators and not is_public:
                yield getattr(node, "lineno", 0), f"{name} does not say what it holds: name the thing"


def _names_bound_by(node: ast.AST) -> list[str | None]:
    """The variables, parameters and fields that `node` itself makes."""
    if isinstance(node, ast.Name):
        return [node.id] if isinstance(node.ctx, ast.Store) else []
    if isinstance(node, ast.Attribute):
        return [node.attr] if isinstance(node.ctx, ast.Store) else []
    if isinstance(node, ast.arg):
        return [node.arg]
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return [node.name]
    if isinstance(node, ast.MatchMapping):
        return [node.rest]
    return []


def sources(root: Path) -> Iterator[Source]:
    """All files of Python in the folders below `root`, by path."""
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            file = path.relative_to(root).as_posix()
            text = path.read_text()
            yield Source(file, len(text.splitlines()), violations_in(text, file))


def room_of(file: str) -> str:
    """The room of a file: `services/console/compare`, `common/history`, `tests/unit`, `benchmarks`."""
    folders = file.split("/")[:-1]
    depth = 3 if folders[0] == "services" else 2
    return "/".join(folders[:depth])


def table(files: Iterable[Source]) -> list[str]:
    """Lines that break each rule, in 1,000: first by room, most first; then by folder."""
    rooms: dict[str, list[Source]] = {}
    folders: dict[str, list[Source]] = {}
    for source in files:
        folder = source.file.split("/")[0]
        rooms.setdefault(room_of(source.file), []).append(source)
        folders.setdefault(folder, []).append(source)
    folders["common + services"] = folders.get("common", []) + folders.get("services", [])
    by_room = sorted(_rows(rooms), key=lambda row: -row.per_1000("all"))
    rules = "".join(f"{rule:>9}" for rule in (*RULES, "all"))
    header = f"{'in 1,000 lines':<34}{'lines':>8}{rules}"
    return [header, *map(str, by_room), "", *map(str, _rows(folders))]


@dataclass(frozen=True)
class _Row:
    """`common/store` with 418 lines of which 3 break `names` and 1 breaks `vague`."""

    room: str
    num_lines: int
    counts: Counter[str]

    def per_1000(self, rule: str) -> float:
        return self.counts[rule] / max(1, self.num_lines) * 1000

    def __str__(self) -> str:
        cells = "".join(f"{self.per_1000(rule):>9.1f}" for rule in (*RULES, "all"))
        return f"{self.room:<34}{self.num_lines:>8,}{cells}"


def _rows(sources_by_name: dict[str, list[Source]]) -> list[_Row]:
    rows = []
    for name, files in sources_by_name.items():
        counts = Counter(violation.rule for source in files for violation in source.violations)
        counts["all"] = counts.total()
        num_lines = sum(source.num_lines for source in files)
        rows.append(_Row(name, num_lines, counts))
    return rows


def main(arguments: list[str]) -> int:
    files = list(sources(REPO))
    for source in files:
        for violation in source.violations:
            print(violation)
    if "--check" in arguments:
        return 1 if any(source.violations for source in files) else 0
    print("\n".join(table(files)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
