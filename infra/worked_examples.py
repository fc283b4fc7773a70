"""Records that cross a room show a worked example: `python -m infra.worked_examples`, part of `make check`.

A record is a dataclass, a named tuple or a model of pydantic. It crosses a room where a file of another
folder imports it. Its docstring then has an example:

* a line that begins with `Example`, as in `Example: of 8 samples 3 were late: {"late": 3, "total": 8}.`,
* or an indented block, which shows one as code.

Each of its array fields begins with its shape: the text below it begins with `[`, or its name ends with a
suffix of shapes, as in `logits_NE`.

Sections of the config need no example: their fields are documented one by one, and docs/config.md shows them.
Neither do private records, exceptions, and records that only tests import.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from infra.plain_lines import REPO

FOLDERS = ("common", "services", "infra", "examples", "benchmarks")
Trees = dict[str, ast.Module]
"""What was read of each file, by its path from the root."""

ARRAYS = frozenset(
    [
        *("NDArray", "Tensor", "Int32", "Float32", "Float64", "Bits", "Indices"),
        *("Int32Array", "Float32Array", "BitArray"),
    ]
)
SHAPE_SUFFIX = re.compile(r"_[A-Z][A-Z0-9]*$")


@dataclass(frozen=True)
class Record:
    """`Ticket` in `common/wire/messages.py`, line 117, which `services/rollout/worker.py` imports."""

    file: str
    name: str
    line: int
    importer: str
    has_example: bool
    without_shape: tuple[str, ...]
    """Names of array fields that do not begin with their shape."""


def records_that_cross(root: Path) -> list[Record]:
    """The public records of the tree at `root` that another folder imports, by file and line."""
    trees: Trees = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            trees[path.relative_to(root).as_posix()] = ast.parse(path.read_text())
    importers = _importers(trees)
    records = []
    for file, tree in trees.items():
        for node in tree.body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            importer = importers.get((file, node.name))
            if importer is not None and _is_record(file, node, trees):
                has_an_example = has_example(ast.get_docstring(node))
                without_shape = tuple(_fields_without_shape(node))
                record = Record(file, node.name, node.lineno, importer, has_an_example, without_shape)
                records.append(record)
    return records


def has_example(docstring: str | None) -> bool:
    """Whether a line begins with `Example`, or a block is indented as code is."""
    lines = (docstring or "").splitlines()
    for before, line in pairwise(["", *lines]):
        if line.lstrip().startswith("Example"):
            return True
        begins_block = not before.strip() or before.rstrip().endswith(":")
        if line.startswith("    ") and begins_block:
            return True
    return False


def _fields_without_shape(node: ast.ClassDef) -> Iterator[str]:
    for field, below in pairwise([*node.body, ast.Pass()]):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if not _is_array(field.annotation) or SHAPE_SUFFIX.search(field.target.id):
            continue
        text = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = str(below.value.value)
        if not text.startswith("["):
            yield field.target.id


def _is_array(annotation: ast.expr) -> bool:
    """Whether it is `Int32`, `NDArray[...]` or `"Tensor | None"`; not a mapping or tuple of such."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _is_array(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.BinOp):
        return _is_array(annotation.left) or _is_array(annotation.right)
    return _last_name(annotation) in ARRAYS


def _is_record(file: str, node: ast.ClassDef, trees: Trees) -> bool:
    if any(_last_name(decorator) == "dataclass" for decorator in node.decorator_list):
        return True
    ancestors = {node.name, *_ancestors(file, node, trees)}
    if "Section" in ancestors:
        return False
    return bool(ancestors & {"BaseModel", "NamedTuple"})


def _ancestors(file: str, node: ast.ClassDef, trees: Trees) -> Iterator[str]:
    """Names of the classes that it inherits from, as far as the files of the tree tell."""
    for base in map(_last_name, node.bases):
        yield base
        source = _definition(file, base, trees)
        for defined in trees[source].body:
            if isinstance(defined, ast.ClassDef) and defined.name == base:
                yield from _ancestors(source, defined, trees)


def _last_name(expression: ast.expr) -> str:
    """`dataclass` of `@dataclasses.dataclass(frozen=True)`, `Message` of `Message[M]`."""
    if isinstance(expression, ast.Call):
        return _last_name(expression.func)
    if isinstance(expression, ast.Subscript):
        return _last_name(expression.value)
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def _importers(trees: Trees) -> dict[tuple[str, str], str]:
    """A file of another folder that imports a name, by the file that defines it and the name."""
    importers: dict[tuple[str, str], str] = {}
    for file, tree in trees.items():
        for module_file, name in _names_imported_by(tree, trees):
            source = _definition(module_file, name, trees)
            if _folder(source) != _folder(file):
                importers.setdefault((source, name), file)
    return importers


def _names_imported_by(tree: ast.Module, trees: Trees) -> Iterator[tuple[str, str]]:
    """The file of the module and the name, of `from module import name` and of `module.name`."""
    files_by_alias = {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        package_file = _file_of(node.module, trees)
        for alias in node.names:
            module_file = _file_of(f"{node.module}.{alias.name}", trees)
            if module_file is not None:
                files_by_alias[alias.asname or alias.name] = module_file
            elif package_file is not None:
                yield package_file, alias.name
    for node in nodes:
        if isinstance(node, ast.Attribute):
            module_file = files_by_alias.get(_last_name(node.value))
            if module_file is not None:
                yield module_file, node.attr


def _file_of(module: str, trees: Trees) -> str | None:
    path = module.removeprefix("tidemill.").replace(".", "/")
    for file in (f"{path}.py", f"{path}/__init__.py"):
        if file in trees:
            return file
    return None


def _definition(file: str, name: str, trees: Trees) -> str:
    """The file that defines `name`, where `file` may only pass it on."""
    for node in trees[file].body:
        if not isinstance(node, ast.ImportFrom) or not node.module:
            continue
        source = _file_of(node.module, trees)
        for alias in node.names:
            if source is not None and (alias.asname or alias.name) == name:
                return _definition(source, alias.name, trees)
    return file


def _folder(file: str) -> str:
    return file.rpartition("/")[0]


def check(root: Path) -> list[str]:
    """What is wrong: records without an example, and arrays without a shape."""
    problems = []
    for record in records_that_cross(root):
        start = f"{record.file}:{record.line}: {record.name}"
        for field in record.without_shape:
            problems.append(f"{start}.{field} is an array: begin the text below it with its shape, as [T]")
        if not record.has_example:
            problems.append(
                f"{start} is imported by {record.importer} and shows no example: add a line `Example: ...`, "
                "or an indented block, to its docstring"
            )
    return problems


def main() -> int:
    problems = check(REPO)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
