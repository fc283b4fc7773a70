"""What right code returns and how it is written: values of many types, imports that graders give, deep
recursion; and code that tries to pass without being right."""

from typing import Any

import pytest

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.services.reward.sandbox.job import make_cases as cases_of
from tidemill.services.reward.sandbox.job import run_cases, run_tests

pytestmark = pytest.mark.usefixtures("each_jail")

LIMITS = SandboxConfig(time_s=20.0, total_s=60.0, memory_mb=512)
PACKAGES = LIMITS.model_copy(update={"packages": True, "memory_mb": 1024})


def share(code: str, tests: Any, config: SandboxConfig = LIMITS, **columns: Any) -> float:
    result = run_tests(code, tests, config, columns)
    assert "error" not in result, result
    return float(result["passed"] / result["total"])


def calls(expected: Any) -> dict[str, Any]:
    return {"fn_name": "f", "inputs": [[2]], "outputs": [expected]}


@pytest.mark.parametrize(("code", "expected"), [
    ("def f(x): return Counter('aab')", {"a": 2, "b": 1}),
    ("def f(x): return {x, 1}", [1, 2]),
    ("def f(x): return deque([x, (1, 2)])", [2, [1, 2]]),
    ("def f(x): return (i for i in range(x))", [0, 1]),
    ("from decimal import Decimal\ndef f(x): return [Decimal('0.1') * 3, Decimal(x)]", [0.3, 2]),
    ("from fractions import Fraction\ndef f(x): return Fraction(x, 4)", 0.5),
    ("def f(x): return [datetime.date(2024, 1, x), datetime.datetime(2024, 1, x)]",
     ["2024-01-02", "2024-01-02T00:00:00"]),
    ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\n    y: str\n"
     "def f(x): return P(x, 'a')",
     {"x": 2, "y": "a"}),
    ("P = namedtuple('P', 'x y')\ndef f(x): return [P(x, 1)]", [[2, 1]]),
    ("import enum\nclass C(enum.Enum):\n    A = 'a'\ndef f(x): return C.A", "a"),
    ("def f(x): return {1: x, (1, 2): x}", {"1": 2, "(1, 2)": 2}),
    ("def f(x): return b'ab'", "ab"),
])  # fmt: skip
def test_results_of_functions_may_be_of_any_plain_type(code: str, expected: Any) -> None:
    assert share(code, calls(expected)) == 1


@pytest.mark.parametrize(("code", "expected"), [
    ("def f(x): return np.arange(x)", [0, 1]),
    ("def f(x): return {'n': np.int64(x), 'm': [np.float32(0.5), np.bool_(True)]}",
     {"n": 2, "m": [0.5, True]}),
])  # fmt: skip
def test_results_of_functions_may_be_numpys(code: str, expected: Any) -> None:
    assert share(f"import numpy as np\n{code}", calls(expected), PACKAGES) == 1


@pytest.mark.parametrize(("code", "test"), [
    ("from decimal import Decimal\ndef f(): return Decimal('0.5')",
     "from decimal import Decimal\nassert f() == Decimal('0.5')"),
    ("def f(): return datetime.date(2024, 1, 2)", "import datetime\nassert f() == datetime.date(2024, 1, 2)"),
    ("def f(): return datetime.timedelta(1, 2)", "import datetime\nassert f() == datetime.timedelta(1, 2)"),
    ("def f(): return deque([1, 2], 3)", "from collections import deque\nr = f()\nassert r == deque([1, 2])\n"
     "assert r.maxlen == 3"),
    ("P = namedtuple('P', 'x y')\ndef f(): return P(1, [2])", "r = f()\nassert r.x == 1 and r.y == [2]\n"
     "assert r == (1, [2])"),
    ("def f(): return Counter('aab')", "assert f().most_common(1) == [('a', 2)]"),
    ("def f():\n    d = defaultdict(list)\n    d[1].append(2)\n    return d",
     "r = f()\nassert r == {1: [2]}\n"
     "assert r[3] == []"),
    ("def f(q): q.append(3)",
     "from collections import deque\nq = deque([1])\nf(q)\nassert list(q) == [1, 3]"),
    ("class A(ValueError): pass\nclass B(A):\n    def __init__(self, n):\n        super().__init__('no')\n"
     "        self.n = n\ndef f(): raise B(3)", "try: f()\nexcept A as e: assert e.n == 3\nelse: assert 0"),
    ("import json\ndef f(): json.loads('{')", "import json\ntry: f()\nexcept json.JSONDecodeError: pass\n"
     "else: assert 0"),
    ("def f(): sys.exit(3)", "try: f()\nexcept SystemExit: pass\nelse: assert 0"),
    ("from math import gcd as f", "assert f(4, 6) == 2"),
])  # fmt: skip
def test_statements_get_values_as_the_code_made_them(code: str, test: str) -> None:
    assert share(code, test) == 1
    assert share("def f(*args): return None", test) == 0


@pytest.mark.parametrize(("code", "test"), [
    ("def f(n): return np.arange(n) / 2", "assert np.allclose(f(3), [0, 0.5, 1]) and f(3).shape == (3,)"),
    ("def f(n): return np.int64(n)", "assert f(3) == 3 and isinstance(f(3), np.integer)"),
    ("def f(n): return np.array([['a', 'b']])", "assert (f(3) == np.array([['a', 'b']])).all()"),
    ("def f(a): return a.sum(axis=0)", "assert f(np.ones((2, 3))).tolist() == [2, 2, 2]"),
])  # fmt: skip
def test_statements_get_arrays_of_numpy(code: str, test: str) -> None:
    test = f"import numpy as np\n{test}"
    assert share(f"import numpy as np\n{code}", test, PACKAGES) == 1
    assert share("def f(*args): return None", test, PACKAGES) == 0


SOLUTION = """
class Solution:
    def f(self, nums: List[int], k: Optional[int] = None) -> int:
        heapq.heapify(nums)
        return gcd(heappop(nums), reduce(operator.mul, nums, 1)) + (0 if inf > 1 else bisect_left([], 1))
"""


def test_programs_have_the_imports_that_graders_give_and_their_own_names_win() -> None:
    assert share(SOLUTION, {"fn_name": "f", "inputs": [[[6, 4]]], "outputs": [2]}) == 1
    assert share("print(gcd(*map(int, input().split())), len(deque(permutations('ab'))))",
                 {"inputs": ["4 6"], "outputs": ["2 2"]}) == 1  # fmt: skip
    assert share("def gcd(a, b): return 7\nprint(gcd(4, 6))", {"inputs": [""], "outputs": ["7"]}) == 1
    assert share("class Solution:\n    def permutations(self, n): return n + 1",
                 {"fn_name": "permutations", "inputs": [[1]], "outputs": [2]}) == 1  # fmt: skip
    assert share("def lcm(a, b): return a * b", "assert lcm(2, 2) == 4") == 1


def test_imports_before_a_program_move_no_line_and_leave_future_statements_first() -> None:
    code = (
        "from __future__ import annotations\ndef g(x: Unknown) -> List[int]: return heapq.nope\nprint(g(1))"
    )
    (result,) = run_cases(cases_of(code, {"inputs": [""], "outputs": ["1"]}, 1), LIMITS)
    assert "line 3, in <module>" in result["stderr"] and "line 2, in g" in result["stderr"]
    assert share("from __future__ import annotations\ndef f(x: Unknown): return x", calls(2)) == 1
    assert share("from __future__ import annotations\ndef f(x: Unknown): return x", "assert f(2) == 2") == 1


DEPTH = 24_000
"""Below half of the limit: a call through C takes up to two frames."""


@pytest.mark.parametrize("recursive", [
    "def f(n): return 0 if n == 0 else 1 + f(n - 1)",
    "@cache\ndef f(n): return 0 if n == 0 else 1 + f(n - 1)",
    "def f(n): return 0 if n == 0 else 1 + sum(map(f, [n - 1]))",
    "class C:\n    def __init__(self, n): self.n = 1 + C(n - 1).n if n else 0\ndef f(n): return C(n).n",
], ids=["plain", "cached", "through map", "constructors"])  # fmt: skip
def test_recursion_goes_as_deep_as_in_other_graders_and_does_not_end_the_process(recursive: str) -> None:
    tests = {"fn_name": "f", "inputs": [[DEPTH]], "outputs": [DEPTH]}
    assert share(recursive, tests) == 1
    assert (
        share(f"{recursive}\nprint(f(int(input())))", {"inputs": [str(DEPTH)], "outputs": [str(DEPTH)]}) == 1
    )
    assert share(recursive, f"assert f({DEPTH}) == {DEPTH}") == 1


def test_endless_recursion_is_an_error_of_the_program_and_no_crash() -> None:
    code = "@cache\ndef f(n): return f(n + 1)\ntry: f(0)\nexcept RecursionError: print('deep')"
    assert share(code, {"inputs": [""], "outputs": ["deep"]}) == 1


ANY = "class E:\n    def __eq__(self, other): return True\n    __ne__ = lambda self, other: False\n"
TWO = ["assert f(1) == 2", "assert f(2) == 3"]


@pytest.mark.parametrize("test", [
    "assert add(1, 2) == 3", "assert abs(-1) == 1", "assert lcm(2, 3) == 6",
    {"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]},
])  # fmt: skip
def test_a_name_that_is_tested_is_the_codes_alone(test: Any) -> None:
    assert share("# add abs lcm gcd", test) == 0
    right = "from operator import add\nfrom math import gcd, lcm\ndef abs(x): return max(x, -x)"
    assert share(right, test) == 1


@pytest.mark.parametrize(("code", "tests"), [
    # A special method that leads from an object of the tests to all of their globals.
    ("import sys\ndef f(g):\n    peer, number = vars(g)['_peer'], vars(g)['_number']\n"
     "    for name in ('__getattribute__', '__reduce_ex__', '__init_subclass__', '__setattr__'):\n"
     "        try: print(peer.ask('operator', number, name, ('__globals__',)), file=sys.stderr); return 2\n"
     "        except AttributeError: pass\n    return 0", "def g(x): return x\nassert f(g) == 2"),
    # An object that says that it is another one of the standard library.
    ("class F:\n    def __call__(self, *a): return 0\nf = F()\nf.__module__ = 'unittest.mock'\n"
     "f.__qualname__ = '_ANY'", "assert f() == 5"),
    ("def f(x): return x\nf.__module__, f.__qualname__ = 'operator', 'truth'", TWO),
    # Names with which the tests compare.
    ("class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0",
     "assert math.isclose(f(1), 2.0)"),
    ("def isclose(*a, **k): return True\ndef f(x): return 0", "assert isclose(f(1), 2.0)"),
    ("def sorted(x): return [1, 2]\ndef f(x): return 0", "x = f(1)\nassert sorted(x) == [1, 2]"),
    ("def isclose(*a, **k): return True\nlen = abs = isclose\ndef f(x): return ''",
     "from solution import *\nassert len(f(1)) == 1 and isclose(abs(2), 2)"),
    # What runs the tests.
    ("import unittest\nunittest.TestResult.wasSuccessful = lambda s: True\n"
     "unittest.TestCase.assertEqual = lambda *a: None\ndef f(x): return 0",
     "import unittest\nclass A(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(1), 2)"),
    ("import sys, types\nsys.modules['pytest'] = types.ModuleType('pytest')\ndef test_a(): pass\n"
     "def f(x): return 0",
     "from solution import f\ndef test_a(): assert f(1) == 2"),
    ("def check(c): pass\ndef f(x): return 0", "def check(c):\n    assert c(1) == 2\ncheck(f)"),
    # What is compared.
    (ANY + "def f(x): return E()", TWO),
    (ANY + "def f(x): return [E()]", "assert f(1) == [2]"),
    (ANY + "class L(list, E): pass\ndef f(x): return L()", "assert f(1) == [2]"),
    (ANY + "def f(x): return {'a': E()}",
     "import pytest\ndef test_a(): assert f(1) == pytest.approx({'a': 2.0})"),
    ("class E:\n    def __sub__(self, o): return 0\n    __rsub__ = __sub__\ndef f(x): return E()",
     ["assert abs(f(1) - 2) < 1e-6", "assert abs(2 - f(1)) < 1e-6"]),
    ("class E:\n    def __sub__(self, o): return 0\ndef f(x): return E()",
     "import unittest\nclass A(unittest.TestCase):\n    def test_a(self): self.assertAlmostEqual(f(1), 2)"),
    ("class E:\n    def __sub__(self, o): return 0\ndef f(x): return E()",
     "import pytest\ndef test_a(): assert f(1) == pytest.approx(2)"),
    # Ends before the tests do.
    ("import os\ndef f(x): os._exit(0)", TWO),
    ("import sys\ndef f(x): sys.exit(0)", TWO),
    ("def f(x): raise KeyboardInterrupt", TWO),
    ("import os, signal\ndef f(x): os.kill(os.getppid(), signal.SIGKILL)", TWO),
    ("import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit", TWO),
    # A result that is no result.
    ("import json\njson.dumps = lambda *a, **k: '2'\ndef f(x): return 5", {"fn_name": "f", "inputs": [[1]],
     "outputs": [3]}),
    (ANY + "def f(x): return E()", {"fn_name": "f", "inputs": [[1]], "outputs": [2]}),
    ("def f(x): raise SystemExit(0)", {"fn_name": "f", "inputs": [[1]], "outputs": [None]}),
    ("import sys\nsys.exit(0)", {"inputs": ["1"], "outputs": ["2"]}),
    ("print('2', end='')\nimport os\nos._exit(1)", {"inputs": ["1"], "outputs": ["2"]}),
])  # fmt: skip
def test_code_that_is_not_right_passes_nothing_whatever_it_changes(code: str, tests: Any) -> None:
    assert share(code, tests) == 0
