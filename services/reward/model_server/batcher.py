"""Dynamic batching: rows of many requests wait in one queue, and one thread computes batch after batch.

A batch starts as soon as the device is free. On a free device, rows wait for company only while the recent
rate of arrivals promises some, and never longer than `flush_s`, nor once a budget's worth waits: a lone
request of a quiet time is computed at once, a burst in one batch. Bounded: a batch that starts frees its
rows' slots; beyond the bound a request is refused with the time after which it makes sense to come again.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from tidemill.common.errors import RewardError
from tidemill.common.telemetry import metrics
from tidemill.services.reward.model_server.scoring_model import ScoringModel


@dataclass(eq=False, slots=True)
class QueuedRow:
    """One sequence that waits for its scores. Lower `priority` goes first, then the earlier `number`."""

    token_ids: Sequence[int]
    priority: int = 0
    number: int = 0
    arrived: float = 0.0
    deliver: Callable[[Any], None] = field(default=lambda _: None)

    @property
    def rank(self) -> tuple[int, int]:
        """Order in which rows are served."""
        return (self.priority, self.number)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of one batch."""

    max_tokens: int
    max_rows: int
    max_padding: float


class RowQueue:
    """The rows that wait, by priority and then by age; every operation is cheap however many there are."""

    def __init__(self) -> None:
        self._by_priority: dict[int, dict[QueuedRow, None]] = {}
        self._count, self.num_tokens = 0, 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: QueuedRow) -> None:
        """Put a row at the end of its priority."""
        self._by_priority.setdefault(row.priority, {})[row] = None
        self._count += 1
        self.num_tokens += len(row.token_ids)

    def discard(self, row: QueuedRow) -> None:
        """Take a row out, if it is there."""
        rows = self._by_priority.get(row.priority, {})
        if row in rows:
            del rows[row]
            self._count -= 1
            self.num_tokens -= len(row.token_ids)
            if not rows:
                del self._by_priority[row.priority]

    @property
    def oldest_arrival(self) -> float:
        """When the row that waits longest arrived."""
        return min(next(iter(rows)).arrived for rows in self._by_priority.values())

    def first(self, count: int) -> list[QueuedRow]:
        """The next rows in the order in which they are served."""
        ordered = (row for priority in sorted(self._by_priority) for row in self._by_priority[priority])
        return list(itertools.islice(ordered, count))


def select_batch(waiting: Iterable[QueuedRow], limits: BatchLimits) -> list[QueuedRow]:
    """The rows of the next batch, shortest first; empty where none waits.

    Around the row whose turn it is, rows are taken from both sides of the order of lengths, the one that
    costs less padding first, until a limit is met. Rows more urgent than others are all tried before those.
    """
    rows = sorted(waiting, key=lambda row: row.rank)
    if not rows:
        return []
    anchor = rows[0]
    batch = _Batch(anchor, limits)
    for priority in sorted({row.priority for row in rows}):
        batch.extend([row for row in rows if row.priority == priority and row is not anchor])
    return sorted(batch.rows, key=lambda row: len(row.token_ids))


class _Batch:
    def __init__(self, anchor: QueuedRow, limits: BatchLimits) -> None:
        self.limits, self.rows = limits, [anchor]
        self.anchor_len = self.longest = self.num_tokens = len(anchor.token_ids)

    def extend(self, candidates: list[QueuedRow]) -> None:
        """Add what fits, nearest in length to the anchor first; among equals the older first."""
        shorter: list[QueuedRow] = []
        longer: list[QueuedRow] = []
        for row in sorted(
            candidates, key=lambda row: (abs(len(row.token_ids) - self.anchor_len), row.number)
        ):
            (shorter if len(row.token_ids) <= self.anchor_len else longer).append(row)
        while (shorter or longer) and len(self.rows) < self.limits.max_rows:
            side = self._cheaper(shorter, longer)
            if self._add(side[0]):
                del side[0]
            else:
                side.clear()  # the others on this side are further away

    def _cheaper(self, shorter: list[QueuedRow], longer: list[QueuedRow]) -> list[QueuedRow]:
        if not shorter or not longer:
            return shorter or longer
        below = self.longest - len(shorter[0].token_ids)
        above = max(0, len(longer[0].token_ids) - self.longest) * len(self.rows)
        return shorter if below <= above else longer

    def _add(self, row: QueuedRow) -> bool:
        longest, count = max(self.longest, len(row.token_ids)), len(self.rows) + 1
        padded, num_tokens = longest * count, self.num_tokens + len(row.token_ids)
        if padded > self.limits.max_tokens or padded - num_tokens > self.limits.max_padding * padded:
            return False
        self.rows.append(row)
        self.longest, self.num_tokens = longest, num_tokens
        return True


T = TypeVar("T")

RATE_WEIGHT = 0.2
"""Of the newest observation in the moving averages of arrivals and speed."""
LONGEST_RETRY_S = 30.0
WINDOW = 4
"""Rows of like length are looked for among this many times the rows of a batch, the oldest ones."""


class BusyError(RewardError):
    """No room now; `retry_after_s` is when it makes sense to come again."""

    def __init__(self, message: str, retry_after_s: float, status: int = 429) -> None:
        super().__init__(message)
        self.retry_after_s, self.status = retry_after_s, status


class ComputeError(RewardError):
    """The device failed on a row, alone in its batch."""


class Batcher:
    """Computes rows in batches from `start` to `close`."""

    def __init__(
        self, model: ScoringModel, limits: BatchLimits, *, flush_s: float, max_queued_rows: int
    ) -> None:
        self._model, self._limits = model, limits
        self._flush_s, self._max_queued_rows = flush_s, max_queued_rows
        self._waiting = RowQueue()
        self._arrived = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._number, self._last_arrival = 0, 0.0
        self._gap_s, self._tokens_per_s = float("inf"), 0.0
        self.is_closed = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> "asyncio.Task[None]":
        """Begin to compute; the task ends only by `close`, or by an error nobody expected."""
        self._task = asyncio.create_task(self._run(), name="batches")
        return self._task

    @property
    def num_waiting(self) -> int:
        """Rows that no batch has taken yet."""
        return len(self._waiting)

    async def score(self, rows: Sequence[Sequence[int]], priority: int = 0) -> list[Tensor]:
        """Scores of the rows of one request, all or none.

        Raises:
            BusyError: the rows do not fit into the queue, or the server is ending.
            ComputeError: the device failed on one of them.
        """
        if self.is_closed:
            raise BusyError("the server is ending", 1.0, status=503)
        if self._waiting and len(self._waiting) + len(rows) > self._max_queued_rows:
            pause_s = self._retry_after_s()
            raise BusyError(f"{len(self._waiting)} sequences wait; come again in {pause_s:.0f} s", pause_s)
        made = [self._enqueue(row, priority) for row in rows]
        try:
            return list(await asyncio.gather(*(future for _, future in made)))
        finally:
            for row, _ in made:  # a client that left wants no scores
                self._waiting.discard(row)
            metrics.REWARD_MODEL_QUEUED_ROWS.set(len(self._waiting))

    async def alone(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread that computes, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def drained(self) -> None:
        """Wait until nothing is queued or computed."""
        await self._idle.wait()

    async def close(self) -> None:
        """Take no more, finish what waits, and stop."""
        self.is_closed = True
        if self._task is not None and not self._task.done():
            await self.drained()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _enqueue(self, token_ids: Sequence[int], priority: int) -> "tuple[QueuedRow, asyncio.Future[Tensor]]":
        future: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        now = time.monotonic()

        def deliver(result: Tensor | BaseException) -> None:
            if future.done():
                return
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)

        self._number += 1
        row = QueuedRow(token_ids, priority, self._number, now, deliver)
        gap_s = now - self._last_arrival
        # The first gap after a quiet time says nothing about the rate that begins now, so it is cut.
        known_s = self._gap_s if self._gap_s < 2 * self._flush_s else 2 * self._flush_s
        self._gap_s = known_s + RATE_WEIGHT * (min(gap_s, 10 * self._flush_s) - known_s)
        self._last_arrival = now
        self._waiting.add(row)
        self._idle.clear()
        self._arrived.set()
        metrics.REWARD_MODEL_QUEUED_ROWS.set(len(self._waiting))
        return row, future

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            await self._gather_company()
            batch = select_batch(self._waiting.first(WINDOW * self._limits.max_rows), self._limits)
            for row in batch:
                self._waiting.discard(row)
            if batch:
                await self._compute(batch)
            if not self._waiting:
                self._arrived.clear()
                self._idle.set()

    async def _gather_company(self) -> None:
        """Wait for more rows where more are to be expected, within the flush time of the oldest."""
        await asyncio.sleep(0)  # requests that came in the same turn of the loop belong together
        while self._waiting and not self.is_closed:
            left_s = self._waiting.oldest_arrival + self._flush_s - time.monotonic()
            is_full = (
                self._waiting.num_tokens >= self._limits.max_tokens
                or len(self._waiting) >= self._limits.max_rows
            )
            is_quiet = time.monotonic() - self._last_arrival > 2 * self._gap_s
            if left_s <= 0 or is_full or is_quiet or self._gap_s >= self._flush_s:
                return
            await asyncio.sleep(min(left_s, self._gap_s))

    async def _compute(self, batch: list[QueuedRow]) -> None:
        """Compute a batch. Where the device fails, it is halved until only the row to blame fails."""
        started = time.monotonic()
        try:
            scores = await self.alone(lambda: self._model.score([row.token_ids for row in batch]))
        except RuntimeError as error:  # what torch raises, out of memory included
            if len(batch) > 1:
                middle = len(batch) // 2
                await self._compute(batch[:middle])
                await self._compute(batch[middle:])
                return
            metrics.REWARD_MODEL_BATCH_ERRORS.inc()
            num_tokens = len(batch[0].token_ids)
            batch[0].deliver(ComputeError(f"the model failed on a sequence of {num_tokens} tokens: {error}"))
            return
        for row, score in zip(batch, scores, strict=True):
            row.deliver(score)
        self._observe(batch, started, time.monotonic())

    def _observe(self, batch: list[QueuedRow], started: float, finished: float) -> None:
        for row in batch:
            metrics.REWARD_MODEL_WAIT_SECONDS.observe(started - row.arrived)
        seconds = finished - started
        tokens = sum(len(row.token_ids) for row in batch)
        speed = tokens / max(seconds, 1e-6)
        self._tokens_per_s += (RATE_WEIGHT if self._tokens_per_s else 1.0) * (speed - self._tokens_per_s)
        metrics.REWARD_MODEL_BATCH_SECONDS.observe(seconds)
        metrics.REWARD_MODEL_BATCH_ROWS.observe(len(batch))
        metrics.REWARD_MODEL_TOKENS.labels("real").inc(tokens)
        padded = max(len(row.token_ids) for row in batch) * len(batch)
        metrics.REWARD_MODEL_TOKENS.labels("padding").inc(padded - tokens)

    def _retry_after_s(self) -> float:
        return min(
            LONGEST_RETRY_S,
            max(1.0, self._waiting.num_tokens / self._tokens_per_s if self._tokens_per_s else 1.0),
        )
