"""Puts recorded trajectories into a sandbox's stream: as fast as it scores them, or at their recorded pace.

Guarantees: each trajectory goes in once, in the order in which it was recorded; at most `MAX_BACKLOG` wait
for a score at any time, and what has its score is trimmed, so that memory does not grow with the history.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from rich.console import Console

from tidemill.common.history import History, Selection, StreamName
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import OffsetReader, append, trim_before
from tidemill.common.streams.entries import Entry, id_order
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Lane, Score, Trajectory, TrajectoryKey

BATCH = 256
BLOCK_S = 0.5
TRIM_EVERY = 1024
MAX_BACKLOG = 4096
"""Most trajectories that wait for a score; the emission waits."""


@dataclass(slots=True)
class Flow:
    """What went in and what came back, while it happens."""

    emitted: int = 0
    started_at: float = field(default_factory=time.time)
    first_taken_at: float = float("inf")
    """When a worker began with the first trajectory; before that, workers were starting."""
    last_scored_at: float = 0.0
    scores: dict[TrajectoryKey, Score] = field(default_factory=dict)
    waits_s: list[float] = field(default_factory=list)
    """Seconds from emission to score, in the order of the scores."""
    is_complete: bool = False
    """Whether everything has been emitted."""

    @property
    def scored(self) -> int:
        """Trajectories that have a score."""
        return len(self.scores)

    @property
    def seconds(self) -> float:
        """From the moment a worker took the first trajectory to the last score."""
        return max(self.last_scored_at - self.first_taken_at, 1e-9)


class Emission:
    """Feeds one sandbox from one history."""

    def __init__(
        self,
        broker: Broker,
        keys: Keys,
        history: History,
        selection: Selection,
        lane: Lane = Lane.TRAIN,
        keeps_pace: bool = False,
    ) -> None:
        self.broker, self.keys, self.history = broker, keys, history
        self.selection, self.lane, self.keeps_pace = selection, lane, keeps_pace
        self.flow = Flow()
        self._waiting: dict[TrajectoryKey, tuple[str, float]] = {}
        """Entry id and time of emission of what has no score yet, oldest first."""
        self._room = asyncio.Event()
        self._trimmed_at = 0

    async def run(self, on_progress: Callable[[Flow], None]) -> Flow:
        """Emit everything and wait for all scores."""
        reading = asyncio.create_task(self._read_scores(on_progress))
        try:
            emitting = asyncio.create_task(self._emit())
            await asyncio.wait({reading, emitting}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done() and not emitting.done():
                emitting.cancel()
                reading.result()
            await emitting
            await reading
        finally:
            reading.cancel()
            emitting.cancel()
            await asyncio.gather(reading, emitting, return_exceptions=True)
        return self.flow

    async def _emit(self) -> None:
        stream = StreamName.TRAJECTORIES.of(self.lane)
        self.flow.started_at = time.time()
        async for batch in self._paced(self._batches(stream)):
            while len(self._waiting) + len(batch) > MAX_BACKLOG:
                self._room.clear()
                await self._room.wait()
            now = time.time()
            # Noted before it is in the stream: a score may be there before `append` returns.
            for trajectory in batch:
                self._waiting[trajectory.key] = ("", now)
            ids = await append(self.broker, self.keys.trajectories(self.lane), *batch)
            for trajectory, entry_id in zip(batch, ids, strict=True):
                if trajectory.key in self._waiting:
                    self._waiting[trajectory.key] = (entry_id, now)
            self.flow.emitted += len(batch)
        self.flow.is_complete = True

    async def _batches(self, stream: StreamName) -> AsyncIterator[list[tuple[float, Trajectory]]]:
        """(when it was recorded, trajectory), the first of each key, a batch at a time."""
        seen: set[TrajectoryKey] = set()
        batch: list[tuple[float, Trajectory]] = []
        async for record in self.history.scan(stream, self.selection):
            if not isinstance(record, Entry) or not isinstance(record.message, Trajectory):
                continue
            if record.message.key in seen:
                continue
            seen.add(record.message.key)
            batch.append((id_order(record.entry_id)[0] / 1000, record.message))
            if len(batch) >= BATCH:
                yield batch
                batch = []
        if batch:
            yield batch

    async def _paced(
        self, batches: AsyncIterator[list[tuple[float, Trajectory]]]
    ) -> AsyncIterator[list[Trajectory]]:
        """Trajectories that go in together: a batch, or what is due now at the recorded pace."""
        ahead_s: float | None = None
        async for batch in batches:
            if not self.keeps_pace:
                yield [trajectory for _, trajectory in batch]
                continue
            ahead_s = self.flow.started_at - batch[0][0] if ahead_s is None else ahead_s
            while batch:
                await asyncio.sleep(max(0.0, batch[0][0] + ahead_s - time.time()))
                now = time.time()
                count = max(1, sum(at + ahead_s <= now for at, _ in batch))
                yield [trajectory for _, trajectory in batch[:count]]
                batch = batch[count:]

    async def _read_scores(self, on_progress: Callable[[Flow], None]) -> None:
        reader = OffsetReader(self.broker, self.keys.scores(self.lane), Score)
        while not (self.flow.is_complete and not self._waiting):
            for entry in await reader.read(4 * BATCH, BLOCK_S):
                if isinstance(entry, Entry):
                    self._take(entry.message)
            on_progress(self.flow)
            self._room.set()
            if self.flow.scored - self._trimmed_at >= TRIM_EVERY:
                await self._trim()
        on_progress(self.flow)

    def _take(self, score: Score) -> None:
        """Keep the first score of a trajectory."""
        if (noted := self._waiting.pop(score.key, None)) is None:
            return
        self.flow.scores[score.key] = score
        self.flow.waits_s.append(max(0.0, score.scored_at - noted[1]))
        self.flow.first_taken_at = min(self.flow.first_taken_at, score.scored_at - score.latency_s)
        self.flow.last_scored_at = max(self.flow.last_scored_at, score.scored_at)

    async def _trim(self) -> None:
        """Trim what is scored, up to the oldest trajectory that is not."""
        self._trimmed_at = self.flow.scored
        oldest = next((entry_id for entry_id, _ in self._waiting.values()), "")
        if oldest:
            await trim_before(self.broker, self.keys.trajectories(self.lane), oldest)


EVERY_S = 0.5
SAY_EVERY_S = 10.0
"""Where nobody watches: a line each."""


@contextlib.contextmanager
def shown(console: Console) -> Iterator[Callable[[Flow], None]]:
    """Give a function that shows a flow: a live line on a terminal, else a line now and then."""
    said_at = time.monotonic()

    def text(flow: Flow) -> str:
        rate = flow.scored / max(time.time() - flow.started_at, 1e-9)
        more = "" if flow.is_complete else " so far"
        return f"{flow.scored:,} of {flow.emitted:,}{more} scored, {rate:,.0f}/s"

    if not console.is_terminal:

        def say(flow: Flow) -> None:
            nonlocal said_at
            if time.monotonic() - said_at > SAY_EVERY_S:
                said_at = time.monotonic()
                console.print(text(flow))

        yield say
        return
    with console.status("starting the reward workers") as status:

        def update(flow: Flow) -> None:
            nonlocal said_at
            if time.monotonic() - said_at > EVERY_S:
                said_at = time.monotonic()
                status.update(text(flow))

        yield update
