"""Service processes that start in a tenth of a second: forked from a server that has imported what is heavy.

For tests that start many runs with real models. The processes are as real as others: own memory, own
connections, signals, exit codes; only the imports are shared.
"""

import multiprocessing
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from tests.support.runs import REPO, ServiceRun

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        "services.trainer.policy.transformers_policy",
        "services.rollout.engines.transformers",
        "services.reward.worker",
    ]
)


def run_service(role: str, arguments: list[str], variables: dict[str, str], log: Path) -> None:
    """What a forked process does: become `python -m services.ROLE`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(REPO)
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = [f"services.{role}", *arguments]
    runpy.run_module(f"services.{role}", run_name="__main__", alter_sys=True)


class ForkedProcess:
    """The part of `subprocess.Popen` that `ServiceRun` uses."""

    def __init__(self, *arguments: Any) -> None:
        self._process = CONTEXT.Process(target=run_service, args=arguments, daemon=True)
        self._process.start()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"{self._process.name} did not end in {timeout} s")
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


class PreloadedRun(ServiceRun):
    """A `ServiceRun` whose processes are forked."""

    def start(  # type: ignore[override]
        self, role: str, name: str = "", *overrides: str, arguments: tuple[str, ...] = ()
    ) -> ForkedProcess:
        """Fork one service process; its output goes into `<name>.log`."""
        name = name or role
        command = ["--run", self.keys.run_id, "--name", name]
        command += [part for override in overrides for part in ("--set", override)]
        variables = {"TIDEMILL_REDIS_URL": self.url, "TIDEMILL_RUNS_DIR": str(self.folder)}
        log = self.folder / f"{name}.log"
        process = ForkedProcess(role, [*command, *arguments], variables, log)
        self.processes[name] = process  # type: ignore[assignment]
        return process
