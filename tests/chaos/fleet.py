"""The processes of a run under chaos, started as `tidemill up` starts them, and started again when they die.

A killed process comes back after the supervisor's first pause, always: like a container that restarts.
Guarantees: when the fleet is closed, none of its processes is left.
"""

import asyncio
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from tests.chaos.mortal_redis import MortalRedis
from tests.support.preloaded import Process, start_module, start_plain
from tidemill.common.config import RunConfig
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import publish_config
from tidemill.common.store import ClaimStore
from tidemill.common.wire.keys import Keys
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.up.specs import ServiceSpec, service_environment, service_specs
from tidemill.services.console.up.supervisor import FIRST_PAUSE_S

POLL_S = 0.05
LEAVES = "leaving: the run is finished"
LEAVE_TIMEOUT_S = 120.0
ROLLOUT = "tidemill.services.rollout"


class ServiceError(AssertionError):
    """A process ended in a way that nothing which was done to it explains."""


@dataclass
class Member:
    """One place in the fleet, and the process that fills it now."""

    spec: ServiceSpec
    process: Process
    started_at: float
    is_kept: bool = True
    """Whether it is started again when it dies."""
    has_lost_power: bool = False
    """Whether it died of a power cut, whatever else it was told to do."""

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None


def environment_servers(config: RunConfig) -> list[ServiceSpec]:
    """The server of the run's environments, where they have one, at the address that they are given."""
    address = urlsplit(str(config.rollout.environment.options.get("address", "")))
    if address.port is None:
        return []
    command = (sys.executable, "-m", "tests.chaos.sums_server", str(address.port))
    return [ServiceSpec("environment-server", "environment server", command)]


class Fleet:
    """Redis with its append-only file, one trainer, and workers that come and go."""

    def __init__(self, folder: Path, config: RunConfig, is_forked: bool = False) -> None:
        """`is_forked` spares processes their imports."""
        self.folder = folder
        self.config = config
        self.keys = Keys(config.run_id)
        self.is_forked = is_forked
        self.redis = MortalRedis(folder / "redis")
        self.members: dict[str, Member] = {}
        self.is_finished = False
        """The trainer has ended with 0: all steps are committed."""
        self._num_joined = 0
        self._keeper: asyncio.Task[None] | None = None

    @property
    def run_dir(self) -> Path:
        """The folder that the services write into."""
        return self.folder / self.keys.run_id

    async def __aenter__(self) -> "Fleet":
        await self.redis.start()
        self.broker = await Broker.connect(self.redis.url)
        RunFolder(self.folder, self.keys.run_id).create(self.config)  # as `tidemill up` does first
        self.broker.claims = ClaimStore(self.run_dir)
        await publish_config(self.broker, self.keys, self.config)
        for spec in (*environment_servers(self.config), *service_specs(self.config)):
            self._start(spec)
        self._keeper = asyncio.create_task(self._keep(), name="keeper")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        for member in self.members.values():
            member.process.kill()
            member.process.wait()
        await self.broker.close()
        await self.redis.stop()

    def check(self) -> None:
        """Pass on what went wrong in the background."""
        if self._keeper is not None and self._keeper.done() and not self._keeper.cancelled():
            self._keeper.result()

    def running(self, role: str, is_kept: bool = True) -> list[str]:
        """Names of the processes that run now, in a stable order."""
        return sorted(
            name
            for name, member in self.members.items()
            if member.spec.role == role and member.is_kept is is_kept and member.is_running
        )

    def kill(self, name: str) -> float:
        process = self.members[name].process
        process.kill()
        process.wait()
        return time.time()

    async def kill_redis(self) -> float:
        """SIGKILL of the server, which comes back with what its append-only file holds."""
        self.redis.kill()
        died_at = time.time()
        await asyncio.sleep(FIRST_PAUSE_S)
        await self.redis.restart()
        return died_at

    async def lose_tail(self, rng: random.Random) -> tuple[float, int]:
        """Redis dies and comes back without its last writes; returns when, and the bytes that are gone."""
        self.redis.kill()
        died_at = time.time()
        num_bytes = self.redis.lose_tail(rng)
        await asyncio.sleep(FIRST_PAUSE_S)
        await self.redis.restart()
        return died_at, num_bytes

    async def cut_power(self, rng: random.Random) -> tuple[float, int]:
        """Every process dies at once, Redis first; returns when, and the bytes that Redis has lost."""
        self.redis.kill()
        died_at = time.time()
        for member in self.members.values():
            if member.is_running:
                member.has_lost_power = True
                member.process.kill()
        num_bytes = self.redis.lose_tail(rng)
        await self.redis.restart()
        return died_at, num_bytes

    def join(self, role: str) -> str:
        """One worker more; returns its name."""
        self._num_joined += 1
        name = f"{role}-joined-{self._num_joined}"
        module = f"tidemill.services.{role}"
        command = (sys.executable, "-m", module, "--run", self.keys.run_id, "--name", name)
        self._start(ServiceSpec(name, role, command, {"OMP_NUM_THREADS": "1"}), is_kept=False)
        return name

    async def leave(self, name: str, is_term: bool) -> int:
        """One worker less; returns its exit code."""
        process = self.members[name].process
        process.send_signal(signal.SIGTERM if is_term else signal.SIGKILL)
        return await asyncio.to_thread(process.wait, LEAVE_TIMEOUT_S)

    def log_of(self, name: str) -> str:
        """What all processes of this name have printed so far."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _start(self, spec: ServiceSpec, is_kept: bool = True) -> None:
        env = {**service_environment(self.redis.url, self.folder), **spec.env}
        log = self.folder / f"{spec.name}.log"
        command = ["tests.chaos.generated" if word == ROLLOUT else word for word in spec.command]
        if self.is_forked:
            at = command.index("-m") + 1
            process = start_module(command[at], command[at + 1 :], log, env)
        else:
            process = start_plain(command, log, env)
        self.members[spec.name] = Member(spec, process, time.time(), is_kept)

    async def _keep(self) -> None:
        """Start again what was killed. What ends by itself must have had a reason that chaos gives it."""
        due: dict[str, float] = {}
        while True:
            for name, member in self.members.items():
                if not member.is_kept or member.is_running:
                    continue
                if name not in due:
                    code = member.process.returncode
                    if code == 0 and member.spec.ends_run:
                        self.is_finished = True
                        return
                    if code == 0 and LEAVES in self.log_of(name):
                        member.is_kept = False  # a worker, just before its trainer has ended
                        continue
                    if code != -signal.SIGKILL:
                        words = self.log_of(name)[-3000:]
                        raise ServiceError(f"{name} ended with exit code {code}:\n{words}")
                    due[name] = time.monotonic() + FIRST_PAUSE_S
                elif time.monotonic() >= due[name]:
                    del due[name]
                    self._start(member.spec)
            await asyncio.sleep(POLL_S)
