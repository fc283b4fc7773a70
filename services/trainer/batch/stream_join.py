"""Reads trajectories and scores by offset, joins them on `(ticket, index)`, and completes groups.

The first entry of a key wins; later ones are counted as duplicates and dropped. Entries of tickets that are
not outstanding are never kept, so the admission gate bounds memory. A checkpoint's positions lie below every
entry that is still needed.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import structlog

from tidemill.common.redis.broker import Broker
from tidemill.common.streams import (
    START,
    DeadLetterWriter,
    Entry,
    Garbled,
    OffsetReader,
    Trail,
    id_before,
    id_order,
    read_raw,
    trimmed_below,
)
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import Keys, StreamName
from tidemill.common.wire.messages import DeadLetter, Score, Ticket, Trajectory
from tidemill.services.trainer.groups.group import UNKNOWN_VERSION, Group

log = structlog.get_logger(__name__)

BLOCK_S = 1.0
READ_COUNT = 256
OBSERVE_S = 1.0

TRAJECTORIES = StreamName.TRAJECTORIES
SCORES = StreamName.SCORES
DEAD = StreamName.DEAD
STREAMS = (TRAJECTORIES, SCORES, DEAD)
NOTHING_SEEN = id_order(START)


class StreamJoin:
    """Outstanding groups, filled by three background readers; `changed` is set when something arrived.

    A stream has these positions, here in ascending order for one that is read to entry 9, of which an
    outstanding group has taken in entries 5 and 8:

        low water   4   all that outstanding groups have taken in is above: a checkpoint's `positions`
        seen        9   how far it is read in this epoch; the start until a checkpoint's position is checked
        high water  9   the newest entry read; a restart keeps it, and nothing up to it counts as new then
    """

    def __init__(self, broker: Broker, keys: Keys) -> None:
        self._broker = broker
        self._keys = keys
        # What the engine chose is trained on. Other readers leave it.
        broker.read_choices()
        self.groups: dict[int, Group] = {}
        self.complete: list[int] = []
        """Tickets of complete groups, in the order in which they became complete."""
        self.dead: dict[int, tuple[str, str]] = {}
        """Outstanding tickets that went to the dead letters: id of the dead letter, and why."""
        self.changed = asyncio.Event()
        self.unread_at = -math.inf
        """When something last arrived that could not be decoded or was the score of other tokens, so that a
        group may never be complete."""
        self.version = UNKNOWN_VERSION
        """Committed steps: no token of a newer version is of this run's history."""
        self.num_trajectories = 0
        self.on_score: Callable[[str, Score], None] = lambda *_: None
        """Hears of each new score of an outstanding group, and the id of its entry."""
        self._observed_at = -math.inf
        self.epoch = 0
        """The reconciler's epoch in which its positions are valid."""
        self._seen_up_to: Mapping[StreamName, tuple[int, int]] = {}
        """The newest entry of each stream that had been read before a restart or a loss of Redis, as
        `id_order` has it: what is read again is not counted again."""
        self._dead_letters = DeadLetterWriter(broker, keys, keys.scores())
        self._readers: dict[StreamName, OffsetReader[Any]] = {
            name: OffsetReader(broker, name.key(keys), name.message_type) for name in STREAMS
        }

    def expect(self, tickets: Iterable[Ticket | Trajectory]) -> None:
        """Keep what arrives for these tickets, or demonstrations, from now on."""
        for ticket in tickets:
            self.groups.setdefault(ticket.ticket, Group.of(ticket))

    def observe(self) -> None:
        """Report to Prometheus how many groups are in which state, at most every `OBSERVE_S` seconds."""
        if time.monotonic() < self._observed_at + OBSERVE_S:
            return
        self._observed_at = time.monotonic()
        num_generated = sum(group.is_generated for group in self.groups.values())
        num_ready = len(self.complete)
        metrics.TRAINER_GROUPS.labels("ready").set(num_ready)
        metrics.TRAINER_GROUPS.labels("scoring").set(num_generated - num_ready)
        metrics.TRAINER_GROUPS.labels("generating").set(len(self.groups) - num_generated)

    def close(self, ticket: int) -> None:
        """Forget a group that was trained or replaced; what arrives for it later is dropped."""
        self.groups.pop(ticket, None)
        self.dead.pop(ticket, None)
        if ticket in self.complete:
            self.complete.remove(ticket)

    async def wait(self, timeout_s: float) -> bool:
        """Wait until something arrives; False after `timeout_s` without anything."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.changed.wait()
        except TimeoutError:
            return False
        self.changed.clear()
        return True

    async def read(self, stream: StreamName) -> None:
        """Follow one of the streams for ever; a ticket in the dead letters never completes by itself."""
        take: Callable[[Any], None] = self._take_dead if stream == DEAD else self._take
        while True:
            reader = self._readers[stream]
            for entry in await reader.read(READ_COUNT, BLOCK_S):
                # At each entry, because appending a dead letter waits: `reread` may have replaced this reader
                # meanwhile, whose entries are then of a lost history.
                if reader is not self._readers[stream]:
                    break
                if isinstance(entry, Garbled):
                    await self._take_garbled(stream, entry)
                else:
                    take(entry)

    def reread(self, epoch: int = 0) -> None:
        """Forget what has arrived of groups that no step has taken, and read it again.

        After Redis has lost its tail, a trajectory that was read may be gone, and another one of the same key
        on its way with a score of its own: joining the two would train on a reward of other tokens.
        """
        untaken = [group for group in self.groups.values() if not group.is_taken]
        # Before the readers go back: what they read again has been counted.
        self._seen_up_to = {
            stream: max(id_order(position), self._seen_up_to.get(stream, NOTHING_SEEN))
            for stream, position in self.high_water().items()
        }
        low = self._low_water(untaken) | {DEAD: self._readers[DEAD].position}
        self._readers = {stream: reader.reread(low[stream]) for stream, reader in self._readers.items()}
        for group in untaken:
            group.forget()
        self.complete.clear()
        # A new one: dead letters that the old one has read may be gone too.
        self._dead_letters = DeadLetterWriter(self._broker, self._keys, self._keys.scores())
        self.epoch = epoch

    def positions(self) -> dict[StreamName, str]:
        """For each stream, a position below every entry that an outstanding group has taken in."""
        # A dead letter that has not been handled is read again.
        dead = [entry_id for entry_id, _ in self.dead.values()]
        return self._low_water(self.groups.values()) | {DEAD: self._below(DEAD, dead)}

    def high_water(self) -> dict[StreamName, str]:
        """For each stream, the newest entry read: up to it nothing is new when it is read again."""
        return {stream: self._readers[stream].position for stream in (TRAJECTORIES, SCORES)}

    async def has_read_all(self) -> bool:
        """Whether the streams hold nothing that the readers have not been given."""
        ends = {self._readers[name].key: end for name, end in self.seen().items()}
        unread = [await read_raw(self._broker, key, f"({end}", count=1) for key, end in ends.items()]
        return not any(unread)

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, besides the positions. `trails` are some of what was read of each
        stream: they show whether a position is still valid."""
        trails = {}
        for stream, reader in self._readers.items():
            trails[stream] = [list(rung) for rung in reader.trail.sure]
        return {
            "high_water": self.high_water(),
            "trails": trails,
            "num_trajectories": self.num_trajectories,
        }

    def seen(self) -> dict[StreamName, str]:
        """For each stream, how far it is read."""
        return {stream: reader.safe_position for stream, reader in self._readers.items()}

    def trust(self, seen: Mapping[StreamName, str]) -> None:
        """No other server had taken over when the streams were read up to `seen`."""
        for stream, entry_id in seen.items():
            self._readers[stream].trail.trust(entry_id)

    def restore(self, positions: Mapping[StreamName, str], state: Mapping[str, Any]) -> None:
        """Continue reading at a checkpoint's positions, or below them where Redis has lost its tail since."""
        for stream, old in self._readers.items():
            first = positions.get(stream, START)
            trails = state["trails"]
            trail = Trail(trails[stream]) if stream in trails else None
            self._readers[stream] = OffsetReader(old.broker, old.key, old.message_type, first, trail)
        high_water: Mapping[StreamName, str] = state["high_water"]
        self._seen_up_to = {stream: id_order(entry_id) for stream, entry_id in high_water.items()}
        self.num_trajectories = int(state["num_trajectories"])

    async def standing_positions(self) -> dict[StreamName, str]:
        """Where a replay begins to read: at the positions, or below if Redis has lost its tail since."""
        positions: dict[StreamName, str] = {}
        for name in (TRAJECTORIES, SCORES):
            reader = self._readers[name]
            standing = await Trail(reader.trail.sure).last_standing(self._broker, reader.key)
            trimmed = id_before(await trimmed_below(self._broker, self._keys.state, reader.key))
            readable = max(standing, trimmed, key=id_order)
            positions[name] = min(reader.position, readable, key=id_order)
        return positions

    def _low_water(self, groups: Iterable[Group]) -> dict[StreamName, str]:
        groups = list(groups)
        trajectories = [entry_id for group in groups for entry_id in group.trajectory_ids.values()]
        scores = [entry_id for group in groups for entry_id in group.score_ids.values()]
        # Scores that wait for their trajectory too: which one counts is not decided yet.
        scores += [entry.entry_id for group in groups for entry in group.other_scores]
        return {TRAJECTORIES: self._below(TRAJECTORIES, trajectories), SCORES: self._below(SCORES, scores)}

    def _below(self, stream: StreamName, entry_ids: list[str]) -> str:
        """The position from which all of `entry_ids` would be read again."""
        return id_before(min(entry_ids, key=id_order)) if entry_ids else self._readers[stream].safe_position

    async def _take_garbled(self, stream: StreamName, entry: Garbled) -> None:
        if stream == DEAD:
            log.error("a dead letter cannot be decoded", entry=entry.entry_id, error=entry.error)
            return
        self.unread_at = time.monotonic()
        if stream == TRAJECTORIES:
            log.warning("trajectory cannot be decoded", entry=entry.entry_id, error=entry.error)
        elif self._is_new(SCORES, entry.entry_id):  # no worker reads scores, so the trainer does
            await self._dead_letters.append_unread(entry, "trainer")

    def _take(self, entry: Entry[Trajectory] | Entry[Score]) -> None:
        """Join an entry with its group. The first entry of a key wins; late ones of settled tickets are only
        counted, but not those read a second time after a restart."""
        message = entry.message
        if isinstance(message, Trajectory) and self._is_new(TRAJECTORIES, entry.entry_id):
            self.num_trajectories += 1
        group = self.groups.get(message.ticket)
        refused = [entry] if group is None else group.take(entry)
        for refused_entry in refused:
            self._note_refused(refused_entry, group)
        # Not so where only an older score was refused: this entry counts in its place.
        is_refused = bool(refused) and any(refused_entry is entry for refused_entry in refused)
        if group is None or is_refused:
            return
        if isinstance(message, Trajectory):
            self._take_in(group, message)
        elif self._is_new(SCORES, entry.entry_id):
            self.on_score(entry.entry_id, message)
        if group.is_complete:
            self.complete.append(group.ticket)
        self.changed.set()

    def _note_refused(self, entry: Entry[Trajectory] | Entry[Score], group: Group | None) -> None:
        """Count an entry that no group, or not this one, has taken."""
        message = entry.message
        stream = TRAJECTORIES if isinstance(message, Trajectory) else SCORES
        if self._is_new(stream, entry.entry_id):
            metrics.DUPLICATES_DROPPED.labels(stream).inc()
        if group is not None and group.is_of_other_tokens(message):
            log.warning("score of other tokens refused", ticket=group.ticket, index=message.index)
            # Its worker may have acknowledged the entry that now has the lost trajectory's id.
            self.unread_at = time.monotonic()

    def _take_in(self, group: Group, trajectory: Trajectory) -> None:
        """Note the versions of a trajectory that its group has taken, and make its sample."""
        group.oldest_sampled = min(group.oldest_sampled, trajectory.min_version)
        # Judged as it arrives: by the time of training that version may exist, with other weights.
        group.is_ahead |= trajectory.max_version > self.version
        # Now, while the step in progress trains or scores are awaited, and not when they are there.
        with suppress(ValueError):  # the filter says what is wrong
            group.sample_at(trajectory.index)

    def _take_dead(self, entry: Entry[DeadLetter]) -> None:
        if entry.message.origin not in ("prompts", "trajectories"):
            return
        if entry.message.ticket < 0:
            # A worker that could not read the message, of an older release say, did not know its ticket.
            self.unread_at = time.monotonic()
        group = self.groups.get(entry.message.ticket)
        # What a step has taken is whole: it must not be trained and replaced as well.
        # A demonstration needs no score, so that a worker which failed at it does not matter.
        if group is not None and not group.is_taken and not group.is_demonstration:
            self.dead.setdefault(group.ticket, (entry.entry_id, entry.message.error))
            self.changed.set()

    def _is_new(self, stream: StreamName, entry_id: str) -> bool:
        seen = self._seen_up_to.get(stream)
        return seen is None or id_order(entry_id) > seen
