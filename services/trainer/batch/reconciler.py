"""Compares what Redis holds with what the trainer knows, and repairs the difference.

After Redis has lost its last second, its streams are a consistent prefix: tickets or manifests that the
trainer has appended may be missing at the end. They are appended again under their own ids, which does no
harm where nothing was lost. FLUSHALL, a lost AOF or an operator's mistake can empty a Redis that answers as
if nothing had happened: the run's registration goes with everything else, and is made again, with the config
that workers start from.
"""

import asyncio
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog
import yaml
from redis.exceptions import ResponseError

from tidemill.common.config import RunConfig, load_recorded
from tidemill.common.errors import BrokerError, ConfigError, OutageError, TidemillError
from tidemill.common.files import write_atomically
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis import scripts
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import CONFIG_FILE, RUNNING, UID, keep_uid, update_state
from tidemill.common.streams import (
    START,
    Entry,
    Mark,
    append_after,
    entry_id_of,
    group_status,
    id_after,
    id_order,
    last_id,
    pending_ids,
    read_newest,
    read_range,
)
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, RUNS, Keys
from tidemill.common.wire.messages import Commit, WeightManifest
from tidemill.services.trainer.batch.scheduler import Scheduler
from tidemill.services.trainer.batch.stream_join import StreamJoin
from tidemill.services.trainer.batch.unexpected_entries import remove_unexpected, take_back
from tidemill.services.trainer.groups.group import Group

log = structlog.get_logger(__name__)

REGISTRATION = "trainer"
"""Field of the run's state: a token of the trainer process that has registered it."""
COMMITTING = "committing"
TRIMMING = "trimming"
"""Fields of the run's state: marks for the next commit and the next trim."""
WATCH_S = 5.0
"""How often the server is checked, whatever the trainer does."""
TERM_FILE = "trainer.term"
"""Below the run's folder: the number of the newest trainer process."""


class Reconciler:
    """Compares the streams with what they must hold; a check takes one Redis round trip or a few."""

    def __init__(self, broker: Broker, keys: Keys, scheduler: Scheduler) -> None:
        self.broker = broker
        self.keys = keys
        self.scheduler = scheduler
        self.manifest: WeightManifest | None = None
        """The version that this process announced last."""
        self.term = 0
        """Which trainer process of the run this is: each has a greater number than those before it."""
        self._config: RunConfig | None = None
        self._uid = ""
        self._token = _random_json()
        self._announced_as = ""
        """The id of the entry with `manifest`; empty until it is appended."""
        self.needs_checkpoint = False
        """Whether entries that were trained on may be gone, so that commits could not be replayed."""
        self.epoch = 0
        """How often another server has answered, or an emptied one: ids of an earlier epoch may belong to
        other entries there."""
        self._server = ""
        """What `_identity` gave at the last look; empty before the first."""
        self._has_restarted = False
        """Whether an epoch has begun that `take_restart` has not told yet."""

    async def begin(self, context: ServiceContext) -> None:
        """Take the next term, keep the config in the run's folder (for a trainer that starts on an emptied
        Redis), and register the run. Raises StorageError: the disk is full or read-only; call again."""
        self._config = context.registered or context.config
        # On the disk before anything is announced under it: after a crash no two trainers have one term.
        self.term = _next_term(context.run_dir)
        self._uid = keep_uid(context.run_dir)
        path = context.run_dir / CONFIG_FILE
        try:
            is_kept = load_recorded(path) == self._config
        except ConfigError:  # not there yet, or of another release
            is_kept = False
        if not is_kept:
            content = yaml.safe_dump(self._config.model_dump(mode="json"), sort_keys=False)
            write_atomically(path, content)
        await self._register(self._config)

    async def _register(self, config: RunConfig) -> None:
        # One unit: a Redis that is emptied between the two would keep the registration alone, and the config
        # would never be looked for again.
        await self.broker.execute("SADD", RUNS, self.keys.run_id)
        config = config.model_copy(update={"run_id": self.keys.run_id})
        unit = [
            # NX: the config that workers have started from stays, where Redis still has it.
            ("SET", self.keys.config, config.model_dump_json(), "NX"),
            ("HSET", self.keys.state, REGISTRATION, self._token, UID, json.dumps(self._uid)),
        ]
        await self.broker.pipeline(unit, atomic=True)

    async def _register_if_lost(self) -> bool:
        """Register the run again where Redis has lost it; returns whether it had."""
        if self._config is None:
            return False
        if await self.broker.execute("HGET", self.keys.state, REGISTRATION) == self._token:
            return False
        log.error("Redis has lost what it held of this run; all that is needed is appended again")
        await self._register(self._config)
        await update_state(self.broker, self.keys, status=RUNNING)
        return True

    async def restore_lost(self) -> None:
        """Append again what is missing at the end of prompts and weights."""
        # First unexpected entries: behind them the stream takes no number of ours.
        await self.remove_unexpected()
        await self.scheduler.reissue_lost()
        if await self.announce():
            log.warning("announced weights again that Redis had lost")

    async def remove_unexpected(self) -> None:
        """Remove unexpected entries from the numbered streams, which would take nothing more behind them."""
        await self.scheduler.remove_unexpected()
        for key, kind in ((self.keys.weights, WeightManifest), (self.keys.commits, Commit)):
            await remove_unexpected(self.broker, self.keys, key, kind)

    async def mark(self, field: str = COMMITTING) -> Mark:
        """Set a mark in Redis before a commit (or a trim), which Redis executes only if it has the mark.

        A mark is new each time. So a server that went back behind it takes no commit, because it may lack
        what was trained on; and a commit that an earlier trainer has sent, and that arrives late, is refused.
        """
        mark = Mark(self.keys.state, field, _random_json())
        await scripts.mark(self.broker, marks=mark.key, field=mark.field, value=mark.value)
        return mark

    async def take_restart(self) -> bool:
        """Check the server; returns whether it has restarted since this was last called."""
        await self.check_server()
        has_restarted = self._has_restarted
        self._has_restarted = False
        return has_restarted

    async def check_server(self) -> bool:
        """Look which server answers. Where it is another process than before, or an emptied one, a new epoch
        begins, and the run is registered again. Returns whether Redis may lack what was trained on since the
        last checkpoint (`needs_checkpoint`)."""
        identity = await self._identity()
        # Nothing may be awaited between here and `_note_restart`: another caller would find the server known
        # already, and commit what it may have lost.
        before = self._server
        self._server = identity
        is_other = before not in ("", identity)
        if is_other:
            self._note_restart()
            await self._rewrite_file()
        # Also on the same server: FLUSHALL leaves its identity as it was.
        if await self._register_if_lost() and not is_other:
            self._note_restart()
        return self.needs_checkpoint

    def _note_restart(self) -> None:
        self._has_restarted = True
        self.needs_checkpoint = True
        self.epoch += 1

    async def _rewrite_file(self) -> None:
        """Have the server write its append-only file again, from what it holds.

        A server that dies while it writes a script's commands into its file leaves the first half of them
        there. The one that reads the file then holds none of them; but they would be executed when the file
        is read the next time.
        """
        try:
            if (await self.broker.info("persistence")).get("aof_enabled") == "1":
                await self.broker.execute("BGREWRITEAOF")
        except OutageError:
            raise
        except (ResponseError, BrokerError) as error:  # under way already, or not allowed
            log.info("Redis does not rewrite its append-only file now", error=str(error))

    async def watch(self) -> None:
        """Check the server for ever: during a long step or evaluation workers may start on an emptied Redis,
        and wait for their run for a limited time."""
        while True:
            await asyncio.sleep(WATCH_S)
            await self.check_server()

    async def _identity(self) -> str:
        """A text that differs for each server process, and after each failover, also back to the first."""
        server = await self.broker.info("server")
        replication = await self.broker.info("replication")
        return f"{server['run_id']} {replication.get('master_replid', '')}"

    async def announce(self, manifest: WeightManifest | None = None) -> bool:
        """Announce this version, or the newest one again; False where the stream has it already.

        A version that an earlier trainer has announced is announced once more: workers that hold a newer
        version of a lost history return to it.
        """
        if manifest is not None:
            self.manifest = manifest.model_copy(update={"term": self.term})
            self._announced_as = ""
        if self.manifest is None:
            return False
        while True:
            last = await last_id(self.broker, self.keys.weights)
            if self._announced_as and id_order(last) >= id_order(self._announced_as):
                return False
            # The first announcement of version 8 is 9-0. Behind it, that of a later trainer is 9-1: workers
            # that hold a newer version of a lost history take the higher term, and go back.
            first = entry_id_of(self.manifest.version)
            entry_id = first if id_order(last) < id_order(first) else id_after(last)
            is_beyond = id_order(entry_id)[0] != id_order(first)[0]
            if is_beyond:  # the stream ends with a newer version, or with what is none
                if await remove_unexpected(self.broker, self.keys, self.keys.weights, WeightManifest):
                    continue
                await self._check_newer(self.manifest.version)
                return False
            if await append_after(self.broker, self.keys.weights, last, entry_id, self.manifest):
                self._announced_as = entry_id
                return True

    async def _check_newer(self, version: int) -> None:
        """The stream is beyond `version`. Raises TidemillError: with an entry that cannot be read, not with a
        newer version."""
        key = self.keys.weights
        newest = await read_newest(self.broker, key, WeightManifest)
        if newest is None or newest.message.version < version:
            raise TidemillError(
                f"version {version} cannot be announced: {key} stands at {await last_id(self.broker, key)}, "
                "with an entry that cannot be read. If a newer release wrote it, go on with that one; else "
                "remove it (XDEL, then XSETID to the version before), and restart."
            )

    async def take_back_versions(self, version: int) -> None:
        """Take back what is announced above `version`, where a trainer starts at that.

        A trainer announced its version again to an emptied Redis, and died before a checkpoint covered the
        commits that led to it. Workers would go on with weights of a lost history.
        """
        key = self.keys.weights
        entries = await read_range(self.broker, key, WeightManifest, entry_id_of(version + 1))
        lost = [entry for entry in entries if isinstance(entry, Entry) and entry.message.version > version]
        if not lost:
            return
        log.warning(
            "taking back versions of a lost history", version=version, newest=lost[-1].message.version
        )
        # Without dead letters: nothing is wrong with these entries.
        dead_letters = dict.fromkeys((entry.entry_id for entry in lost), b"")
        await take_back(self.broker, self.keys, key, dead_letters, entry_id_of(version - 1))

    async def learn_started_versions(self, groups: Iterable[Group]) -> None:
        """Read at which version incomplete groups were started: no token of theirs will be older."""
        unknown = [group for group in groups if group.started_version < 0 and not group.is_complete]
        if unknown and (rollout := await group_status(self.broker, self.keys.prompts(), ROLLOUT_GROUP)):
            # Most of them wait in the stream: no worker can have started what was not delivered.
            delivered = id_order(rollout.last_delivered)
            unknown = [group for group in unknown if id_order(entry_id_of(group.ticket)) <= delivered]
        if not unknown:
            return
        replies = await self.broker.pipeline(
            [("HGET", self.keys.progress(group.ticket), "version") for group in unknown]
        )
        for group, reply in zip(unknown, replies, strict=True):
            if isinstance(reply, bytes):
                group.started_version = int(reply)

    async def find_abandoned(self, groups: Iterable[Group]) -> list[int]:
        """Tickets of incomplete groups that no worker holds and that no stream will complete."""
        rollout = await group_status(self.broker, self.keys.prompts(), ROLLOUT_GROUP)
        reward = await group_status(self.broker, self.keys.trajectories(), REWARD_GROUP)
        abandoned: list[int] = []
        for group in groups:
            if group.is_complete or rollout is None:
                continue
            entry_id = entry_id_of(group.ticket)
            # It still waits in the stream for a worker.
            if id_order(entry_id) > id_order(rollout.last_delivered):
                continue
            # A worker holds it; where that one is dead, another takes it over when the lease has expired.
            if await pending_ids(self.broker, self.keys.prompts(), ROLLOUT_GROUP, entry_id, entry_id, 1):
                continue
            last_scored = reward.last_delivered if reward else START
            if not group.is_generated or not await self._is_being_scored(group, last_scored):
                abandoned.append(group.ticket)
        return abandoned

    async def _is_being_scored(self, group: Group, last_delivered: str) -> bool:
        """Whether a reward worker holds, or will be given, a trajectory without a score."""
        key = self.keys.trajectories()
        for index, entry_id in group.trajectory_ids.items():
            if index in group.scores:
                continue
            if id_order(entry_id) > id_order(last_delivered):
                return True
            if await pending_ids(self.broker, key, REWARD_GROUP, entry_id, entry_id, 1):
                return True
        return False


def _random_json() -> bytes:
    """A random value for a field of the run's state, whose values are JSON."""
    return f'"{secrets.token_hex(8)}"'.encode()


def _next_term(run_dir: Path) -> int:
    path = run_dir / TERM_FILE
    try:
        term = int(path.read_text()) + 1
    except (FileNotFoundError, ValueError):
        term = 1
    write_atomically(path, f"{term}\n")
    return term


@dataclass(frozen=True, slots=True)
class RunStreams:
    """The trainer's side of the run's streams: tickets out, groups in, and what repairs them.

    Example: `scheduler` has issued ticket 12, `join` holds what has arrived of its group, and `reconciler`
    publishes the ticket again where Redis has lost it.
    """

    scheduler: Scheduler
    join: StreamJoin
    reconciler: Reconciler
