"""Compares what Redis holds with what the trainer knows, and repairs the difference.

After Redis has lost its last second, its streams are a consistent prefix: tickets, commits or manifests
that the trainer has appended may be missing at the end. They are appended again under their own ids,
which cannot do harm where nothing was lost. A commit goes back only when no record that it was trained on
is needed any more: when a checkpoint covers it. Until then, history is what Redis holds.
"""

from collections.abc import Container, Iterable

import structlog

from common.errors import TidemillError
from common.redis.broker import Broker
from common.streams import (
    START,
    Entry,
    append_after,
    append_missing,
    entry_id_of,
    group_status,
    id_after,
    id_order,
    last_id,
    pending_ids,
    read_newest,
    read_range,
)
from common.wire.codec import SCHEMA
from common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys
from common.wire.messages import Commit, Lane, WeightManifest
from services.trainer.batch.scheduler import Scheduler
from services.trainer.batch.strays import move_strays_aside
from services.trainer.batch.stream_join import PendingGroup
from services.trainer.durable.commit_journal import CommitJournal
from services.trainer.durable.registration import Registration

log = structlog.get_logger(__name__)


class Reconciler:
    """Knows what must be in the streams; one Redis round trip or a few per check."""

    def __init__(self, broker: Broker, keys: Keys, scheduler: Scheduler, journal: CommitJournal) -> None:
        self.broker, self.keys, self.scheduler, self.journal = broker, keys, scheduler, journal
        self.manifest: WeightManifest | None = None
        self.registration: Registration | None = None
        self.term = 0
        """Which trainer process of the run this is: each has a greater number than those before it."""
        self._announced_as = ""
        self.needs_checkpoint = False
        """Whether entries that were trained on may be gone, so that commits could not be replayed."""
        self._server = ""
        self._is_news = False

    async def restore_lost(self) -> None:
        """Append again what is missing at the end of prompts and weights."""
        await self.move_strays_aside()
        await self.scheduler.reissue_lost()
        if await self.announce():
            log.warning("announced weights again that Redis had lost")

    async def move_strays_aside(self) -> None:
        """Rid the numbered streams of what others have written into them; they would take nothing more."""
        await self.scheduler.move_strays_aside()
        for key, kind in ((self.keys.weights, WeightManifest), (self.keys.commits, Commit)):
            await move_strays_aside(self.broker, self.keys, key, kind)

    async def restore_commits(self, below: int | None = None) -> None:
        """Append again what is missing at the end of the commits, of steps below `below`.

        Raises:
            TidemillError: some are missing that the journal does not hold: history would have a hole.
        """
        steps = self.journal.steps
        steps = steps if below is None else range(steps.start, min(steps.stop, max(below, steps.start)))
        is_enough = bool(steps) and (below is None or steps.stop == below)
        await self._check_for_hole(steps.start if is_enough else below or 0)
        lost = await append_missing(self.broker, self.keys.commits, steps, self.journal.read)
        if lost:
            log.warning("appended commits again that Redis has lost", first=lost[0], count=len(lost))

    async def _check_for_hole(self, first: int) -> None:
        """The stream must reach up to step `first`: below it, nobody has what Redis may have lost."""
        last = id_order(await last_id(self.broker, self.keys.commits))
        if last >= id_order(entry_id_of(first - 1)):
            return
        raise TidemillError(
            f"Redis has lost the commits of steps {last[0]} to {first - 1} of run {self.keys.run_id}, and "
            f"{self.journal.path} does not hold them: going on would leave a hole in the run's history. "
            "Restore Redis or that file from a backup, or start a new run from the last version's weights."
        )

    async def has_restarted(self) -> bool:
        """Whether another server process answers than when this was last asked, or an emptied one."""
        await self.may_lack_records()
        is_news, self._is_news = self._is_news, False
        return is_news

    async def may_lack_records(self) -> bool:
        """Whether Redis has restarted since the last checkpoint, and may lack what was trained on since."""
        before, self._server = self._server, await self._identity()
        if before not in ("", self._server):
            self._is_news = self.needs_checkpoint = True
        if self.registration is not None and await self.registration.is_lost():
            self._is_news = self.needs_checkpoint = True
        return self.needs_checkpoint

    async def _identity(self) -> str:
        """Changes with each process that serves, and with each failover: one back to the first server too."""
        server, replication = await self.broker.info("server"), await self.broker.info("replication")
        return f"{server['run_id']} {replication.get('master_replid', '')}"

    async def is_announced(self, version: int) -> bool:
        """Whether the rollout workers know of `version`, or of a newer one."""
        newest = await last_id(self.broker, self.keys.weights)
        return id_order(newest) >= id_order(entry_id_of(version))

    async def announce(self) -> bool:
        """Announce the newest version; False where the stream has it already.

        A version that an earlier trainer has announced is announced once more, behind that: workers that hold
        a newer one of a history that is lost learn in this way that the run is here again.
        """
        if self.manifest is None:
            return False
        while True:
            last = await last_id(self.broker, self.keys.weights)
            if self._announced_as and id_order(last) >= id_order(self._announced_as):
                return False
            first = entry_id_of(self.manifest.version)
            entry_id = first if id_order(last) < id_order(first) else id_after(last)
            if id_order(entry_id)[0] != id_order(first)[0]:
                if await move_strays_aside(self.broker, self.keys, self.keys.weights, WeightManifest):
                    continue
                await self._check_newer(self.manifest.version)
                return False
            if await append_after(self.broker, self.keys.weights, last, entry_id, self.manifest):
                self._announced_as = entry_id
                return True

    async def _check_newer(self, version: int) -> None:
        """The stream is beyond `version`: with a newer one, or with something that cannot be read."""
        key = self.keys.weights
        newest = await read_newest(self.broker, key, WeightManifest)
        if newest is None or newest.message.version < version:
            raise TidemillError(
                f"version {version} cannot be announced: {key} stands at {await last_id(self.broker, key)}, "
                "with an entry that cannot be read. If a newer release wrote it, go on with that one; else "
                "remove it (XDEL, then XSETID to the version before), and restart."
            )

    async def take_back_versions(self, version: int) -> None:
        """Take back what is announced above `version`, where a trainer starts that stands there.

        An emptied Redis was given its newest version back, and its trainer died before the commits that led
        there had a checkpoint to stand on. Workers would go on with weights that no history has.
        """
        key = self.keys.weights
        entries = await read_range(self.broker, key, WeightManifest, entry_id_of(version + 1))
        lost = [entry for entry in entries if isinstance(entry, Entry) and entry.message.version > version]
        if not lost:
            return
        log.warning(
            "taking back versions of a lost history", version=version, newest=lost[-1].message.version
        )
        floor = entry_id_of(version - 1) if version else START
        pairs = [part for entry in lost for part in (entry.entry_id, "")]
        await self.broker.script("move_aside", [key, self.keys.dead], [SCHEMA, floor, *pairs])

    def change_manifest(self, manifest: WeightManifest) -> None:
        """Announce this one from now on."""
        self.manifest, self._announced_as = manifest.model_copy(update={"term": self.term}), ""

    async def learn_started_versions(self, groups: Iterable[PendingGroup]) -> None:
        """Ask at which version incomplete groups were started: no token of theirs will be older."""
        unknown = [group for group in groups if group.started_version < 0 and not group.is_complete]
        if not unknown:
            return
        replies = await self.broker.pipeline(
            [("HGET", self.keys.progress(group.ticket), "version") for group in unknown]
        )
        for group, reply in zip(unknown, replies, strict=True):
            if isinstance(reply, bytes):
                group.started_version = int(reply)

    async def find_abandoned(self, groups: Iterable[PendingGroup]) -> list[int]:
        """Tickets of incomplete groups that no worker holds and that no stream will complete."""
        rollout = await group_status(self.broker, self.keys.prompts(), ROLLOUT_GROUP)
        reward = await group_status(self.broker, self.keys.trajectories(), REWARD_GROUP)
        abandoned: list[int] = []
        for group in groups:
            if group.is_complete or rollout is None:
                continue
            entry_id = entry_id_of(group.ticket)
            if id_order(entry_id) > id_order(rollout.last_delivered):
                continue
            if await pending_ids(self.broker, self.keys.prompts(), ROLLOUT_GROUP, entry_id, entry_id, 1):
                continue
            is_generated = len(group.trajectories) == group.group_size
            last_scored = reward.last_delivered if reward else START
            if not is_generated or not await self._is_being_scored(group, last_scored):
                abandoned.append(group.ticket)
        return abandoned

    async def _is_being_scored(self, group: PendingGroup, last_delivered: str) -> bool:
        """Whether a reward worker holds, or will be given, a trajectory without a score."""
        for index, entry in group.trajectories.items():
            if index in group.scores:
                continue
            if id_order(entry.entry_id) > id_order(last_delivered):
                return True
            key, first = self.keys.trajectories(), entry.entry_id
            if await pending_ids(self.broker, key, REWARD_GROUP, first, first, 1):
                return True
        return False


async def delete_results(broker: Broker, keys: Keys, lane: Lane, outstanding: Container[int]) -> int:
    """Delete the results of every ticket that is not outstanding; returns how many there were."""
    index = keys.result_tickets(lane)
    tickets = [int(raw) for raw in await broker.execute("SMEMBERS", index)]
    gone = [ticket for ticket in tickets if ticket not in outstanding]
    if gone:
        deletions = [("DEL", keys.results(ticket, lane)) for ticket in gone]
        await broker.pipeline([*deletions, ("SREM", index, *gone)], atomic=True)
    return len(gone)
