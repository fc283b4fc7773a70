"""Statements that test code: what they can do with it, and what code without a solution does to pass them."""

from typing import Any

import pytest

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.services.jobs.sandbox.job import run_tests

pytestmark = pytest.mark.usefixtures("isolated")

LIMITS = SandboxConfig(time_s=20.0, total_s=60.0, memory_mb=256, file_mb=4)
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


@pytest.mark.parametrize(
    "code",
    [
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
    ],
)  # fmt: skip
def test_code_without_a_solution_passes_no_statement(code: str) -> None:
    assert share(code, TESTS) == 0


@pytest.mark.parametrize(
    ("code", "test"),
    [
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
    ],
)  # fmt: skip
def test_statements_do_with_code_what_they_would_do_beside_it(code: str, test: str) -> None:
    assert share(code, [test]) == 1
    assert share("", [test]) == 0
