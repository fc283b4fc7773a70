"""Copies of a run's streams, taken while it runs: they hold what was trimmed, and know what Redis has lost.

The proof of a run is computed from these copies, never from what a service says about itself.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tidemill.common.redis.broker import Broker
from tidemill.common.streams import START, Entry, Garbled, id_order, last_id, read_range
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import (
    Choices,
    Claim,
    Commit,
    DeadLetter,
    Lane,
    Message,
    Score,
    Ticket,
    Trajectory,
)

READ_COUNT = 2000
POLL_S = 0.2

M = TypeVar("M", bound=Message)


@dataclass
class StreamCopy(Generic[M]):
    """Every entry that a stream holds or held, by id."""

    key: str
    message_type: type[M]
    entries: dict[str, M] = field(default_factory=dict)
    """What stands, in order: it is in the stream, or was trimmed from its beginning."""
    lost: dict[str, M] = field(default_factory=dict)
    """What Redis had and has no more, because it died before it was on the disk."""
    garbled: list[str] = field(default_factory=list)
    news: list[tuple[str, M]] = field(default_factory=list)
    """What was copied since somebody last took it from here."""
    position: str = START

    @property
    def messages(self) -> list[M]:
        return list(self.entries.values())

    async def follow(self, broker: Broker) -> None:
        while entries := await self._read_on(broker):
            self._take(entries)

    async def _read_on(self, broker: Broker) -> list[Entry[M] | Garbled]:
        return await read_range(broker, self.key, self.message_type, f"({self.position}", count=READ_COUNT)

    async def compare(self, broker: Broker) -> None:
        """After Redis died: find what is gone from the end; what is gone from the beginning was trimmed."""
        last = id_order(await last_id(broker, self.key))
        entries = await read_range(broker, self.key, self.message_type)
        present = {entry.entry_id for entry in entries}
        first = id_order(entries[0].entry_id) if entries else last
        for entry_id in list(self.entries):
            if id_order(entry_id) > last or (id_order(entry_id) >= first and entry_id not in present):
                self.lost[entry_id] = self.entries.pop(entry_id)
        self._take(entries)
        for entry_id, message in list(self.lost.items()):
            if self.entries.get(entry_id) == message:  # nobody had copied it yet, and it was not lost
                del self.lost[entry_id]

    async def look_into(self, dead: Broker) -> None:
        """Learn from a server that died what nobody had copied of it: it may be gone for good."""
        for entry in await read_range(dead, self.key, self.message_type):
            if isinstance(entry, Entry) and self.entries.get(entry.entry_id) != entry.message:
                self.lost[entry.entry_id] = entry.message

    def take_news(self) -> list[tuple[str, M]]:
        news = self.news
        self.news = []
        return news

    def _take(self, entries: list[Entry[M] | Garbled]) -> None:
        for entry in entries:
            if isinstance(entry, Entry):
                before = self.entries.get(entry.entry_id)
                if before is not None and before != entry.message:
                    self.lost[entry.entry_id] = before  # and its number was given again
                if before is None:
                    self.news.append((entry.entry_id, entry.message))
                self.entries[entry.entry_id] = entry.message
            elif entry.entry_id not in self.garbled:
                self.garbled.append(entry.entry_id)
        if entries:
            self.position = entries[-1].entry_id


class Archive:
    """Copies of every stream that the proof or the measurement of recovery needs."""

    def __init__(self, broker: Broker, keys: Keys) -> None:
        self.broker = broker
        self.tickets = StreamCopy(keys.prompts(), Ticket)
        self.trajectories = StreamCopy(keys.trajectories(), Trajectory)
        self.scores = StreamCopy(keys.scores(), Score)
        self.commits = StreamCopy(keys.commits, Commit)
        self.dead = StreamCopy(keys.dead, DeadLetter)
        self.eval_trajectories = StreamCopy(keys.trajectories(Lane.EVAL), Trajectory)
        self.eval_scores = StreamCopy(keys.scores(Lane.EVAL), Score)
        self._choices: dict[Claim, Choices] = {}
        self._lock = asyncio.Lock()

    @property
    def version(self) -> int:
        """Committed steps, as far as has been seen."""
        return max((commit.version for commit in self.commits.entries.values()), default=0)

    def by_key(self) -> dict[str, StreamCopy[Any]]:
        """All copies by the keys of their streams."""
        return {copy.key: copy for copy in self._copies()}

    async def follow(self) -> None:
        while True:
            await self.catch_up()
            await asyncio.sleep(POLL_S)

    async def catch_up(self) -> None:
        async with self._lock:
            for copy in self._copies():
                await copy.follow(self.broker)
            await asyncio.to_thread(self._read_choices)

    def _read_choices(self) -> None:
        """Before they are removed with their trimmed entries."""
        for sample in (*self.trajectories.messages, *self.trajectories.lost.values()):
            claim = sample.choices and sample.choices.claim
            if claim and claim not in self._choices and self.broker.claims is not None:
                whole = self.broker.claims.resolve(sample, reads_choices=True)
                assert isinstance(whole, Trajectory) and whole.choices
                self._choices[claim] = whole.choices

    def whole(self, message: M) -> M:
        """With what the engine chose."""
        if isinstance(message, Trajectory) and message.choices and message.choices.claim:
            return message.model_copy(update={"choices": self._choices[message.choices.claim]})
        return message

    async def compare(self) -> None:
        """After a death of Redis: sort out what did not survive it."""
        async with self._lock:
            for copy in self._copies():
                await copy.compare(self.broker)

    async def look_into(self, dead: Broker) -> None:
        """Before `compare`: learn what the dead server held, its last entries included."""
        async with self._lock:
            for copy in self._copies():
                await copy.look_into(dead)

    def _copies(self) -> list[StreamCopy[Any]]:
        return [
            self.tickets, self.trajectories, self.scores, self.commits, self.dead, self.eval_trajectories,
            self.eval_scores,
        ]  # fmt: skip
