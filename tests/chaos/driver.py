"""One run under chaos: started, tormented by a plan of faults, watched, and judged by its streams."""

import asyncio
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.archive import Archive
from tests.chaos.archiver import ArchiverKiller, disagreements
from tests.chaos.environments import EnvironmentProcesses, misjudged, num_faults
from tests.chaos.faults import LONGEST_LAG_S, LOSSES, SESSION_KILLS, Fault, Kind
from tests.chaos.fleet import Fleet
from tests.chaos.generated import regenerated_share
from tests.chaos.recovery import TRAINER, Event, RecoveryWatch
from tests.chaos.replay import CheckpointCopies, ReplayResult, replay
from tests.chaos.verdict import Verdict, judge
from tests.support.waiting import wait_until
from tidemill.common.config import RunConfig
from tidemill.common.run.state import FINISHED, read_state
from tidemill.common.streams import id_order, last_id
from tidemill.services.trainer.policy.policy import Policy

POLL_S = 0.2
STUCK_S = 300.0
"""Without a commit for this long, the run has failed."""

Tell = Callable[[str], None]


class StuckError(AssertionError):
    """The run makes no progress any more."""


@dataclass
class Outcome:
    """What one run under chaos came to."""

    seed: int
    watch: RecoveryWatch
    num_planned_kills: int
    verdict: Verdict
    replay: ReplayResult
    wall_s: float
    num_lost_entries: int
    disagreements: list[str]
    """Entries in which the streams and what was archived of them differ."""
    num_archiver_kills: int
    num_faults: int = 0
    """Plays of sessions that ended in a fault of their environment."""
    misjudged: list[str] = field(default_factory=list)
    """Scores of sessions that no environment gave."""
    left_over: list[int] = field(default_factory=list)
    """Processes of environments that outlived the fleet."""
    regenerated_share: float = 0.0
    """Of the tokens that engines have generated, those that are in no trajectory."""

    @property
    def num_kills(self) -> int:
        return sum(event.kind in SESSION_KILLS for event in self.watch.events)

    @property
    def num_kills_left(self) -> int:
        """Planned kills that the run did not live to see."""
        return self.num_planned_kills - self.num_kills

    @property
    def is_good(self) -> bool:
        """Whether history is whole, and every version is what undisturbed training makes."""
        is_whole = self.verdict.is_clean and self.replay.matches and not self.disagreements
        return is_whole and not self.misjudged and not self.left_over


class Driver:
    """Does a plan of faults to one fleet."""

    def __init__(self, fleet: Fleet, faults: Sequence[Fault], seed: int, tell: Tell) -> None:
        self.fleet = fleet
        self.faults = faults
        self.tell = tell
        self.rng = random.Random(seed)
        self.archive = Archive(fleet.broker, fleet.keys)
        self.watch = RecoveryWatch(self.archive, fleet.keys)
        self.checkpoints = CheckpointCopies(fleet.run_dir, fleet.folder / "checkpoint-copies")
        self.archiver = ArchiverKiller(fleet, random.Random(seed))
        self.environments = EnvironmentProcesses(fleet)
        self._leaving: set[str] = set()
        self._started = time.time()

    async def run(self) -> None:
        """Until the trainer has done its last step. The last of the history is copied then."""
        background = [
            asyncio.create_task(self._observe(), name="observer"),
            asyncio.create_task(self._torment(), name="tormentor"),
            asyncio.create_task(self.archiver.run(), name="tormentor of archivers"),
        ]
        try:
            version = 0
            since = time.monotonic()
            while not self.fleet.is_finished:
                self.fleet.check()
                for task in background:
                    if task.done():
                        task.result()
                if self.archive.version != version:
                    version = self.archive.version
                    since = time.monotonic()
                if time.monotonic() - since > STUCK_S:
                    raise StuckError(f"no commit after version {version} for {STUCK_S:g} s")
                await asyncio.sleep(POLL_S)
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        await self.archive.catch_up()
        await self.archive.compare()
        self.watch.look_for_recovery()

    async def _observe(self) -> None:
        while True:
            await self.archive.catch_up()
            self.watch.look_for_recovery()
            await self.watch.look_for_loaded(self.fleet.broker)
            await asyncio.to_thread(self.checkpoints.follow)
            self.environments.look()
            await asyncio.sleep(POLL_S)

    async def _torment(self) -> None:
        async with asyncio.TaskGroup() as leaving:
            for fault in self.faults:
                await wait_until(lambda fault=fault: self.archive.version >= fault.at_version, STUCK_S)
                await asyncio.sleep(fault.wait_s(self.archive.version))
                # The trainer is about to end: nobody would start a Redis again that dies now, nor append what
                # it has lost.
                if await self._is_finished():
                    return
                await self._do(fault, leaving)

    async def _do(self, fault: Fault, leaving: asyncio.TaskGroup) -> None:
        if fault.kind is Kind.REDIS:
            # Noted when it happened: the first results come before the server is known to be back.
            event = self._note(fault.kind, "redis", time.time())
            event.died_at = await self.fleet.kill_redis()
            event.loaded_s = time.time() - event.died_at
            event.recovered_s = event.loaded_s
            await self.archive.compare()
        elif fault.kind in LOSSES:
            await self._lose(fault.kind)
        elif fault.kind is Kind.ENVIRONMENT:
            worker, died_at = await self.environments.kill(self.rng, STUCK_S)
            event = self._note(fault.kind, f"of {worker}", died_at)
            event.note = "its sessions are played again"
        elif fault.kind is Kind.JOIN:
            self._note(fault.kind, self.fleet.join(fault.role), time.time())
        elif fault.kind is Kind.LEAVE:
            joined = [*self.fleet.running("rollout", False), *self.fleet.running("reward", False)]
            # Who is asked a second time ends at once, with a code that says so.
            if joined := [name for name in joined if name not in self._leaving]:
                name = self.rng.choice(joined)
                self._leaving.add(name)
                leaving.create_task(self._leave(name, fault.is_term))
        else:
            victim = self.rng.choice(await self._victims(fault.kind.value))
            version = await self._exact_version()
            died_at = self.fleet.kill(victim)
            event = self._note(fault.kind, victim, died_at, version)
            if fault.kind is Kind.SERVER:
                event.note = "the sessions that it held are played again"

    async def _lose(self, kind: Kind) -> None:
        """Redis loses writes that services took for done."""
        if kind is Kind.FAILOVER:
            lag_s = self.rng.uniform(0, LONGEST_LAG_S)
            died_at = await self.fleet.redis.fail_over(lag_s)
            # Only now: the replica needs a while, and a run that ends before it takes over has seen no kill.
            event = self._note(kind, "redis", died_at)
            event.note = f"the replica was {lag_s:.2f} s behind"
        else:
            event = self._note(kind, TRAINER if kind is Kind.POWER else "redis", time.time())
            lose = self.fleet.cut_power if kind is Kind.POWER else self.fleet.lose_tail
            event.died_at, num_bytes = await lose(self.rng)
            event.note = f"{num_bytes:,} bytes of Redis's file gone"
        if kind is not Kind.POWER:  # then the next commit tells
            event.loaded_s = time.time() - event.died_at
            event.recovered_s = event.loaded_s
        async with self.fleet.redis.before_the_loss() as dead:
            await self.archive.look_into(dead)
        await self.archive.compare()

    async def _victims(self, role: str) -> list[str]:
        """Processes of the role that can be killed; waits while all of them are dead already."""
        return await wait_until(lambda: self.fleet.running(role), STUCK_S)

    async def _is_finished(self) -> bool:
        """Whether the trainer has recorded that the run is over; False where Redis is away."""
        try:
            async with asyncio.timeout(POLL_S):
                return (await read_state(self.fleet.broker, self.fleet.keys)).get("status") == FINISHED
        except TimeoutError:
            return False

    async def _exact_version(self) -> int:
        """Committed steps now; as last seen, where Redis is away."""
        try:
            async with asyncio.timeout(POLL_S):
                return id_order(await last_id(self.fleet.broker, self.fleet.keys.commits))[0]
        except TimeoutError:
            return self.archive.version

    async def _leave(self, name: str, is_term: bool) -> None:
        event = self._note(Kind.LEAVE, name, time.time())
        code = await self.fleet.leave(name, is_term)
        event.recovered_s = time.time() - event.died_at if is_term else None
        event.note = f"{'SIGTERM' if is_term else 'SIGKILL'}, exit code {code}"
        # Without its signal handler a process dies of SIGTERM: before it begins, when it holds nothing.
        expected = (-signal.SIGKILL,) if self.fleet.members[name].has_lost_power else ()
        if is_term and code not in (0, -signal.SIGTERM, *expected):
            raise AssertionError(
                f"{name} was asked to stop and ended with {code}:\n{self.fleet.log_of(name)[-3000:]}"
            )

    def _note(self, kind: Kind, victim: str, died_at: float, version: int | None = None) -> Event:
        version = self.archive.version if version is None else version
        event = Event(kind, victim, died_at - self._started, version, died_at)
        self.watch.add(event)
        self.tell(f"{event.at_s:6.1f} s  version {version:3d}  {kind.value:8s} {victim}")
        return event


async def torment(
    folder: Path,
    config: RunConfig,
    faults: Sequence[Fault],
    seed: int,
    load: Callable[[RunConfig], Policy],
    tell: Tell = lambda _: None,
    is_forked: bool = False,
) -> Outcome:
    """Do a whole run under chaos, and prove what its history is."""
    started = time.monotonic()
    async with Fleet(folder, config, is_forked) as fleet:
        driver = Driver(fleet, faults, seed, tell)
        try:
            await driver.run()
        except BaseException:
            for name in sorted(fleet.members):
                tell(f"--- {name}\n{fleet.log_of(name)[-2000:]}")
            raise
        differing = await disagreements(fleet, driver.archive)
    left_over = await driver.environments.left_over()
    wall_s = time.monotonic() - started
    archive = driver.archive
    verdict = judge(archive, config.trainer.group_size, config.trainer.max_staleness)
    tell("training once more, undisturbed")
    replayed = await replay(archive, config, load, driver.checkpoints)
    num_planned_kills = sum(fault.kind in SESSION_KILLS for fault in faults)
    lost = sum(
        len(copy.lost) for copy in (archive.tickets, archive.trajectories, archive.scores, archive.commits)
    )
    return Outcome(
        seed, driver.watch, num_planned_kills, verdict, replayed, wall_s, lost, differing,
        driver.archiver.num_kills, num_faults(archive), misjudged(archive, config), left_over,
        regenerated_share(folder, archive),
    )  # fmt: skip
