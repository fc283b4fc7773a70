"""Files of tests/gpu as a part of the proof: `python -m benchmarks.gpu.pytest_part test_policy.py [--dry]`.

A dry run computes on the CPU what does not need a GPU's own kernels. The last line is JSON; ends with 1 where
a test failed, or none ran.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from benchmarks.report import print_result

TESTS = Path(__file__).parents[2] / "tests/gpu"
DRY_VARIABLE = "TIDEMILL_GPU_TESTS_DRY"


class Counts:
    """A plugin of pytest that counts outcomes and keeps why tests were skipped."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.reasons: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Once a test, or more often where setting up or taking down went wrong."""
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        if report.outcome == "skipped":
            self.reasons[report.nodeid.rpartition("::")[2]] = str(report.longrepr[2])


def main(
    files: Annotated[list[str], typer.Argument(help="of tests/gpu")],
    dry: Annotated[bool, typer.Option("--dry", help="on the CPU, what can be")] = False,
) -> None:
    """Run the tests."""
    if dry:
        os.environ[DRY_VARIABLE] = "1"
    counts = Counts()
    paths = [str(TESTS / file) for file in files]
    code = pytest.main([*paths, "-q", "-rs", "-p", "no:xdist", "-p", "no:cacheprovider"], plugins=[counts])
    print_result(
        {**{name: counts.outcomes[name] for name in ("passed", "failed", "skipped")}, "why": counts.reasons}
    )
    raise typer.Exit(int(bool(code) or not counts.outcomes["passed"]))


if __name__ == "__main__":
    typer.run(main)
