"""Reads ground truths: the forms in which data sets publish tests become tests of three kinds.

* A map of lists `inputs` and `outputs`; with `fn_name`, arguments and results of that function: APPS, TACO,
  PRIME (verl's `prime_code`), DeepCoder. `input` and `output`: CodeContests.
* A list of maps `input` and `output`, with `testtype` or `type`, and `fn_name` or `metadata.func_name` where
  a function is called: LiveCodeBench, SYNTHETIC-1 and 2, DeepCoder, codeforces (open-r1). A list of pairs.
* Statements, as text or list: `assert_case` (verl's `sandbox_fusion`), `test_list` with `test_setup_code`
  (MBPP), `assertion` (MBPP+).
* `test` with `def check(candidate)`, and `entry_point`: HumanEval(+), LeetCodeDataset, Skywork-OR1 (with
  `import_prefix`).
* `test` with functions `test_*` of pytest or classes of unittest, `from solution import f`: KodCode,
  BigCodeBench.

Each also as JSON text or as a Python literal, below `verification_info`, `test_cases`, `input_output` and the
like (`CONTAINERS`), and with what is missing in columns of the row (`TEST_COLUMNS`). Whatever is in a map
counts: its inputs and its statements together are the tests. Nothing is ever unpickled.

`TestsError` names what was got where a form is not known, tests nothing, or needs what is not here.
"""

import ast
import base64
import binascii
import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tidemill.common.config.reward_kinds import TEST_COLUMNS
from tidemill.services.reward.sandbox.errors import TestsError
from tidemill.services.reward.sandbox.statement_checks import checks_something, parse_statements, read_script

INPUTS = ("inputs", "input", "stdin", "question_input")
OUTPUTS = ("outputs", "output", "expected_output", "expected_outputs", "expected", "stdout")
FUNCTIONS = ("fn_name", "func_name", "function_name")
STATEMENTS = (
    "assert_case", "assert_cases", "asserts", "assertions", "assertion", "test_list", "challenge_test_list",
    "test", "test_code", "functional",
)  # fmt: skip
SETUPS = ("import_prefix", "prompt", "test_imports", "test_setup_code", "setup_code")
"""Code that runs before the tests, and before the code of the completion. A `prompt` only where it is
Python."""
CONTAINERS = (
    "verification_info", "input_output", "test_cases", "tests", "unit_tests", "ground_truth",
    "official_tests", "public_tests", "private_tests", "generated_tests", "public_test_cases",
    "private_test_cases",
)  # fmt: skip
"""Names under which data sets keep any of these forms."""
INSTEAD = ("examples",)
"""Read only where there is nothing else: the examples of the problem's text."""
NEEDS = {
    "checker": "a checker program", "generated_checker": "a checker program",
    "special_judge": "a checker program", "interaction_format": "an interactor",
    "interactor": "an interactor",
}  # fmt: skip
"""What an answer is judged by besides its output: comparing alone would fail right answers."""
PYTHON = ("python", "python3", "py", "py3", "pypy3")
STDIN_TYPES = ("stdin", "stdin_stdout", "standard_input", "input_output", "stdio", "io")
MAX_DEPTH = 6
PACKED = (
    b"\x78\x01",
    b"\x78\x5e",
    b"\x78\x9c",
    b"\x78\xda",
    b"\x1f\x8b",
    b"\x80\x03",
    b"\x80\x04",
    b"\x80\x05",
)
"""First bytes of zlib, gzip and pickle."""


@dataclass(frozen=True, slots=True)
class OutputTest:
    """Standard input, and the output that is expected.

    Example: `stdin` "2 3\\n", `expected` "5\\n".
    """

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """Arguments of a function, and the results that are accepted.

    Example: `name` "add", `arguments` [2, 3], `accepted` [5].
    """

    name: str
    arguments: list[Any]
    accepted: list[Any]


@dataclass(frozen=True, slots=True)
class StatementTest:
    """Statements that check the code; with `case`, one test function of them."""

    text: str
    setup: str
    code_names: frozenset[str]
    case: str = ""


Test = OutputTest | CallTest | StatementTest


@dataclass(frozen=True, slots=True)
class Context:
    """What is known from around the tests."""

    columns: Mapping[str, Any]
    packages: bool
    depth: int = 0

    def inside(self, outer: Mapping[str, Any]) -> "Context":
        """The context of what a map holds: its other fields hold for that too."""
        if self.depth >= MAX_DEPTH:
            raise TestsError(f"the ground truth is nested more than {MAX_DEPTH} deep")
        fields = {name: outer[name] for name in (*TEST_COLUMNS, "language") if outer.get(name)}
        return replace(self, columns={**self.columns, **fields}, depth=self.depth + 1)


def read_tests(ground_truth: Any, columns: Mapping[str, Any], packages: bool) -> list[Test]:
    """The tests of a ground truth; `columns` are further columns of its row.

    Raises:
        TestsError: it has none that can be run, or one that tests nothing.
    """
    settings = {name: columns[name] for name in TEST_COLUMNS if columns.get(name)}
    tests = list(_read(ground_truth, Context(settings, packages)))
    if not tests:
        raise TestsError(f"the ground truth is {_short(ground_truth)}; expected tests, see the README")
    outputs = [test for test in tests if isinstance(test, OutputTest)]
    if len(outputs) == len(tests) and not any(test.expected.strip() for test in outputs):
        raise TestsError("the ground truth expects no output of any input: every program would pass")
    return tests


def _read(tests: Any, context: Context) -> Iterator[Test]:
    tests = _decoded(tests)
    if isinstance(tests, Mapping):
        yield from _read_map(tests, context)
    elif isinstance(tests, list | tuple):
        yield from _read_list(list(tests), context)
    elif isinstance(tests, str) and tests.strip():
        yield from _read_script(tests, context)
    else:
        raise TestsError(f"the ground truth is {_short(tests)}; expected tests, see the README")


def _short(value: Any) -> str:
    return repr(value)[:80]


def _decoded(tests: Any) -> Any:
    """Tests from JSON or a Python literal, as data sets keep them in text; other text unchanged."""
    if not isinstance(tests, str):
        return tests
    try:
        return json.loads(tests)
    except (ValueError, RecursionError):
        pass
    if _is_packed(tests):
        raise TestsError(
            "the tests are packed by zlib or pickle (as LiveCodeBench's private_test_cases are). They are "
            "not unpacked here, because unpickling runs code: unpack them where you trust them, store JSON"
        )
    if tests.lstrip()[:1] in ("{", "[", "("):
        try:
            return ast.literal_eval(tests.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            pass
    return tests


def _is_packed(text: str) -> bool:
    head = text.strip()[:64]
    if len(head) < 16 or " " in head:
        return False
    try:
        return base64.b64decode(head[: len(head) // 4 * 4], validate=True).startswith(PACKED)
    except (binascii.Error, ValueError):
        return False


def _read_map(tests: Mapping[str, Any], context: Context) -> Iterator[Test]:
    context = context.inside(tests)
    _refuse_what_is_not_run(context)
    containers = [name for name in CONTAINERS if not _is_empty(tests.get(name))]
    statements = [name for name in STATEMENTS if not _is_empty(tests.get(name))]
    for name in containers:
        yield from _read(tests[name], context)
    if statements:
        yield from _read_statements(tests, statements, context)
    inputs = next((name for name in INPUTS if name in tests), None)
    outputs = next((name for name in OUTPUTS if name in tests), None)
    if inputs is not None and outputs is not None:
        # Beside statements, verl has inputs that are empty and outputs that are null.
        if not (statements and _is_blank(tests[outputs])):
            yield from _read_columns(tests, inputs, outputs, context)
    elif not containers and not statements:
        instead = [name for name in INSTEAD if not _is_empty(tests.get(name))]
        for name in instead:
            yield from _read(tests[name], context)
        if not instead:
            names = ", ".join(map(str, list(tests)[:6])) or "nothing"
            raise TestsError(
                f"the ground truth has {names}; expected inputs and outputs, assert_case, or test, see the "
                "README"
            )


def _is_empty(value: Any) -> bool:
    """Whether there is nothing in it, as in `private_tests` of CodeContests: `{input: [], output: []}`."""
    if isinstance(value, Mapping) and (value.keys() & {*INPUTS, *OUTPUTS}):
        return all(map(_is_empty, value.values()))
    return value is None or value == "" or value == [] or value == {}


def _is_blank(values: Any) -> bool:
    return _is_empty(values) or (isinstance(values, list) and all(value in (None, "") for value in values))


def _refuse_what_is_not_run(context: Context) -> None:
    for name, needs in NEEDS.items():
        if context.columns.get(name):
            raise TestsError(f"{name} of the ground truth asks for {needs}, which the sandbox does not run")
    language = context.columns.get("language")
    if isinstance(language, str) and language.strip().casefold() not in PYTHON:
        raise TestsError(f"the tests are for {language}; the sandbox runs Python")


def _read_columns(tests: Mapping[str, Any], inputs: str, outputs: str, context: Context) -> Iterator[Test]:
    """A map of lists, or of one input and its output."""
    value = _decoded_list(tests[inputs])
    expected = _decoded_list(tests[outputs])
    if isinstance(value, list) and isinstance(expected, list):
        if len(value) != len(expected) or not value:
            raise TestsError(
                f"the ground truth has {len(value)} {inputs} and {len(expected)} {outputs}; expected as many "
                "of each"
            )
        yield from _read_pairs(list(zip(value, expected, strict=True)), context)
    elif isinstance(value, list) != isinstance(expected, list) and not _function_name(context):
        raise TestsError(f"{inputs} and {outputs} of the ground truth are not both lists")
    else:
        yield from _read_pairs([(value, expected)], context)


def _decoded_list(values: Any) -> Any:
    """A list, also where it is JSON text: a list of inputs, never one input that looks like JSON."""
    if isinstance(values, str) and values.lstrip().startswith('["'):
        decoded = _decoded(values)
        return decoded if isinstance(decoded, list) else values
    return list(values) if isinstance(values, tuple) else values


def _read_list(tests: list[Any], context: Context) -> Iterator[Test]:
    """A list of maps, of statements, or of pairs."""
    maps = [
        _decoded(test) if isinstance(test, str) and test.lstrip().startswith("{") else test for test in tests
    ]
    if maps and all(isinstance(test, Mapping) for test in maps):
        yield from _read_maps(maps, context)
    elif tests and all(isinstance(test, str) for test in tests):
        yield from _read_statement_list(tests, context)
    elif tests and all(isinstance(test, list | tuple) and len(test) == 2 for test in tests):
        yield from _read_pairs([(test[0], test[1]) for test in tests], context)
    else:
        raise TestsError(
            f"the tests are the list {_short(tests)}; expected maps with input and output, statements, or "
            "pairs"
        )


def _read_maps(tests: list[Mapping[str, Any]], context: Context) -> Iterator[Test]:
    """Each map is one case; those of one function are read together, because APPS wraps all of its
    results."""
    pairs: dict[str, list[tuple[Any, Any]]] = {}
    for test in tests:
        inputs = next((name for name in INPUTS if name in test), None)
        outputs = next((name for name in OUTPUTS if name in test), None)
        if inputs is None or outputs is None:
            yield from _read_map(test, context)
            continue
        inner = context.inside(test)
        _refuse_what_is_not_run(inner)
        kind = test.get("testtype") or test.get("type") or ""
        name = "" if kind in STDIN_TYPES else _function_name(inner)
        if not name and kind in ("functional", "function_call", "call_based"):
            raise TestsError(
                f"a test of type {kind} names no function; give fn_name, or metadata with func_name"
            )
        pairs.setdefault(name, []).append((test[inputs], test[outputs]))
    for name, cases in pairs.items():
        yield from _read_calls(name, cases) if name else _read_outputs(cases)


def _function_name(context: Context) -> str:
    """Name of the function that is called; empty where programs are run."""
    metadata = _decoded(context.columns.get("metadata"))
    settings: dict[str, Any] = {**(metadata if isinstance(metadata, Mapping) else {}), **context.columns}
    for name in FUNCTIONS:
        if settings.get(name):
            return str(settings[name]).rpartition(".")[2].removesuffix("()")
    return ""


def _read_pairs(pairs: Sequence[tuple[Any, Any]], context: Context) -> Iterator[Test]:
    name = _function_name(context)
    return _read_calls(name, pairs) if name else _read_outputs(pairs)


def _read_outputs(pairs: Sequence[tuple[Any, Any]]) -> Iterator[Test]:
    for value, expected in pairs:
        yield OutputTest(_as_text(value, "input"), _as_text(expected, "output"))


def _as_text(value: Any, kind: str) -> str:
    """Text; a list is its lines, as APPS has them."""
    if isinstance(value, list | tuple):
        return "\n".join(_as_text(line, kind) for line in value)
    if isinstance(value, str):
        return value
    if value is None and kind == "input":
        return ""
    if isinstance(value, int | float):
        return str(value)
    raise TestsError(f"an {kind} of the tests is {_short(value)}; expected text, or fn_name beside arguments")


def _read_calls(name: str, pairs: Sequence[tuple[Any, Any]]) -> Iterator[Test]:
    results = [_accepted(expected, is_encoded=isinstance(value, str)) for value, expected in pairs]
    # APPS wraps each result into one more list; where all are such lists, either form counts.
    is_wrapped = all(any(map(_is_list_of_one, accepted)) for accepted in results)
    for (value, _), accepted in zip(pairs, results, strict=True):
        if is_wrapped:
            inner = [result[0] for result in accepted if _is_list_of_one(result)]
            accepted = accepted + [each for result in inner for each in _accepted(result, is_encoded=False)]
        yield CallTest(name, _arguments(name, value), accepted)


def _is_list_of_one(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 1


def _arguments(name: str, value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, str):
        try:
            return [json.loads(line) for line in value.splitlines() if line.strip()]
        except (ValueError, RecursionError):
            raise TestsError(
                f"an input of {name} is the text {_short(value)}; expected one argument a line as JSON, or a "
                "list"
            ) from None
    raise TestsError(f"an input of {name} is {_short(value)}; expected a list of its arguments")


def _accepted(expected: Any, is_encoded: bool) -> list[Any]:
    """Values that a result may equal. Beside arguments as JSON (LiveCodeBench) results are JSON too; beside
    lists (APPS) a text may be a text, or JSON."""
    if not isinstance(expected, str):
        return [_as_json(expected)]
    try:
        decoded = json.loads(expected)
    except (ValueError, RecursionError):
        return [expected]
    return [decoded] if is_encoded else [expected, decoded]


def _as_json(value: Any) -> Any:
    """A result as `calls.py` writes it: tuples as lists, sets as sorted lists."""
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if isinstance(value, set | frozenset):
        try:
            return sorted(map(_as_json, value))
        except TypeError:
            return sorted(map(_as_json, value), key=repr)
    return {key: _as_json(each) for key, each in value.items()} if isinstance(value, Mapping) else value


def _read_statements(tests: Mapping[str, Any], names: Sequence[str], context: Context) -> Iterator[Test]:
    setup = tests.get("prompt")
    if isinstance(setup, str) and _is_python(setup):
        context = replace(context, columns={**context.columns, "prompt": setup})
    for name in names:
        content = _decoded(tests[name])
        if isinstance(content, str):
            yield from _read_script(content, context)
        elif isinstance(content, list) and all(isinstance(test, str) for test in content):
            yield from _read_statement_list(content, context)
        elif name in ("test", "functional") and isinstance(content, Mapping | list):
            yield from _read(content, context)
        else:
            raise TestsError(f"{name} is {_short(content)}; expected a list of statements, or their text")


def _is_python(text: str) -> bool:
    try:
        body = parse_statements(text).body
    except TestsError:
        return False
    return any(
        isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom) for node in body
    )


def _setup(context: Context) -> str:
    lines: list[str] = []
    for name in SETUPS:
        value = _decoded(context.columns.get(name))
        lines += [str(line) for line in value] if isinstance(value, list) else [str(value)] if value else []
    return "".join(f"{line}\n" for line in lines)


def _read_script(text: str, context: Context) -> Iterator[Test]:
    """Statements as one text: one case, or one for each test function."""
    setup = _setup(context)
    entry_point = str(context.columns.get("entry_point") or "")
    tree = parse_statements(text)
    has_check = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body)
    is_called = any(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "check"
        for node in ast.walk(tree)
    )
    if has_check and not is_called and entry_point:
        text = f"{text}\ncheck({entry_point})"
    script = read_script(text, setup, entry_point)
    _need_modules(script.modules, context)
    for case in script.cases or ("",):
        yield StatementTest(text, setup + script.imports, script.code_names, case)


def _read_statement_list(tests: Sequence[str], context: Context) -> Iterator[Test]:
    """Each statement is a case; those that check nothing, such as imports, run before all that follow."""
    setup = _setup(context)
    script = read_script("\n".join(tests), setup, str(context.columns.get("entry_point") or ""))
    if script.cases or any("def check(" in test for test in tests):
        yield from _read_script("\n".join(tests), context)
        return
    _need_modules(script.modules, context)
    before: list[str] = []
    for test in tests:
        text = "\n".join([*before, test])
        if checks_something(text, script.code_names):
            yield StatementTest(text, setup + script.imports, script.code_names)
        else:
            before.append(test)


def _need_modules(modules: frozenset[str], context: Context) -> None:
    """Check that a jail has what the tests import."""
    for name in sorted(modules - {"pytest"}):
        if name in sys.stdlib_module_names:
            continue
        if not context.packages:
            raise TestsError(f"the tests import {name}; set `packages: true` to let them")
        if importlib.util.find_spec(name) is None:
            raise TestsError(f"the tests import {name}, which is not installed here")
