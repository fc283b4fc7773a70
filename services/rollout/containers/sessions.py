"""The containers of one worker's sessions: room for them at a session's start, and their removal at its end.

Guarantees: a session that has ended leaves no container with its name, unless the engine did not answer: the
reaper removes it then. At the limit, or while the engine does not answer, no session starts: its ticket goes
back, and no attempt is counted.
"""

import asyncio
import contextlib
import errno
import time
from collections import Counter
from itertools import count

import structlog

from tidemill.common.config.environment import NO_CONTAINERS, EnvironmentConfig
from tidemill.common.errors import EnvironmentFaultError, MachineFaultError
from tidemill.common.process.failures import is_logged
from tidemill.common.process.shortage import fault_in
from tidemill.common.telemetry import metrics
from tidemill.services.rollout.containers.command import Container, ContainerCommand, EngineAwayError
from tidemill.services.rollout.containers.disk import EngineDisk
from tidemill.services.rollout.containers.names import SessionName

log = structlog.get_logger(__name__)

KILLED = frozenset({125, 137, 255})
"""Exit codes of containers that were killed, with their engine too, or could not be started."""
LISTING_AGE_S = 1.0
"""A list of containers may be so old when a session starts: hundreds start at once."""


class SessionContainers:
    def __init__(self, section: EnvironmentConfig) -> None:
        self.is_on = section.containers != NO_CONTAINERS
        self.command = ContainerCommand(section.containers)
        self._disk = EngineDisk(self.command)
        self.run_uid = ""
        """Set before the first session, where `is_on`."""
        self.live: set[str] = set()
        """Names of the sessions that are played, until their containers are removed."""
        self._max_containers = section.max_containers
        self._numbers = count(1)
        self._listing = asyncio.Lock()
        self._listed: list[Container] = []
        self._listed_at = float("-inf")
        self._away: EngineAwayError | None = None
        """Why there was no newer list at `_listed_at`."""
        self._removals: set[asyncio.Task[None]] = set()
        self._started: dict[str, frozenset[str]] = {}
        """Ids of the containers that a session's environment had when it was set up."""
        self._gone: dict[str, frozenset[str]] = {}
        """Those that were gone when it was asked for its reward."""
        self._begun_at: dict[str, float] = {}
        self._num_away = 0

    async def begin(self, session: SessionName | None) -> str:
        """Name a session that starts; empty where containers are not looked after. `end` has to follow.

        Raises:
            MachineFaultError: this node holds as many containers as it may, or the engine does not answer.
        """
        if not self.is_on or session is None:
            return ""
        if (fault := await self.find_fault()) is not None:
            raise fault
        name = str(session.numbered(next(self._numbers)))
        self.live.add(name)
        self._begun_at[name] = time.monotonic()
        return name

    async def end(self, name: str) -> None:
        """Remove what the session has left. Goes on where the caller is cancelled."""
        if not name:
            return
        removal = asyncio.create_task(self._remove(name), name=f"remove {name}")
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)
        await asyncio.shield(removal)

    async def close(self) -> None:
        """Wait for removals that are under way."""
        await self._disk.close()
        await asyncio.gather(*self._removals, return_exceptions=True)

    async def note_started(self, name: str) -> None:
        """Note which containers a session has once its environment is set up."""
        if name:
            with contextlib.suppress(EngineAwayError):  # `check` asks again
                running = [each.container_id for each in await self._of(name) if each.is_running]
                self._started[name] = frozenset(running)

    async def note_finishing(self, name: str) -> None:
        """Note which of these are gone before the environment is asked for its reward: there it may remove
        them itself."""
        if name:
            with contextlib.suppress(EngineAwayError):
                here = {each.container_id for each in await self._of(name)}
                self._gone[name] = self._started.get(name, frozenset()) - here

    async def check(self, name: str, reward: float | None) -> None:
        """Check that a reward of nothing is not that of a container which was lost: harnesses take an answer
        of the engine, such as exit code 137, for one of the task.

        Raises:
            EnvironmentFaultError: the engine does not answer, a container of the session was killed, or one
                that its environment had started is gone; or the engine's disk was full meanwhile.
            MachineFaultError: the engine cannot be asked, because this machine is short of something.
        """
        if not name or (reward is not None and reward > 0):
            return
        try:
            containers = await self._of(name)
        except EngineAwayError as error:
            fault = fault_in(error, "the session's containers cannot be listed")
            if fault is not None:
                raise fault from error
            raise EnvironmentFaultError(
                f"the session's result is not believed: {error}", "container"
            ) from error
        lack = self._disk.find_lack_since(self._begun_at[name])
        if lack:
            raise EnvironmentFaultError(
                f"the session's result is not believed: the disk of the containers was full ({lack})",
                "container",
            )
        for container in containers:
            if container.exit_code in KILLED:
                raise EnvironmentFaultError(
                    f"the session's result is not believed: its container {container.container_id[:12]} has "
                    f"ended with exit code {container.exit_code}",
                    "container",
                )
        gone = self._gone.get(name)
        if gone:
            raise EnvironmentFaultError(
                f"the session's result is not believed: its container {min(gone)[:12]} was removed while it "
                "was played",
                "container",
            )

    async def _of(self, name: str) -> list[Container]:
        return [each for each in await self.list_containers() if str(each.session) == name]

    async def find_fault(self) -> MachineFaultError | None:
        """Why no session can start on this node now; None where one can."""
        async with self._listing:
            if time.monotonic() - self._listed_at >= LISTING_AGE_S:
                with contextlib.suppress(EngineAwayError):  # kept in `_away`
                    await self.list_containers()
        if self._away is not None:
            return MachineFaultError(f"a session cannot start: {self._away}", errno.EAGAIN)
        lack = await self._disk.find_lack()
        if lack:
            return MachineFaultError(
                f"a session cannot start: the disk of the containers is full ({lack})", errno.EAGAIN
            )
        num_by_session = Counter(str(container.session) for container in self._listed)
        # A session that has just begun will have one.
        num_to_come = len(self.live - num_by_session.keys())
        num_held = num_by_session.total() + num_to_come
        if not self._max_containers or num_held < self._max_containers:
            return None
        return MachineFaultError(
            f"this node holds {num_held} containers of sessions, and may hold {self._max_containers} "
            "(rollout.environment.max_containers)",
            errno.EAGAIN,
        )

    async def list_containers(self) -> list[Container]:
        """Containers on this node with the name of a session.

        Raises:
            EngineAwayError: the engine does not answer.
        """
        try:
            listed = await self.command.list_containers()
        except EngineAwayError as error:
            # Else sessions that start at once would wait for a hung engine one after the other.
            self._away = error
            self._listed_at = time.monotonic()
            self._note_away(error)
            raise
        self._away = None
        self._num_away = 0
        self._listed = listed
        self._listed_at = time.monotonic()
        return listed

    async def remove(self, containers: list[Container], reason: str) -> None:
        """Remove containers; an engine that does not answer is logged, and the reaper tries again."""
        try:
            num_removed = await self.command.remove(containers)
        except EngineAwayError as error:
            self._note_away(error)
            return
        metrics.CONTAINERS_REMOVED.labels(reason).inc(num_removed)

    async def _remove(self, name: str) -> None:
        try:
            await self.remove(await self._of(name), "ended")
        except EngineAwayError:
            return  # logged; no session of this name is played any more, so the reaper removes it
        finally:
            self.live.discard(name)
            self._started.pop(name, None)
            self._gone.pop(name, None)
            self._begun_at.pop(name, None)

    def _note_away(self, error: EngineAwayError) -> None:
        self._num_away += 1
        if is_logged(self._num_away):
            log.warning(
                "containers cannot be looked after: those of ended sessions stay until the engine answers",
                error=str(error),
                so_far=self._num_away,
            )
