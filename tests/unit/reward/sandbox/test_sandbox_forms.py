"""Ground truths in the forms in which data sets publish tests: what is read, and what is refused by name."""

import base64
import json
import pickle
import zlib
from typing import Any

import pytest

from tidemill.services.reward.sandbox.errors import TestsError
from tidemill.services.reward.sandbox.forms import CallTest, OutputTest, StatementTest, read_tests

OUTPUTS = [OutputTest("1 2", "3"), OutputTest("3 4", "7")]
LISTS = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}
MAPS = [
    {"input": "1 2", "output": "3", "testtype": "stdin"},
    {"input": "3 4", "output": "7", "testtype": "stdin"},
]


@pytest.mark.parametrize("tests", [
    LISTS,
    json.dumps(LISTS),
    str(LISTS),
    {"input_output": json.dumps(LISTS)},
    {"inputs": json.dumps(LISTS["inputs"]), "outputs": json.dumps(LISTS["outputs"])},
    MAPS,
    json.dumps(MAPS),
    {"tests": json.dumps(MAPS)},
    [json.dumps(test) for test in MAPS],
    {"verification_info": {"language": "python", "test_cases": MAPS}},
    {"public_tests": {"input": ["1 2"], "output": ["3"]},
     "private_tests": {"input": ["3 4"], "output": ["7"]}},
    {"public_test_cases": json.dumps(MAPS[:1]), "private_test_cases": json.dumps(MAPS[1:])},
    {"official_tests": [{"input": test["input"], "output": test["output"]} for test in MAPS]},
    [{"stdin": "1 2", "expected_output": 3}, {"stdin": "3 4", "expected_output": 7}],
    [["1 2", "3"], ("3 4", "7")],
    {"examples": MAPS, "official_tests": []},
    {**LISTS, "language": "Python3", "fn_name": None},
    {"public_tests": {"input": LISTS["inputs"], "output": LISTS["outputs"]},
     "private_tests": {"input": [], "output": []}},
])  # fmt: skip
def test_inputs_and_outputs_are_read_in_every_form(tests: Any) -> None:
    assert read_tests(tests, {}, False) == OUTPUTS


CALLS = {"fn_name": "f", "inputs": [[1, "a"], [2, "b"]], "outputs": [3, 7]}
NAMED = {"input": [1, "a"], "output": 3, "type": "function_call", "fn_name": "f"}
LCB = [{"input": '1\n"a"', "output": "3", "testtype": "functional"}]


@pytest.mark.parametrize(("tests", "columns"), [
    (CALLS, {}),
    ({**CALLS, "fn_name": "Solution().f"}, {}),
    ({"inputs": CALLS["inputs"], "outputs": CALLS["outputs"]}, {"fn_name": "f"}),
    ({**CALLS, "inputs": ['1\n"a"', '2\n"b"'], "outputs": ["3", "7"]}, {}),
    ([NAMED], {}),
    (NAMED, {}),
    (LCB, {"metadata": json.dumps({"func_name": "f"})}),
    ([{**LCB[0], "metadata": {"func_name": "f"}}], {}),
    ({"metadata": {"func_name": "f"}, "public_test_cases": json.dumps(LCB)}, {}),
])  # fmt: skip
def test_functions_are_read_in_every_form(tests: Any, columns: dict[str, Any]) -> None:
    first = read_tests(tests, columns, False)[0]
    assert first == CallTest("f", [1, "a"], [3])


def test_results_in_one_more_list_are_accepted_where_all_are_as_apps_wraps_them() -> None:
    wrapped = read_tests({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[3], [[4]]]}, {}, False)
    assert [test.accepted for test in wrapped if isinstance(test, CallTest)] == [[[3], 3], [[[4]], [4]]]
    lists = read_tests({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[3], [4, 5]]}, {}, False)
    assert [test.accepted for test in lists if isinstance(test, CallTest)] == [[[3]], [[4, 5]]]


def test_a_result_that_is_text_may_be_text_or_json_beside_lists_and_is_json_beside_json() -> None:
    def accepted(argument: Any, expected: str) -> list[Any]:
        (test,) = read_tests({"fn_name": "f", "inputs": [argument], "outputs": [expected]}, {}, False)
        assert isinstance(test, CallTest)
        return test.accepted

    assert accepted(["Ann"], "Hello Ann") == ["Hello Ann"]
    assert accepted(["Ann"], "3") == ["3", 3]
    assert accepted('"Ann"', "3") == [3]
    assert accepted('"Ann"', "Hello Ann") == ["Hello Ann"]


CHECK = "def check(candidate):\n    assert candidate(1) == 2"
CASES = (
    "from solution import f\n\ndef test_a():\n    assert f(1) == 2\n\ndef test_b():\n    assert f(2) == 3\n"
)


def test_statements_of_a_list_are_cases_and_what_checks_nothing_runs_before_those_that_follow() -> None:
    tests = read_tests(["import math", "assert f(1) == 2", "x = f(2)", "assert x == 3"], {}, False)
    texts = [test.text for test in tests if isinstance(test, StatementTest)]
    assert texts == ["import math\nassert f(1) == 2", "import math\nx = f(2)\nassert x == 3"]


@pytest.mark.parametrize(("tests", "columns"), [
    ({"test": CHECK, "entry_point": "f"}, {}),
    (CHECK, {"entry_point": "f"}),
    (CHECK + "\n\ncheck(f)", {}),
    ({"test": {"test": CHECK}, "entry_point": "f"}, {}),
])  # fmt: skip
def test_check_is_called_with_the_entry_point(tests: Any, columns: dict[str, Any]) -> None:
    (test,) = read_tests(tests, columns, False)
    assert isinstance(test, StatementTest)
    assert test.text.endswith("check(f)") and test.code_names == {"f"}


def test_each_test_function_is_a_case() -> None:
    tests = read_tests({"test": CASES}, {}, False)
    assert [(test.case, test.code_names) for test in tests if isinstance(test, StatementTest)] == [
        ("test_a", {"f"}),
        ("test_b", {"f"}),
    ]


@pytest.mark.parametrize(("text", "names"), [
    ("assert sum(10, 15) == 6", {"sum"}),
    ("assert gcd(4, 6) == 2 and set(f(1)) == {1}", {"f"}),
    ("assert lcm(2, 3) == 6 and len([lcm(1, 1)]) == 1", {"lcm"}),
    ("assert add(1, 2) == 3\nassert subtract(2, 1) == 1", {"add", "subtract"}),
    ("x = f(1)\nassert sorted(x) == [1]", {"f"}),
    ("from solution import mean\nassert isclose(mean([1]), 1)", {"mean"}),
    ("import numpy\nassert math.isclose(f(2), 1.5)", {"f"}),
])  # fmt: skip
def test_only_names_that_nothing_else_defines_are_of_the_code(text: str, names: set[str]) -> None:
    (test,) = read_tests(text, {}, True)
    assert isinstance(test, StatementTest) and test.code_names == names


@pytest.mark.parametrize("text", [
    "try:\n    f(1)\nexcept ValueError:\n    pass\nelse:\n    assert False",
    "x = [2, 1]\nf(x)\nassert x == [1, 2]",
    "ok = False\ntry:\n    f(1)\nexcept ValueError:\n    ok = True\nassert ok",
    "def helper(x):\n    return f(x)\nfor a, b in [(1, 2)]:\n    if helper(a) != b:\n"
    "        raise ValueError",
    "import unittest\nclass A(unittest.TestCase):\n    def setUp(self):\n        self.f = f\n"
    "    def test_a(self):\n        self.assertEqual(self.f(1), 2)",
    "import pytest\ndef test_a():\n    with pytest.raises(KeyError):\n        f(1)",
    "results = [f(x) for x in range(3)]\nassert all(results)",
    "with open('x') as g:\n    assert f(g.read())",
])  # fmt: skip
def test_a_check_may_depend_on_the_code_by_any_way(text: str) -> None:
    assert read_tests(text, {}, False)


PACKED = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(MAPS)))).decode()
NUMPY = "import numpy as np\nassert np.allclose(f(1), 2)"


@pytest.mark.parametrize(("tests", "reason"), [
    (None, "the ground truth is None"),
    (3, "the ground truth is 3"),
    ("3", "the ground truth is 3"),
    ([], "the list"),
    ({}, "nothing"),
    ([3], "the list"),
    ({"answer": "3"}, "has answer"),
    ({"assert_case": [3]}, "assert_case is"),
    ({"test": 7, "entry_point": "f"}, "test is 7"),
    ("# assert f(1) == 1", "assert nothing"),
    ("hello world", "no Python"),
    ("assert f(1) = 1", "no Python, line 1"),
    (["assert True"], "nothing of the code"),
    (["assert (f(1) == 2, 'text')"], "can fail"),
    (["assert f(1) or True"], "can fail"),
    ("f(1)\nprint(f(2))", "assert nothing"),
    ("try:\n    assert f(1)\nexcept AssertionError:\n    pass", "can fail"),
    ("x = 1\nf(1)\nassert 1 == x", "can fail"),
    (CHECK, "nothing calls check"),
    ({"test": CHECK}, "entry_point"),
    ("def test_a():\n    assert 1 + 1 == 2", "nothing of the code"),
    ("from solution import f\n@pytest.mark.skip\ndef test_a():\n    assert f(1)", "nothing calls test_a"),
    (CASES.replace("test_a()", "test_a(tmp_path)"), "takes tmp_path"),
    (CASES.replace("test_a()", "test_a(capsys)"), "capsys"),
    (CASES + "import pytest\npytest.importorskip('x')", "pytest.importorskip"),
    (CASES.replace("def test_a", "async def test_a"), "coroutine"),
    ("from unittest.mock import patch\nwith patch('builtins.input'):\n    assert f()", "patch"),
    ("import sys, io\nsys.stdout = io.StringIO()\nf()\nassert sys.stdout.getvalue()", "replace sys"),
    (NUMPY, "packages: true"),
    ({"inputs": ["1"], "outputs": []}, "as many"),
    ({"inputs": ["1"]}, "has inputs"),
    ({"inputs": ["1"], "outputs": ["\n"]}, "no output"),
    ({"inputs": [{"a": 1}], "outputs": ["1"]}, "an input"),
    ({"fn_name": "f", "inputs": ["Ann"], "outputs": ["Ann"]}, "as JSON"),
    (LCB, "names no function"),
    (PACKED, "unpickling runs code"),
    ({"public_test_cases": json.dumps(MAPS), "private_test_cases": PACKED}, "unpickling runs code"),
    ({**LISTS, "generated_checker": "import sys"}, "checker program"),
    ({"language": "cpp", "test_cases": MAPS}, "cpp"),
    ([MAPS[0], "assert f(1)"], "the list"),
])  # fmt: skip
def test_what_tests_nothing_or_cannot_be_run_is_refused_by_name(tests: Any, reason: str) -> None:
    with pytest.raises(TestsError) as caught:
        read_tests(tests, {}, False)
    assert reason in str(caught.value)


def test_a_package_that_the_tests_import_has_to_be_allowed_and_installed() -> None:
    assert read_tests(NUMPY, {}, True)
    with pytest.raises(TestsError, match="not installed"):
        read_tests(NUMPY.replace("numpy", "no_such_package"), {}, True)


def test_a_column_of_a_natural_language_is_no_language_of_programs() -> None:
    assert read_tests(LISTS, {"language": "en"}, False) == OUTPUTS


def test_np_of_a_test_without_its_import_is_numpy_and_never_the_codes() -> None:
    (test,) = read_tests(["assert np.allclose(f(1), 2)"], {}, True)
    assert isinstance(test, StatementTest)
    assert test.code_names == {"f"}
    assert "import numpy as np" in test.setup
    with pytest.raises(TestsError, match="packages"):
        read_tests(["assert np.allclose(f(1), 2)"], {}, False)


@pytest.mark.parametrize("test", [
    "import asyncio\nassert asyncio.run(f(1)) == 2",
    "import asyncio\nasync def main():\n    assert await f(1) == 2\nasyncio.run(main())",
    "import asyncio\nassert asyncio.get_event_loop().run_until_complete(f(1)) == 2",
])  # fmt: skip
def test_tests_that_await_the_code_are_refused(test: str) -> None:
    with pytest.raises(TestsError, match="coroutines"):
        read_tests(test, {}, False)


@pytest.mark.parametrize("test", [
    "import pandas as pd\nassert isinstance(f(), pd.DataFrame)",
    "from pandas.testing import assert_frame_equal\nassert_frame_equal(f(), 1)",
    "import matplotlib.pyplot as plt\nassert isinstance(f(), plt.Axes)",
    "assert isinstance(f(), pd.DataFrame)",
])  # fmt: skip
def test_tests_with_objects_that_are_not_copied_are_refused(test: str) -> None:
    with pytest.raises(TestsError, match="not copied"):
        read_tests(test, {}, True)


def test_expected_tuples_and_sets_are_lists_as_results_are() -> None:
    literal = "{'fn_name': 'f', 'inputs': [(1,)], 'outputs': [{'a': ({3, 2}, (1, 2))}]}"
    assert read_tests(literal, {}, False) == [CallTest("f", [1], [{"a": [[2, 3], [1, 2]]}])]


@pytest.mark.parametrize("test", [
    "class K(Base):\n    pass\nassert K().f() == 1", "assert type(f()) is A", "assert type(f()) == A",
])  # fmt: skip
def test_tests_that_need_the_classes_of_the_code_in_their_process_are_refused(test: str) -> None:
    with pytest.raises(TestsError, match="another process"):
        read_tests(test, {}, False)


def test_types_that_the_tests_know_may_be_compared() -> None:
    assert read_tests("assert type(f()) is list", {}, False)
