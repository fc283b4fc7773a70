"""All tests beside each other; then those that failed once more, alone and one after the other.

A machine that is busy with other tests can make one fail that is right. Such a test is named at the end, and
the run counts as passed. A test that fails alone as well is a failure; so is a run that was stopped, one that
could not collect its tests, and one in which tests of many files fail, without a second look. Files are
counted, not tests: a fixture that fails once fails all tests of its file. A run that was not parallel needs
no second look: its tests were alone. The arguments are pytest's: `python -m tests.second_look tests -q -n 4`.
"""

import subprocess
import sys
from collections.abc import Sequence

import pytest

MAX_FAILED_FILES = 12
"""With failures in more files than this it is not the machine."""
HEADING = "unsteady: failed beside others, passed alone"


class FirstLook:
    """Notes in the process that leads the run what failed, and whether the others were all run."""

    def __init__(self) -> None:
        self.failed: dict[str, None] = {}
        self.is_parallel = False
        self.is_whole = False
        self.is_collected = True

    def pytest_configure(self, config: pytest.Config) -> None:
        """Whether tests run beside each other."""
        self.is_parallel = bool(config.getoption("numprocesses", None))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file could not be read; the tests of the others are run all the same."""
        self.is_collected = self.is_collected and not report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test, its fixtures or its worker failed."""
        if report.failed:
            self.failed[report.nodeid] = None

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """With -x, for one, tests are left."""
        self.is_whole = self.is_collected and not (session.shouldstop or session.shouldfail)


def main(arguments: Sequence[str]) -> int:
    """Exit code as pytest's: 0 where everything has passed, if only alone."""
    first = FirstLook()
    code = int(pytest.main(list(arguments), plugins=[first]))
    if code != pytest.ExitCode.TESTS_FAILED or not (first.is_parallel and first.is_whole and first.failed):
        return code
    failed_files = {node_id.partition("::")[0] for node_id in first.failed}
    if len(failed_files) > MAX_FAILED_FILES:
        print(
            f"{len(first.failed)} tests failed in {len(failed_files)} files: too many for a second look; "
            f"{MAX_FAILED_FILES} files get one at most"
        )
        return code
    print(f"\n=== a second look at {len(first.failed)} that failed: alone, one after the other", flush=True)
    code = subprocess.call([sys.executable, "-m", "pytest", "-q", *first.failed])
    if code == pytest.ExitCode.OK:
        print(f"\n=== {HEADING}", *first.failed, sep="\n    ", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
