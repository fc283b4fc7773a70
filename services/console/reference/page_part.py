"""The generated last part of a page: written, or checked."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def write_or_check(arguments: Sequence[str], heading: str, make: Callable[[], str]) -> int:
    """Replace what stands in a file from `heading` on by what `make` returns.

    With `--check`, only say whether it is that already. Returns the exit code.
    """
    path = Path(arguments[-1])
    before = path.read_text(encoding="utf-8")
    current = before.partition(heading)[0] + make()
    if current == before:
        return 0
    if "--check" in arguments:
        module = getattr(sys.modules[make.__module__].__spec__, "name", "")  # also where it is __main__
        print(f"{path} is not current: python -m {module} {path}", file=sys.stderr)
        return 1
    path.write_text(current, encoding="utf-8")
    return 0
