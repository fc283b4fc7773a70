"""Publishes finished scores in batches without making any of them wait.

One call publishes whatever has gathered while the call before was under way: alone when there is little to
do, many at once under load. Each score and the acknowledgement of its trajectory are one unit.
"""

import asyncio
from collections.abc import Callable

from common.streams import Consumer, Delivery
from common.wire.messages import Score, Trajectory

MAX_BATCH = 256
"""Most scores in one call, so that a script never holds up Redis for long."""
GATHER_S = 0.002
"""How long the first score of a call waits for others: fewer calls, and fewer fetches that follow them."""

Result = tuple[Delivery[Trajectory], Score]


class Publisher:
    """Queue and loop between the scoring tasks and the stream of scores."""

    def __init__(
        self,
        consumer: Consumer[Trajectory],
        scores_key: str,
        settled: Callable[[Delivery[Trajectory], Score, bool], None],
    ) -> None:
        self._consumer, self._scores_key = consumer, scores_key
        self._settled = settled
        """Called for each result with whether it was published; False means that the lease was lost."""
        self._queue: asyncio.Queue[Result] = asyncio.Queue()

    def put(self, delivery: Delivery[Trajectory], score: Score) -> None:
        """Hand over a finished score. Bounded by the slots of the lane: a slot is freed by `settled`."""
        self._queue.put_nowait((delivery, score))

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            batch = [await self._queue.get()]
            await asyncio.sleep(GATHER_S)
            while len(batch) < MAX_BATCH and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            flags = await self._consumer.complete(batch, self._scores_key)
            for (delivery, score), is_published in zip(batch, flags, strict=True):
                self._settled(delivery, score, is_published)
                self._queue.task_done()

    async def flush(self) -> None:
        """Wait until everything handed over has been settled."""
        await self._queue.join()
