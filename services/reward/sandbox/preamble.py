"""What programs may use without importing it, and how deep they may recurse.

Graders of contests put these imports before each program (LiveCodeBench, `testing_util.py`; verl,
`prime_code`), so published solutions lack them: LeetCode's editor has `List`, `heapq` and `gcd` too. Only
names that occur in a source are imported for it, since imports cost time. They run before the source as a
program of their own: what the source defines wins, its line numbers stay, and `from __future__` may be its
first statement.
"""

import builtins
import functools
import importlib
import re
from collections.abc import Collection

RECURSION_LIMIT = 50_000
"""Frames. LiveCodeBench's limit; Python's own is 1,000."""
INT_DIGITS = 50_000
"""Longest integer that is read or written as text. LiveCodeBench's limit; Python's own is 4,300."""
MODULES = (
    "string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
    "itertools", "functools", "operator", "io", "sys", "json",
)  # fmt: skip
"""As if by `from MODULE import *` in this order, without names of built-ins, then `typing`'s, then by
`import MODULE`."""
WORD = re.compile(r"[^\W\d]\w*")


def write_imports(source: str, without: Collection[str] = ()) -> str:
    """Statements that import the names which occur in the source, except those in `without`: what a test
    calls must be the code's, and not what `operator` or `math` has of that name."""
    table = _imports()
    words = set(WORD.findall(source)) & table.keys()
    return "\n".join(table[word] for word in sorted(words - set(without)))


def is_imported(name: str) -> bool:
    """Whether a program has this name without importing it."""
    return name in _imports()


@functools.cache
def _imports() -> dict[str, str]:
    """The statement that imports each name."""
    table: dict[str, str] = {}
    for module in (*MODULES, "typing"):
        content = importlib.import_module(module)
        public = [name for name in vars(content) if not name.startswith("_")]
        for name in getattr(content, "__all__", public):
            # Not `A`, `I`, ... of `re`: programs have such names of their own.
            if len(name) > 1 and not hasattr(builtins, name) and hasattr(content, name):
                table[name] = f"from {module} import {name}"
    for module in MODULES:
        table[module] = f"import {module}"
    return table
