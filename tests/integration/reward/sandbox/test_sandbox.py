"""Code that is run to be scored: what passes, what hostile code can do, which is nothing, and statements
that test it."""

import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import wait_until
from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.services.reward.sandbox.job import make_cases, run_cases, run_tests

pytestmark = pytest.mark.usefixtures("each_jail")

LIMITS = SandboxConfig(time_s=20.0, total_s=60.0, memory_mb=256, file_mb=4)
HASTY = LIMITS.model_copy(update={"time_s": 1.5})
ANY_OUTPUT: dict[str, Any] = {"inputs": [""], "outputs": ["ok"]}


def passes(code: str, tests: Any, config: SandboxConfig = LIMITS) -> bool:
    result = run_tests(code, tests, config)
    assert "error" not in result, result
    return bool(result["passed"] == result["total"])


def outcome(code: str, config: SandboxConfig = LIMITS) -> dict[str, Any]:
    (result,) = run_cases(make_cases(code, ANY_OUTPUT, 1), config)
    return result


def test_standard_output_is_compared_blanks_and_rounding_aside() -> None:
    tests = {"inputs": ["3 4\n", "1 2"], "outputs": ["7 \n0.3333333333", "3\n0.3333333334\n"]}
    code = "a, b = map(int, input().split())\nprint(a + b)\nprint(1 / 3)"
    assert passes(code, tests)
    assert not passes(code.replace("a + b", "a - b"), tests)
    assert passes(
        code, str(tests).replace("'", '"').replace("\n", "\\n")
    )  # as datasets keep it: JSON in text


def test_functions_are_called_with_arguments_and_compared_by_value() -> None:
    tests = {"fn_name": "add", "inputs": [[1, 2], "[1]\n[2]"], "outputs": [[3], [[1, 2]]]}
    assert passes("def add(a, b):\n    print('noise')\n    return a + b", tests)
    assert passes("class Solution:\n    def add(self, a, b):\n        return a + b", tests)
    assert not passes("def add(a, b):\n    return 3", tests)


def test_statements_and_check_functions_run_behind_the_code() -> None:
    assert passes("def f(x): return x + 1", {"assert_case": ["assert f(1) == 2", "assert f(2) == 3"]})
    humaneval = {"test": "def check(candidate):\n    assert candidate(1) == 2", "entry_point": "f"}
    assert passes("def f(x): return x + 1", humaneval)
    assert not passes("def f(x): return x", humaneval)


def test_a_program_may_be_longer_than_an_argument_of_the_kernel() -> None:
    long = "#" * (200 << 10)
    assert passes(f"{long}\nprint(int(input()) + 1)", {"inputs": ["1"], "outputs": ["2"]})
    assert passes("def f(x): return x + 1", [f"{long}\nassert f(1) == 2"])
    assert not passes(f"{long}\nprint(1)", {"inputs": ["1"], "outputs": ["2"]})


def test_part_of_the_tests_counts_as_that_part() -> None:
    result = run_tests("print(input())", {"inputs": ["1", "2", "3"], "outputs": ["1", "2", "9"]}, LIMITS)
    assert (result["passed"], result["total"]) == (2, 3)
    assert result["first_failure"]["stdout"] == "3\n"


@pytest.mark.parametrize("leave", ["import sys; sys.exit(0)", "import os; os._exit(0)", "raise SystemExit"])
def test_code_that_leaves_before_its_tests_fails_them(leave: str) -> None:
    assert not passes(leave, ["assert f(1) == 1"])
    assert not passes(leave, {"fn_name": "f", "inputs": [[1]], "outputs": [1]})


@pytest.mark.parametrize(
    "tests", [None, 7, {}, {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}]
)
def test_a_ground_truth_without_tests_is_an_error_and_no_zero(tests: Any) -> None:
    result = run_tests("print(1)", tests, LIMITS)
    assert "ground truth" in result["error"]
    assert result["is_final"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("while True: pass", {"timeout"}),
        ("import time\ntime.sleep(3600)", {"timeout"}),
        ("while True: print('x' * 1000)", {"output"}),
        ("x = bytearray(1 << 30)", {"done"}),
        ("open('f', 'wb').write(b'x' * (64 << 20))", {"done", "file"}),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", {"timeout", "processes"}),
        (
            "import os\nfor _ in range(6):\n    if os.fork() == 0: break\nx = bytearray(100 << 20)\n"
            "for i in range(0, len(x), 4096): x[i] = 1\nimport time; time.sleep(60)",
            {"memory"},
        ),
    ],
    ids=["loop", "sleep", "output", "memory", "file", "fork bomb", "memory of many"],
)
def test_limits_end_what_does_not_end_by_itself(code: str, expected: set[str]) -> None:
    result = outcome(code, LIMITS if expected == {"memory"} else HASTY)
    assert result["outcome"] in expected, result
    assert result.get("code") != 0 or result["outcome"] != "done"


LEAVE = "for leave in (os.setsid, lambda: os.setpgid(0, 0)):\n    try: leave()\n    except OSError: pass\n"
"""A program that is left alone by a kill of its process group would go on without limits."""


def test_nothing_outlives_its_program() -> None:
    mark = f"tidemill-test-{os.getpid()}"
    code = (
        "import os, sys, time\nr, w = os.pipe()\nos.set_inheritable(w, True)\n"
        f"if os.fork() == 0:\n{textwrap.indent(LEAVE, '    ')}"
        f"    os.execv(sys.executable, ['{mark}', '-I', '-S', '-c', "
        "f'import os, time; os.write({w}, bytes(1)); time.sleep(600)'])\n"
        "os.read(r, 1)\nprint('ok')"
    )
    assert outcome(code)["stdout"] == "ok\n"
    assert not [p for p in psutil.process_iter() if mark in " ".join(_cmdline(p))]


async def test_a_jail_ends_with_whoever_started_it() -> None:
    mark = f"tidemill-sleeper-{os.getpid()}"
    code = f"import os, sys\nos.execv(sys.executable, ['{mark}', '-c', 'import time; time.sleep(600)'])"
    starter = os.fork()
    if starter == 0:
        run_cases(
            make_cases(code, ANY_OUTPUT, 1), LIMITS.model_copy(update={"time_s": 600.0, "total_s": 600.0})
        )
        os._exit(0)
    try:
        await wait_until(lambda: [p for p in psutil.process_iter() if mark in _cmdline(p)])
    finally:
        os.kill(starter, signal.SIGKILL)
        os.waitpid(starter, 0)  # noqa: ASYNC222 (it was killed)
    await wait_until(lambda: not [p for p in psutil.process_iter() if mark in _cmdline(p)])


def test_it_writes_and_reads_nothing_outside(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    for path in (secret, Path("/etc/passwd"), Path(__file__)):
        assert "Error" in outcome(f"open({str(path)!r}).read()\nprint('ok')")["stderr"]
    for path in (tmp_path / "new", Path("/usr/new"), Path("/new"), Path("/dev/new")):
        assert "Error" in outcome(f"open({str(path)!r}, 'w')\nprint('ok')")["stderr"], path
        assert not path.exists()
    assert passes("open('own', 'w').write('x')\nprint('ok')", ANY_OUTPUT)
    # The next program finds an empty folder.
    results = run_cases(
        make_cases("import os; print(os.listdir()); open('x', 'w')", ANY_OUTPUT, 1) * 2, LIMITS
    )
    assert [result["stdout"] for result in results] == ["[]\n", "[]\n"]


def test_it_sees_neither_the_environment_nor_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_REDIS_PASSWORD", "hunter2")
    code = (
        "import os, glob\nprint(dict(os.environ))\n"
        "for path in glob.glob('/proc/*/environ'):\n"
        "    try: print(open(path).read())\n    except OSError as error: print(error)"
    )
    result = outcome(code)
    assert "HOME" in result["stdout"]
    assert "hunter2" not in result["stdout"]
    seen = outcome("import glob; print(len(glob.glob('/proc/[0-9]*')))")["stdout"]
    assert int(seen or 0) <= 2


def test_it_cannot_kill_who_watches_it_nor_become_anybody_else() -> None:
    code = (
        "import os, signal\n"
        "for pid in (1, os.getppid(), -1):\n"
        "    try: os.kill(pid, signal.SIGKILL)\n    except OSError: pass\n"
        "for user in (0, 1000):\n    try: os.setuid(user); print('became', user)\n    except OSError: pass\n"
        "print('ok')"
    )
    assert outcome(code)["stdout"] in ("ok\n", "")  # kill(-1) may have met itself
    assert passes("print('ok')", ANY_OUTPUT)


def test_packages_of_this_project_are_there_for_who_asks() -> None:
    code = "import msgpack\nprint('ok')"
    assert passes(code, ANY_OUTPUT, LIMITS.model_copy(update={"packages": True}))
    assert not passes(code, ANY_OUTPUT)


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


TESTS: Any = [
    "assert f(1) == 2",
    "assert [f(x) for x in range(3)] == [1, 2, 3]",
    "assert abs(f(2) - 3) < 1e-9",
]
EQUAL = "def f(x): return E()"


def share(code: str, tests: Any) -> float:
    result = run_tests(code, tests, LIMITS)
    assert "error" not in result, result
    return float(result["passed"] / result["total"])


@pytest.mark.parametrize("code", [
    "import builtins\nbuiltins.exec = lambda *a: None",
    "import builtins\nbuiltins.compile = lambda *a, **k: 'pass'",
    "import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return 9",
    "abs = lambda x: 0\nrange = list = lambda *a: []\ndef f(x): return 9",
    "class E:\n    def __eq__(self, other): return True\n    def __sub__(self, o): return self\n"
    "    def __lt__(self, o): return True\n    def __abs__(self): return self\n" + EQUAL,
    "class E(int):\n    def __eq__(self, other): return True\n    def __hash__(self): return 1\n"
    "    def __lt__(self, o): return True\n    __sub__ = __abs__ = lambda self, *o: self\n" + EQUAL,
    "import sys, gc\nfor o in gc.get_objects():\n"
    "    if isinstance(o, dict) and 'proof' in o: sys.stdout.write('\\n' + o['proof']); sys.exit()",
    "import sys\nframe = sys._getframe()\nwhile frame:\n    print(frame.f_locals); frame = frame.f_back",
    "import os\npid = os.getppid()\n"
    "for name in ('environ', 'cmdline', 'fd/0', 'mem'):\n"
    "    print(open(f'/proc/{pid}/{name}', 'rb').read(99))",
    "import sys\nprint(sys.stdin.read()[::-1])\nprint(sys.stdin.read())",
    "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)",
    "import atexit, sys\natexit.register(lambda: print('ok'))\nsys.exit(0)",
    "import json\njson.loads = lambda *a, **k: ['answer', True]\ndef f(x): return True",
    "import sys\nsys.modules['__main__']._described = lambda value: ('import', ['operator', 'truth'])\n"
    "def f(x): return 1\nabs = isinstance = f",
    "def f(x): raise AssertionError",
    "",
])  # fmt: skip
def test_code_without_a_solution_passes_no_statement(code: str) -> None:
    assert share(code, TESTS) == 0


@pytest.mark.parametrize(("code", "test"), [
    ("def f(x): return {'a': (1, {2.5}, b'x', None)}", "assert f(0) == {'a': (1, {2.5}, b'x', None)}"),
    ("def f(x): x.sort()", "x = [3, 1]\nf(x)\nassert x == [1, 3]"),
    ("def f(g, xs): return [g(x) for x in xs]", "assert f(lambda x: x + 1, [1, 2]) == [2, 3]"),
    ("def f():\n    yield 1\n    yield 2", "assert list(f()) == [1, 2]"),
    ("def f(x):\n    raise KeyError(x)", "try: f(1)\nexcept KeyError: pass\nelse: assert False"),
    ("class Odd(ValueError): pass\ndef f(): raise Odd", "try: f()\nexcept Odd: pass\nelse: assert 0"),
    ("class Stack:\n    def __init__(self): self.items = []\n"
     "    def push(self, x): self.items.append(x)\n"
     "    def __len__(self): return len(self.items)",
     "s = Stack()\ns.push(4)\nassert len(s) == 1 and s.items == [4] and isinstance(s, Stack)"),
    ("class Node:\n    def __init__(self, v): self.v, self.next = v, None\n"
     "def f(n):\n    return n.v + (f(n.next) if n.next else 0)",
     "a, b = Node(1), Node(2)\na.next = b\nassert f(a) == 3"),
    ("def f(n):\n    return n.v + (f(n.next) if n.next else 0)",
     "class Node:\n    def __init__(self, v, n=None): self.v, self.next = v, n\n"
     "assert f(Node(1, Node(2))) == 3"),
    ("class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
     "    def __eq__(self, o): return self.x == o.x", "assert V(1) + V(2) == V(3) and V(1) != V(2)"),
    ("import math\nfrom fractions import Fraction\ndef f(x): return Fraction(1, x)",
     "assert math.isclose(f(2), 0.5) and f(2) == Fraction(1, 2)"),
    ("LIMIT = 10 ** 400\ndef f(): return LIMIT", "assert f() == LIMIT == 10 ** 400"),
    ("from collections import Counter, namedtuple\nP = namedtuple('P', 'x y')\n"
     "def f(s): return Counter(s)\ndef g(): return P(1, 2)",
     "assert f('aab') == {'a': 2, 'b': 1} and g() == (1, 2)"),
    ("def f(x):\n    print('noise')\n    return x", "print('more')\nassert f('x') == 'x'"),
])  # fmt: skip
def test_statements_do_with_code_what_they_would_do_beside_it(code: str, test: str) -> None:
    assert share(code, [test]) == 1
    assert share("", [test]) == 0
