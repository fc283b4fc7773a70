"""Services that tests fork do what `python -m` does: exit codes, signals, output, environment."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.preloaded import ForkedProcess, server, start_module
from tests.support.waiting import wait_until

PLAIN = {"PYTHONHASHSEED": "0"}
"""Read at the start of the interpreter."""
STUCK = "import sys; print('begun', file=sys.stderr, flush=True); import time; time.sleep(600)"


def forkable() -> dict[str, str]:
    """What the server was started with: tests before may have changed this process's own."""
    return server().environment | {"TIDEMILL_REDIS_URL": "unix:///nowhere"}


@pytest.mark.parametrize("more", [{}, PLAIN], ids=["forked", "plain"])
def test_exit_codes_and_output_are_those_of_a_process(more: dict[str, str], tmp_path: Path) -> None:
    log, environment = tmp_path / "log", forkable() | more
    mistaken = start_module("tidemill.services.rollout", ["--run", "a"], log, environment)
    assert isinstance(mistaken, subprocess.Popen) is (more is PLAIN)
    assert mistaken.wait(120) == mistaken.returncode == mistaken.poll() == 2
    assert "tidemill rollout: " in log.read_text() and "Traceback" not in log.read_text()
    assert start_module("tidemill.services.no_such_service", [], log, environment).wait(120) == 1
    assert start_module("tidemill.services.trainer", ["--help"], log, environment).wait(120) == 0
    assert "usage: python -m tidemill.services.trainer" in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_signal_ends_it_and_is_its_exit_code(number: signal.Signals, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start_module("timeit", ["-n1", "-r1", STUCK], log, forkable())
    assert isinstance(process, ForkedProcess)
    await wait_until(lambda: log.exists() and "begun" in log.read_text())
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.send_signal(number)
    assert process.wait(120) == -number
    process.kill()  # it has ended: nobody else may be hit
