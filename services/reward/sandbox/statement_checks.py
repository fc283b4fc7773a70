"""What statements check, found out before they run: a ground truth that checks nothing must not pay.

A check is an `assert`, a `raise`, `pytest.raises`, or a call of `assert...` or `fail`. It counts if it can be
reached, can fail, is not swallowed by an `except` that does nothing, and depends on the code under test: on a
name that the statements neither define nor import, directly, through variables, or through the flow of
control.

This is an approximation from the syntax alone, and leans to accepting: it finds what nobody calls, and what
never looks at the code; it does not prove that a test is a good one.
"""

import ast
import builtins
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.services.reward.sandbox.errors import TestsError
from tidemill.services.reward.sandbox.preamble import MODULES, is_imported

CODE_MODULES = ("solution", "solutions", "submission", "candidate", "your_module", "my_module")
"""Modules that stand for the code; KodCode's tests begin with `from solution import f`."""
CHECKING_CALLS = ("fail", "raises", "exit", "_exit")
FAILING = (ast.Assert, ast.Raise)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
FLOW = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.TryStar, ast.Match)
BROAD = ("Exception", "BaseException", "AssertionError")
INSTANCES = ("self", "cls")
PYTEST = ("raises", "approx", "mark", "fixture", "fail", "param", "main")
"""What of pytest there is in a jail (`pytest_subset.py`)."""
FEW_ITEMS = 16
LOOKING_INSIDE = ("redirect_stdout", "redirect_stderr", "capsys", "monkeypatch", "mocker", "caplog")
"""They replace or observe objects of the code, which runs in another process; `patch` of unittest too."""
ALIASES = {"np": "numpy", "pd": "pandas"}
"""Names that tests use without importing them, and what they mean: never an object of the code."""
OBJECTS = (
    "pandas", "matplotlib", "seaborn", "sklearn", "PIL", "torch", "tensorflow", "sympy", "networkx",
)  # fmt: skip
"""Packages whose objects are not copied between code and tests, so that neither knows those of the other."""
AWAITING = ("run_until_complete", "IsolatedAsyncioTestCase", "gather", "wait_for")
STREAMS = ("sys.stdin", "sys.stdout", "sys.stderr")


@dataclass(frozen=True, slots=True)
class Script:
    """Statements that were read, and what they test."""

    text: str
    tree: ast.Module
    code_names: frozenset[str]
    """Names that only the code can define."""
    cases: tuple[str, ...]
    """Test functions (`test_a`, `TestB.test_c`), each a case; empty where the statements themselves are
    one."""
    modules: frozenset[str] = field(default=frozenset())
    """Modules beyond the standard library that the statements import."""
    imports: str = ""
    """Imports that the statements lack, such as `import numpy as np`."""


def parse_statements(text: str) -> ast.Module:
    """Raises TestsError: the text is no Python."""
    try:
        tree = ast.parse(text)
        _Literals().visit(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        raise TestsError(f"the tests are no Python{where}: {_short(text)}") from None
    return tree


class _Literals(ast.NodeTransformer):
    """Replaces long literals by one constant: tests have megabytes of them, and they check nothing."""

    def _visit_items(self, node: Any, items: Sequence[ast.expr | None]) -> ast.expr:
        node.is_literal = bool(items) and all(getattr(item, "is_literal", False) for item in items)
        has_names = any(isinstance(item, ast.Constant) and isinstance(item.value, str) for item in items)
        if node.is_literal and (len(items) > FEW_ITEMS or not has_names):
            return self.visit_Constant(ast.copy_location(ast.Constant(value=True), node))
        return node  # type: ignore[no-any-return]

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        node.is_literal = True  # type: ignore[attr-defined]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        return (
            node.operand
            if getattr(node.operand, "is_literal", False) and node.op.__class__ is ast.USub
            else node
        )

    def visit_List(self, node: ast.List) -> ast.expr:
        self.generic_visit(node)
        return self._visit_items(node, node.elts)

    def visit_Tuple(self, node: ast.Tuple) -> ast.expr:
        self.generic_visit(node)
        return self._visit_items(node, node.elts)

    def visit_Set(self, node: ast.Set) -> ast.expr:
        self.generic_visit(node)
        return self._visit_items(node, node.elts)

    def visit_Dict(self, node: ast.Dict) -> ast.expr:
        self.generic_visit(node)
        return self._visit_items(node, [*node.keys, *node.values])


def read_script(text: str, setup: str = "", entry_point: str = "") -> Script:
    """The statements, if they check the code; `setup` runs before them and before the code.

    Raises:
        TestsError: they are no Python, check nothing, or need what a jail has not.
    """
    tree = parse_statements(text)
    setup_tree = parse_statements(setup)
    _refuse_what_is_not_there(tree)
    cases = tuple(_test_functions(tree))
    if cases:
        _refuse_unknown_arguments(tree)
    aliases = sorted(ALIASES.keys() & (_loaded(tree) - _bound(tree) - _bound(setup_tree)))
    names = _names_of_code(tree, setup_tree, entry_point) - set(aliases)
    body = _reachable(tree, cases)
    if not any(isinstance(node, FAILING) or _is_checking_call(node) for node in _walk(body)):
        raise TestsError(_explain_missing_check(tree, text))
    if not names:
        raise TestsError(f"the tests use nothing of the code: {_short(text)}")
    if not _has_check(body, names):
        raise TestsError(f"no check of the tests can fail and depends on the code: {_short(text)}")
    _refuse_objects(tree, aliases)
    _refuse_classes(tree, names)
    modules = {*_foreign_modules(tree, setup_tree), *(ALIASES[name] for name in aliases)}
    imports = "".join(f"import {ALIASES[name]} as {name}\n" for name in aliases)
    return Script(text, tree, frozenset(names), cases, frozenset(modules), imports)


def checks_something(text: str, names: frozenset[str]) -> bool:
    """Whether one statement of a list has a check that depends on these names of the code."""
    tree = parse_statements(text)
    return _has_check(_reachable(tree, ()), set(names))


def _short(text: str) -> str:
    return repr(text.strip()[:80])


def _explain_missing_check(tree: ast.Module, text: str) -> str:
    functions = [node.name for node in tree.body if isinstance(node, DEFINITIONS)]
    if functions:
        return (
            f"nothing calls {', '.join(functions[:4])} of the tests, and nothing else of them checks the "
            "code; give `entry_point`, the name of the function that `check` gets (in the map or a column)"
        )
    return f"the tests assert nothing: {_short(text)}"


def _test_functions(tree: ast.Module) -> Iterator[str]:
    """Functions and methods that pytest and unittest run, in their order."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test") and not _is_skipped(node):
            yield node.name
        if isinstance(node, ast.ClassDef) and _is_test_class(node):
            methods = [method for method in node.body if isinstance(method, ast.FunctionDef)]
            for method in methods if not _is_skipped(node) else ():
                if method.name.startswith("test") and not _is_skipped(method):
                    yield f"{node.name}.{method.name}"


def _is_test_class(node: ast.ClassDef) -> bool:
    return node.name.startswith("Test") or any("TestCase" in ast.unparse(base) for base in node.bases)


def _is_skipped(node: ast.FunctionDef | ast.ClassDef) -> bool:
    """Whether a test of the task carries a mark of pytest or unittest by which it may not run."""
    return any("skip" in ast.unparse(each) or "xfail" in ast.unparse(each) for each in node.decorator_list)


def _refuse_unknown_arguments(tree: ast.Module) -> None:
    """Check that every argument of a test or fixture is a fixture of the tests or a parameter."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    fixtures = {node.name for node in functions if _decorators_with(node, "fixture")}
    for node in functions:
        if not node.name.startswith("test") and node.name not in fixtures:
            continue
        parameters = {
            word
            for decorator in _decorators_with(node, "parametrize")
            for constant in ast.walk(decorator)
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
            for word in constant.value.replace(",", " ").split()
        }
        num_defaults = len(node.args.defaults)
        needed = node.args.args[: len(node.args.args) - num_defaults]
        for argument in needed:
            if argument.arg not in fixtures | parameters | set(INSTANCES):
                raise TestsError(
                    f"{node.name} of the tests takes {argument.arg}, which is no fixture and no parameter of "
                    "the tests; pytest's own fixtures and plugins are not here"
                )


def _decorators_with(node: ast.FunctionDef, word: str) -> list[ast.expr]:
    return [each for each in node.decorator_list if word in ast.unparse(each)]


def _refuse_what_is_not_there(tree: ast.Module) -> None:
    has_mock = any(name.partition(".")[0] in ("unittest", "mock") for name in _imported_modules(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test"):
            raise TestsError(f"{node.name} of the tests is a coroutine, which cannot be awaited here")
        is_awaiting = isinstance(node, ast.Attribute) and (
            node.attr in AWAITING or ast.unparse(node) == "asyncio.run"
        )
        if is_awaiting or isinstance(node, ast.Await):
            raise TestsError(
                "the tests await coroutines of the code, but it runs in another process, where they stay"
            )
        name = _name_of(node)
        if name in LOOKING_INSIDE or (name == "patch" and has_mock):
            raise TestsError(
                f"the tests use {name}, but the code runs in another process, where it does nothing"
            )
        if _is_pytests(node) and name not in PYTEST:
            raise TestsError(f"the tests use pytest.{name}; here are only pytest.{', '.join(PYTEST[:-1])}")
        if isinstance(node, ast.Assign) and any(ast.unparse(target) in STREAMS for target in node.targets):
            raise TestsError(
                "the tests replace sys.stdin or sys.stdout, but the code runs in another process"
            )


def _refuse_classes(tree: ast.Module, names: set[str]) -> None:
    """Check that the tests neither inherit from classes of the code nor compare types with them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and names & {each for base in node.bases for each in _loaded(base)}:
            raise TestsError(
                f"{node.name} of the tests inherits from a class of the code, which is in another process"
            )
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            has_type = any(isinstance(side, ast.Call) and _name_of(side.func) == "type" for side in sides)
            if has_type and any(isinstance(side, ast.Name) and side.id in names for side in sides):
                raise TestsError(
                    "the tests compare a type with a class of the code, which is in another process; "
                    "use isinstance"
                )


def _refuse_objects(tree: ast.Module, aliases: Sequence[str]) -> None:
    """Check that tests use no package whose objects stay in the process of the code."""
    names = {ALIASES[name]: name for name in aliases}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name: (alias.asname or alias.name).partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}": alias.asname or alias.name for alias in node.names}
    loaded = _loaded(tree)
    for module, name in names.items():
        package = module.partition(".")[0]
        if package in OBJECTS and name in loaded:
            raise TestsError(
                f"the tests use {package} ({name}), but the code runs in another process, and objects of "
                f"{package} are not copied; let the code return numbers, text, lists, maps or numpy's arrays"
            )


def _name_of(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return node.arg if isinstance(node, ast.arg) else ""


def _is_pytests(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pytest"


def _names_of_code(tree: ast.Module, setup: ast.Module, entry_point: str) -> set[str]:
    """Names that the statements take from the code: those that only it can define, and those by which they
    call it, as `add` in `assert add(1, 2) == 3`, though any program has an `add` of `operator`."""
    bound = _bound(tree) | _bound(setup)
    names = {name for name in _loaded(tree) - bound if not _is_everywhere(name)}
    imported = set(_imported_from_code(tree))
    named = _loaded(called_as(entry_point)) if entry_point else set()
    if imported or named:
        return names | imported | named
    for node in tree.body:
        # What looks at a variable, or at another name of the code, calls nothing to test it by itself.
        is_check = any(isinstance(each, ast.Assert) for each in ast.walk(node))
        if is_check and all(map(_is_everywhere, _loaded(node))):
            names |= _called_names(node) - bound
    return names or _called_names(tree) - bound


def _is_everywhere(name: str) -> bool:
    """Whether every program has the name: a built-in, or an import that is put before it."""
    return hasattr(builtins, name) or is_imported(name)


def _called_names(tree: ast.AST) -> set[str]:
    """Functions that are called, but for built-ins, unless there is only one of them."""
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    unusual = {name for name in called if not hasattr(builtins, name)} - set(MODULES)
    return unusual or (called if len(called) == 1 else set())


def _imported_from_code(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in CODE_MODULES and not node.level:
            for alias in node.names:
                if alias.name != "*":
                    yield alias.asname or alias.name
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in CODE_MODULES:
                    yield alias.asname or alias.name


def _imported_modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module


def _foreign_modules(*trees: ast.Module) -> Iterator[str]:
    """Top-level names of imported modules, but for those of the code."""
    for tree in trees:
        yield from (name.partition(".")[0] for name in _imported_modules(tree) if name not in CODE_MODULES)


def _loaded(tree: ast.AST) -> set[str]:
    return {
        node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def _bound(tree: ast.AST) -> set[str]:
    """Names that are defined anywhere in the tree."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, DEFINITIONS):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.Import):
            names.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def _walk(nodes: Sequence[ast.AST]) -> Iterator[ast.AST]:
    for node in nodes:
        yield from ast.walk(node)


def _reachable(tree: ast.Module, cases: Sequence[str]) -> list[ast.stmt]:
    """Statements that run: those at the top, and definitions that they, or cases, name."""
    definitions = {node.name: node for node in tree.body if isinstance(node, DEFINITIONS)}
    body: list[ast.stmt] = [node for node in tree.body if not isinstance(node, DEFINITIONS)]
    pending = {name.partition(".")[0] for name in cases}
    for node in body:
        pending |= _loaded(node)
    reached: set[str] = set()
    while pending:
        name = pending.pop()
        if name in definitions and name not in reached:
            reached.add(name)
            body.append(definitions[name])
            # Fixtures are named by arguments.
            arguments = {node.arg for node in ast.walk(definitions[name]) if isinstance(node, ast.arg)}
            pending |= _loaded(definitions[name]) | arguments
    return body


def _is_checking_call(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name.startswith("assert") or name in CHECKING_CALLS


def _has_check(body: Sequence[ast.stmt], names: set[str]) -> bool:
    dependent = _dependent_names(body, names)
    return any(_contains_check(node, dependent, is_controlled=False) for node in body)


def _depends(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))


def _targets(node: ast.AST) -> set[str]:
    """Names that are set in the node, and names whose parts are."""
    return {
        name.id
        for each in ast.walk(node)
        if isinstance(each, ast.Name | ast.Attribute | ast.Subscript) and isinstance(each.ctx, ast.Store)
        for name in ast.walk(each)
        if isinstance(name, ast.Name)
    }


def _dependent_names(body: Sequence[ast.stmt], names: set[str]) -> set[str]:
    """Names whose values may depend on the code."""
    dependent = set(names)
    for node in _walk(body):
        if isinstance(node, FUNCTIONS):
            dependent |= {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)} - set(INSTANCES)
    while True:
        before = len(dependent)
        for node in _walk(body):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, *FLOW)):
                if _depends(node, dependent):
                    dependent |= _targets(node)
            elif isinstance(node, ast.comprehension):
                if _depends(node.iter, dependent):
                    dependent |= _targets(node.target)
            elif isinstance(node, ast.Call):
                # A call may change what it is given.
                if _depends(node, dependent):
                    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
                    dependent |= {each.id for each in _walk(arguments) if isinstance(each, ast.Name)}
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and _depends(node, dependent):
                dependent.add(node.name)
        if len(dependent) == before:
            return dependent


def _contains_check(node: ast.AST, names: set[str], is_controlled: bool) -> bool:
    if isinstance(node, ast.Assert):
        return not _is_always_true(node.test) and (is_controlled or _depends(node.test, names))
    if isinstance(node, ast.Raise):
        return is_controlled
    if _is_checking_call(node) and (is_controlled or _depends(node, names)):
        return True
    is_controlled = is_controlled or (isinstance(node, FLOW) and _depends(node, names))
    if isinstance(node, ast.Try) and any(map(_swallows, node.handlers)):
        inner: list[ast.AST] = [*node.handlers, *node.orelse, *node.finalbody]
    else:
        inner = list(ast.iter_child_nodes(node))
    return any(_contains_check(each, names, is_controlled) for each in inner)


def _swallows(handler: ast.ExceptHandler) -> bool:
    """Whether it catches a failed assertion and goes on as if nothing had been."""
    caught = [name for name in ast.walk(handler.type) if isinstance(name, ast.Name)] if handler.type else []
    is_broad = handler.type is None or any(name.id in BROAD for name in caught)
    return is_broad and all(
        isinstance(node, ast.Pass | ast.Continue | ast.Expr)
        and not any(map(_is_checking_call, ast.walk(node)))
        for node in handler.body
    )


def _is_always_true(test: ast.expr) -> bool:
    """Whether the condition holds whatever the code does, such as `assert (f(1) == 2, "text")`."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.Tuple | ast.List | ast.Set):
        return bool(test.elts)
    if isinstance(test, ast.Lambda):
        return True
    if isinstance(test, ast.BoolOp):
        are_true = map(_is_always_true, test.values)
        return any(are_true) if isinstance(test.op, ast.Or) else all(are_true)
    return False


def called_as(entry_point: str) -> Any:
    """The expression of an entry point, such as `f` or `Solution().f`.

    Raises:
        TestsError: it is none.
    """
    try:
        return ast.parse(entry_point, mode="eval").body
    except (SyntaxError, ValueError):
        raise TestsError(f"entry_point is {entry_point!r}; expected the name of a function") from None
