"""Feeds recorded trajectories to a sandbox run of rewards, in place of generation.

Guarantees: each trajectory goes in once, in the order in which it was recorded; at most `MAX_BACKLOG` wait
for a score at any time, and what has its score is trimmed, so that memory does not grow with the history.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator

from rich.console import Console
from rich.markup import escape

from tidemill.common.history import History, Selection, StreamName
from tidemill.common.process.failures import shorten
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import OffsetReader, append, last_id, trim_before
from tidemill.common.streams.code_errors import CodeErrors
from tidemill.common.streams.entries import Entry, id_order
from tidemill.common.streams.group_results import delete_results
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import (
    DeadLetter,
    Lane,
    Score,
    ScoreStatus,
    Trajectory,
    TrajectoryKey,
    is_demonstration,
)

BATCH = 256
BLOCK_S = 0.5
TRIM_EVERY = 1024
MAX_BACKLOG = 4096
"""Most trajectories that wait for a score; beyond that the emission pauses."""


class Emission:
    def __init__(
        self,
        broker: Broker,
        keys: Keys,
        history: History,
        selection: Selection,
        lane: Lane = Lane.TRAIN,
        keeps_pace: bool = False,
        code_errors: CodeErrors | None = None,
    ) -> None:
        """`code_errors` ends it where the reward's own code always fails."""
        self.broker = broker
        self.keys = keys
        self.history = history
        self.selection = selection
        self.lane = lane
        self.keeps_pace = keeps_pace
        self.code_errors = code_errors
        self.num_failed = 0
        self.last_error = ""
        self.emitted = 0
        self.is_complete = False
        self.started_at = time.time()
        self.scores: dict[TrajectoryKey, Score] = {}
        self.waits_s: list[float] = []
        """Seconds from emission to score, in the order of the scores."""
        self._first_taken_at = float("inf")
        self._last_scored_at = 0.0
        self._num_at_trim = 0
        self._waiting: dict[TrajectoryKey, tuple[str, float]] = {}
        """Entry id and time of emission of what has no score yet, oldest first."""

    @property
    def seconds(self) -> float:
        """Seconds from when a worker took the first trajectory to the last score, without workers' start."""
        return max(self._last_scored_at - self._first_taken_at, 1e-9)

    async def run(self, on_progress: Callable[["Emission"], None]) -> None:
        """Emit everything and wait for all scores.

        Raises:
            ConfigError: the reward's own code fails for one sample after the other.
        """
        self.started_at = time.time()
        key = self.keys.scores(self.lane)
        # The position is taken before anything is emitted: scores that were there are no answers.
        position = await last_id(self.broker, key)
        reader = OffsetReader(self.broker, key, Score, position)
        if self.code_errors is not None:
            self.code_errors.begin(position)
        dead_key = self.keys.dead
        dead = OffsetReader(self.broker, dead_key, DeadLetter, await last_id(self.broker, dead_key))
        offset_s: float | None = None  # from the times of the record to those of now

        async def take_scores(block_s: float) -> None:
            for entry in await reader.read(4 * BATCH, block_s):
                if isinstance(entry, Entry):
                    self._take(entry.message)
                    if self.code_errors is not None:
                        self.code_errors.note(entry.entry_id, entry.message)
            for letter in await dead.read(BATCH):
                if isinstance(letter, Entry):
                    self._fail(letter.message)
            on_progress(self)
            if self.code_errors is not None:
                self.code_errors.check(then="score again")
            if len(self.scores) - self._num_at_trim >= TRIM_EVERY:
                await self._trim()

        # At the recorded pace one by one: a batch would arrive all at once.
        async for recorded_at, batch in self._batches(1 if self.keeps_pace else BATCH):
            offset_s = self.started_at - recorded_at if offset_s is None else offset_s
            while self.keeps_pace and (early_s := recorded_at + offset_s - time.time()) > 0:
                await take_scores(min(early_s, BLOCK_S))
            while len(self._waiting) + len(batch) > MAX_BACKLOG:
                await take_scores(BLOCK_S)
            await self._emit(batch)
            await take_scores(0.0)
        self.is_complete = True
        while self._waiting:
            await take_scores(BLOCK_S)
        await self._trim()

    async def _batches(self, size: int) -> AsyncIterator[tuple[float, list[Trajectory]]]:
        """Batches of `size` trajectories, the first of each key, and when the first of each was recorded."""
        seen: set[TrajectoryKey] = set()
        batch: list[Trajectory] = []
        began_at = 0.0
        async for record in self.history.scan(StreamName.TRAJECTORIES.of(self.lane), self.selection):
            if not isinstance(record, Entry) or not isinstance(record.message, Trajectory):
                continue
            if is_demonstration(record.message.ticket):  # has no score, and gets none
                continue
            # As in training the first counts; two of one key would get each other's scores.
            if record.message.key not in seen:
                seen.add(record.message.key)
                began_at = began_at if batch else id_order(record.entry_id)[0] / 1000
                batch.append(record.message)
            if len(batch) >= size:
                yield began_at, batch
                batch = []
        if batch:
            yield began_at, batch

    async def _emit(self, trajectories: list[Trajectory]) -> None:
        now = time.time()
        # Workers may score it before it is noted below; but scores are read by this same task, later.
        ids = await append(self.broker, self.keys.trajectories(self.lane), *trajectories)
        for trajectory, entry_id in zip(trajectories, ids, strict=True):
            self._waiting[trajectory.key] = (entry_id, now)
        self.emitted += len(trajectories)

    def _take(self, score: Score) -> None:
        # A score that comes twice, after a takeover, counts once.
        emitted = self._waiting.pop(score.key, None)
        if emitted is None:
            return
        self.scores[score.key] = score
        if score.value is None:
            self.num_failed += 1
            self.last_error = score.error
        self.waits_s.append(max(0.0, score.scored_at - emitted[1]))
        self._first_taken_at = min(self._first_taken_at, score.scored_at - score.latency_s)
        self._last_scored_at = max(self._last_scored_at, score.scored_at)

    def _fail(self, letter: DeadLetter) -> None:
        """Count a dead-lettered trajectory, and those of its group that wait, as failed."""
        tickets = {key[0] for key, (entry_id, _) in self._waiting.items() if entry_id == letter.entry_id}
        for ticket, index in [key for key in self._waiting if key[0] in tickets]:
            self._take(Score(ticket=ticket, index=index, status=ScoreStatus.FAILED, error=letter.error))

    async def _trim(self) -> None:
        """Trim what is scored, up to the oldest trajectory that is not, and results of complete groups."""
        self._num_at_trim = len(self.scores)
        # Nothing else appends: what is not waited for now never is.
        await delete_results(self.broker, self.keys, self.lane, {ticket for ticket, _ in self._waiting})
        for entry_id, _ in self._waiting.values():
            await trim_before(self.broker, self.keys.trajectories(self.lane), entry_id)
            break


EVERY_S = 0.5
LINE_EVERY_S = 10.0
"""Seconds between two updates on a terminal, and between two lines elsewhere."""
MAX_REASON_CHARS = 200


@contextlib.contextmanager
def shown(console: Console) -> Iterator[Callable[[Emission], None]]:
    """Give a function that shows an emission: a live line on a terminal, else a line now and then."""
    live = console.status("starting the reward workers") if console.is_terminal else None
    shown_at = time.monotonic()

    def show(emission: Emission) -> None:
        nonlocal shown_at
        if time.monotonic() - shown_at < (EVERY_S if live else LINE_EVERY_S):
            return
        shown_at = time.monotonic()
        text = progress_text(emission, time.time() - emission.started_at)
        if live:
            live.update(escape(text))  # a reason may have brackets
        else:
            console.print(text, markup=False, soft_wrap=True)

    with live or contextlib.nullcontext():
        yield show


def progress_text(emission: Emission, seconds: float) -> str:
    """How far an emission is after so many seconds, and why scores have failed."""
    scored = len(emission.scores)
    more = "" if emission.is_complete else " so far"
    text = f"{scored:,} of {emission.emitted:,}{more} scored, {scored / max(seconds, 1e-9):,.0f}/s"
    if not emission.num_failed:
        return text
    reason = shorten(emission.last_error, MAX_REASON_CHARS)
    return f"{text}; {emission.num_failed:,} failed, the last one: {reason}"
