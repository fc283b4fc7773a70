"""From a death to useful work again, read off the streams: when did the next result of its kind appear?

A worker is back with the first trajectory or score that it began after the death, the trainer with its first
commit, Redis with its first answer, when it has read its append-only file. How long a worker took to load
(half a second's pause, imports, model) is the time until its new process joined its consumer group.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.archive import Archive
from tests.chaos.faults import KILLS, SESSION_KILLS, Kind
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import group_status, id_order
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys

TRAINER = "trainer"


@dataclass
class Event:
    """One fault that was done to the run, and how the run took it."""

    kind: Kind
    victim: str
    at_s: float
    """Since the start of the run."""
    version: int
    died_at: float
    """Wall time."""
    note: str = ""
    loaded_s: float | None = None
    recovered_s: float | None = None
    is_overtaken: bool = False
    """The same process was killed again before it did anything useful: its time says nothing."""


@dataclass
class RecoveryWatch:
    """Finds the recovery of every event in copies of the streams."""

    archive: Archive
    keys: Keys
    events: list[Event] = field(default_factory=list)
    _consumers: set[str] = field(default_factory=set)

    def add(self, event: Event) -> None:
        for earlier in self.events:
            if earlier.victim == event.victim and earlier.recovered_s is None and earlier.kind in KILLS:
                earlier.is_overtaken = True
        self.events.append(event)

    async def look_for_loaded(self, broker: Broker) -> None:
        """Note when processes join their consumer groups; each has a consumer name of its own."""
        for key, group in (
            (self.keys.prompts(), ROLLOUT_GROUP),
            (self.keys.trajectories(), REWARD_GROUP),
        ):
            if await group_status(broker, key, group) is None:
                continue  # nobody has joined yet
            for raw in await broker.execute("XINFO", "CONSUMERS", key, group):
                name = dict(zip(raw[::2], raw[1::2], strict=True))[b"name"].decode()
                if name not in self._consumers:
                    self._consumers.add(name)
                    self._note_loaded(name.rpartition(".")[0])

    def look_for_recovery(self) -> None:
        """Go through what is new in the copies."""
        archive = self.archive
        for copy in (archive.trajectories, archive.eval_trajectories):
            for entry_id, sample in copy.take_news():
                self._note(Kind.ROLLOUT, sample.worker, sample.started_at, _time_of(entry_id))
        for copy in (archive.scores, archive.eval_scores):
            for entry_id, score in copy.take_news():
                self._note(Kind.REWARD, score.worker, score.scored_at, _time_of(entry_id))
        for _, commit in archive.commits.take_news():
            self._note(Kind.TRAINER, TRAINER, commit.finished_at, commit.finished_at)

    def recovered(self, kind: Kind) -> list[Event]:
        """Events of one kind whose recovery was measured to its end."""
        return [
            event
            for event in self.events
            if event.kind is kind and event.recovered_s is not None and not event.is_overtaken
        ]

    def _note_loaded(self, name: str) -> None:
        for event in self.events:
            if event.victim == name and event.loaded_s is None:
                event.loaded_s = time.time() - event.died_at

    def _note(self, kind: Kind, name: str, began_at: float, done_at: float) -> None:
        for event in self.events:
            if event.recovered_s is not None or done_at <= event.died_at:
                continue
            is_its_work = event.victim == name and began_at > event.died_at
            if is_its_work and event.kind in (kind, Kind.JOIN, Kind.POWER):
                event.recovered_s = done_at - event.died_at


def summary(watches: Sequence[RecoveryWatch]) -> dict[str, Any]:
    """Median and maximum of every kind, in seconds; for workers also of what is left without the loading."""
    seconds_of: dict[str, Any] = {}
    for kind in SESSION_KILLS:
        events = [event for watch in watches for event in watch.recovered(kind)]
        if times := [event.recovered_s for event in events if event.recovered_s is not None]:
            seconds_of[kind.value] = _median_and_max(times)
        beyond = [
            event.recovered_s - event.loaded_s
            for event in events
            if event.recovered_s is not None and event.loaded_s is not None
        ]
        if beyond and kind in (Kind.ROLLOUT, Kind.REWARD):
            seconds_of[f"{kind.value}_after_load"] = _median_and_max([max(0.0, time_s) for time_s in beyond])
    return seconds_of


def _median_and_max(times: Sequence[float]) -> dict[str, float]:
    return {"median": round(statistics.median(times), 2), "max": round(max(times), 2)}


def _time_of(entry_id: str) -> float:
    return id_order(entry_id)[0] / 1000
