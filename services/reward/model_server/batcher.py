"""Dynamic batching: rows of many requests wait in one queue, and one thread computes batch after batch.

A batch starts as soon as the device is free. On a free device, rows wait to fill a batch only while others
keep coming, and never longer than `flush_ms`. A batch holds rows of like length, within a budget of padded
tokens. Bounded: a batch that starts frees its rows' slots; beyond the bound a request is refused with the
time after which to retry.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from tidemill.common.errors import RewardError
from tidemill.common.process.json_api import BusyError
from tidemill.common.telemetry import metrics
from tidemill.services.reward.model_server.options import ServerOptions
from tidemill.services.reward.model_server.scoring_model import ScoringModel

T = TypeVar("T")

SPEED_WEIGHT = 0.2
"""Weight of the newest batch in the moving average of the speed."""
LONGEST_RETRY_S = 30.0
WINDOW = 4
"""A batch is chosen among the next `WINDOW * max_batch_rows` rows of the queue."""
SLICE_S = 0.001
"""A free device waits to fill a batch as long as each slice of this length brings a row."""


@dataclass(eq=False, slots=True)
class QueuedRow:
    """One sequence that waits for its scores. Lower `priority` is served first, then earlier arrival."""

    token_ids: Sequence[int]
    priority: int = 0
    arrived: float = field(default_factory=time.monotonic)


def select_batch(waiting: Iterable[QueuedRow], options: ServerOptions) -> list[QueuedRow]:
    """The rows of the next batch, shortest first; `waiting` is in the order of arrival.

    The row that is next is always in it. Others join while the limits allow, the more urgent ones first,
    and among equals those nearest to it in length.
    """
    rows = sorted(waiting, key=lambda row: row.priority)[: WINDOW * options.max_batch_rows]
    if not rows:
        return []
    first = len(rows[0].token_ids)
    batch = rows[:1]
    longest = first
    num_tokens = first
    others = sorted(rows[1:], key=lambda row: (row.priority, abs(len(row.token_ids) - first)))
    for row in others:
        length = len(row.token_ids)
        padded = max(longest, length) * (len(batch) + 1)
        padding = padded - num_tokens - length
        if len(batch) == options.max_batch_rows:
            break
        if padded <= options.max_batch_tokens and padding <= options.max_padding * padded:
            batch.append(row)
            longest = max(longest, length)
            num_tokens += length
    return sorted(batch, key=lambda row: len(row.token_ids))


class ComputeError(RewardError):
    """The device failed on a row, alone in its batch."""


class Batcher:
    """Computes rows in batches from `start` to `close`."""

    def __init__(self, model: ScoringModel, options: ServerOptions) -> None:
        self._model = model
        self._options = options
        self.waiting: dict[QueuedRow, asyncio.Future[Tensor]] = {}
        """Rows that no batch has taken yet, in the order of arrival."""
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._tokens_per_s = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> "asyncio.Task[None]":
        """Begin to compute; the task ends only by `close`, or by an unexpected error."""
        self._task = asyncio.create_task(self._run(), name="batches")
        return self._task

    async def score(self, rows: Sequence[Sequence[int]], priority: int = 0) -> list[Tensor]:
        """Scores of the rows of one request, all or none.

        Raises:
            BusyError: the rows do not fit into the queue.
            ComputeError: the device failed on one of them.
        """
        # An empty queue takes any request, or one that is larger than the queue could never be served.
        if self.waiting and len(self.waiting) + len(rows) > self._options.max_queued_rows:
            wanted_s = _num_tokens(self.waiting) / self._tokens_per_s if self._tokens_per_s else 1.0
            pause_s = min(LONGEST_RETRY_S, max(1.0, wanted_s))
            raise BusyError(f"{len(self.waiting)} sequences wait; retry after {pause_s:.0f} s", pause_s)
        loop = asyncio.get_running_loop()
        scores_by_row = {QueuedRow(token_ids, priority): loop.create_future() for token_ids in rows}
        self.waiting |= scores_by_row
        self._arrived.set()
        metrics.REWARD_MODEL_QUEUED_ROWS.set(len(self.waiting))
        try:
            return list(await asyncio.gather(*scores_by_row.values()))
        finally:
            for row in scores_by_row:  # a client that left wants no scores
                self.waiting.pop(row, None)
            metrics.REWARD_MODEL_QUEUED_ROWS.set(len(self.waiting))

    async def alone(self, work: Callable[[], T]) -> T:
        """Run `work` on the thread that computes, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        """Stop; what waits is not computed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self) -> None:
        while True:
            while not self.waiting:
                self._arrived.clear()
                await self._arrived.wait()
            await self._fill()
            batch = select_batch(self.waiting, self._options)
            if batch:
                # They leave the queue before they are computed: their slots are free meanwhile.
                await self._compute([(row, self.waiting.pop(row)) for row in batch])

    async def _fill(self) -> None:
        """Wait for more rows while they keep coming, within the flush time of the oldest."""
        await asyncio.sleep(0)  # requests that came in the same turn of the loop belong together
        while self.waiting:
            left_s = next(iter(self.waiting)).arrived + self._options.flush_ms / 1e3 - time.monotonic()
            is_full = len(self.waiting) >= self._options.max_batch_rows or (
                _num_tokens(self.waiting) >= self._options.max_batch_tokens
            )
            if left_s <= 0 or is_full:
                return
            self._arrived.clear()
            try:
                async with asyncio.timeout(min(left_s, SLICE_S)):
                    await self._arrived.wait()
            except TimeoutError:
                return

    async def _compute(self, batch: "list[tuple[QueuedRow, asyncio.Future[Tensor]]]") -> None:
        """Compute a batch. If the device fails, the batch is halved until only the failing row is left."""
        started = time.monotonic()
        rows = [row for row, _ in batch]
        try:
            computed = await self.alone(lambda: self._model.score([row.token_ids for row in rows]))
        except RuntimeError as error:  # what torch raises, out of memory included
            if len(batch) > 1:
                middle = len(batch) // 2
                await self._compute(batch[:middle])
                await self._compute(batch[middle:])
                return
            metrics.REWARD_MODEL_BATCH_ERRORS.inc()
            ((row, scores),) = batch
            text = f"the model failed on a sequence of {len(row.token_ids)} tokens: {error}"
            if not scores.done():
                scores.set_exception(ComputeError(text))
            return
        for (row, scores), score in zip(batch, computed, strict=True):
            if scores.done():  # a client that left has cancelled it
                continue
            if score.isfinite().all():
                scores.set_result(score)
            else:
                text = f"the model's scores of a sequence of {len(row.token_ids)} tokens are not finite"
                scores.set_exception(ComputeError(text))
        self._observe(rows, started, time.monotonic())

    def _observe(self, batch: list[QueuedRow], started: float, finished: float) -> None:
        for row in batch:
            metrics.REWARD_MODEL_WAIT_SECONDS.observe(started - row.arrived)
        seconds = finished - started
        tokens = _num_tokens(batch)
        speed = tokens / max(seconds, 1e-6)
        self._tokens_per_s += (SPEED_WEIGHT if self._tokens_per_s else 1.0) * (speed - self._tokens_per_s)
        metrics.REWARD_MODEL_BATCH_SECONDS.observe(seconds)
        metrics.REWARD_MODEL_BATCH_ROWS.observe(len(batch))
        metrics.REWARD_MODEL_TOKENS.labels("real").inc(tokens)
        padded = max(len(row.token_ids) for row in batch) * len(batch)
        metrics.REWARD_MODEL_TOKENS.labels("padding").inc(padded - tokens)


def _num_tokens(rows: Iterable[QueuedRow]) -> int:
    return sum(len(row.token_ids) for row in rows)
