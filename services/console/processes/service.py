"""Which processes a run has on this machine, and one of them while it runs.

Each is the leader of a session of its own, so that the terminal's Ctrl-C reaches only the console, which
stops them in order. Output goes to a log file that is appended to over restarts.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tidemill.common.config import LocalServersConfig, RunConfig
from tidemill.common.process.programs import Program, run_own
from tidemill.common.redis.broker import WAIT_VARIABLE
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.run.state import RUNS_DIR_VARIABLE
from tidemill.services.console.processes.guard import Guard

VISIBLE = "CUDA_VISIBLE_DEVICES"


TAIL_BYTES = 8192
TAIL_LINES = 15
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""For processes that only wait, or whose jobs start processes of their own."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """How to start one process of a run."""

    name: str
    role: str
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    ends_run: bool = False
    """Whether the run may end with this process: true of the trainer only."""
    is_optional: bool = False
    """Whether the run goes on without it, where it cannot be kept alive."""


def service_specs(config: RunConfig) -> list[ServiceSpec]:
    """The trainer, and as many rollout and reward workers, and servers of rewards, as the config wants."""
    specs = [_worker(config, "trainer", "trainer", config.trainer.num_threads, config.trainer.gpus)]
    for index in range(config.rollout.workers):
        threads, gpus = config.rollout.num_threads, _engine_gpus(config, index)
        specs.append(_worker(config, "rollout", f"rollout-{index}", threads, gpus))
    for index in range(config.reward.workers):
        # Reward functions run in processes of their own: one thread each, or they fight over the cores.
        threads = 0 if "OMP_NUM_THREADS" in os.environ else 1
        specs.append(_worker(config, "reward", f"reward-{index}", threads))
    # All code rewards of a run share one queue, and the workers of the one that wants the most.
    sandboxes = [reward.sandbox.workers for reward in config.reward.named.values() if reward.sandbox]
    for index in range(max(sandboxes, default=0)):
        specs.append(_spec(config, Program.SANDBOX, "sandbox", f"sandbox-{index}", env=ONE_THREAD))
    if config.streams.archive.enabled:
        command = tuple(run_own(Program.JOBS, config.run_id))
        specs.append(ServiceSpec("jobs", "jobs", command, ONE_THREAD, is_optional=True))
    local_servers = {name: servers.local for name, servers in config.servers.items() if servers.local}
    for name, local in local_servers.items():
        for index in range(local.count):
            words = ("--servers", name, "--index", str(index))
            env = _visible(_server_gpus(config, local, index))
            specs.append(_spec(config, Program.REPLICA, "replica", f"replica-{name}-{index}", words, env))
    return specs


def exporter_spec(config: RunConfig, port: int) -> ServiceSpec:
    """The exporter of the whole run, where one is wanted."""
    command = run_own(Program.EXPORTER, config.run_id, "--port", str(port))
    return ServiceSpec("exporter", "exporter", tuple(command))


def _worker(config: RunConfig, role: str, name: str, threads: int, gpus: Sequence[int] = ()) -> ServiceSpec:
    env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return _spec(config, Program[role.upper()], role, name, env=env | _visible(gpus))


def _spec(
    config: RunConfig,
    program: Program,
    role: str,
    name: str,
    words: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> ServiceSpec:
    command = (*run_own(program, "--run", config.run_id, "--name", name), *words)
    return ServiceSpec(name, role, command, env or {}, ends_run=role == "trainer")


def _engine_gpus(config: RunConfig, index: int) -> Sequence[int]:
    size = config.rollout.vllm.tensor_parallel_size
    return config.rollout.gpus[index * size : (index + 1) * size]


def _server_gpus(config: RunConfig, local: LocalServersConfig, index: int) -> Sequence[int]:
    """A local server's own, or those of the rollout worker that it shares with."""
    if local.shares_rollout_gpus:
        return _engine_gpus(config, index % max(1, config.rollout.workers))
    if not local.gpus:
        return ()
    size = max(1, len(local.gpus) // local.count)
    first = index * size % len(local.gpus)
    return local.gpus[first : first + size]


def _visible(gpus: Sequence[int]) -> dict[str, str]:
    return {VISIBLE: ",".join(map(str, gpus))} if gpus else {}


def service_environment(redis_url: str, runs: Path) -> dict[str, str]:
    """What every service needs to know besides its arguments."""
    return {
        # A process that dies while Redis is away must not end the run for a mistake in the address.
        WAIT_VARIABLE: "300",
        **os.environ,
        URL_VARIABLE: redis_url,
        RUNS_DIR_VARIABLE: str(runs),
        "PYTHONUNBUFFERED": "1",
    }


class ServiceProcess:
    """One start of one service."""

    def __init__(
        self, spec: ServiceSpec, process: asyncio.subprocess.Process, log: Path, log_start: int, guard: Guard
    ) -> None:
        self.spec, self.log = spec, log
        self.started = time.monotonic()
        self._process, self._log_start, self._guard = process, log_start, guard

    @classmethod
    async def start(
        cls, spec: ServiceSpec, env: Mapping[str, str], log: Path, guard: Guard
    ) -> "ServiceProcess":
        """Start the process, with its output appended to `log`."""
        with log.open("ab") as output:
            log_start = output.tell()
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**env, **spec.env},
                start_new_session=True,
            )
        guard.watch(process.pid, "service")
        return cls(spec, process, log, log_start, guard)

    @property
    def pid(self) -> int:
        """Its process id, and the id of its process group."""
        return self._process.pid

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started

    async def wait(self) -> int:
        """Wait for its end; returns the exit code, negative for a signal.

        Children that it left behind, such as the pool of a killed reward worker, are ended too.
        """
        code = await self._process.wait()
        self.kill()
        self._guard.forget(self.pid)
        return code

    def terminate(self) -> None:
        """Ask it to finish or hand back what it holds, and to end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End its whole process group at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def output_tail(self) -> str:
        """The last lines that this start has written."""
        with contextlib.suppress(OSError), open(self.log, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, end - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
            return "\n".join(lines[-TAIL_LINES:])
        return ""
