"""Samples that were in flight when workers died run apart from others, first few at a time and then alone.

The number of deliveries says how suspect a sample is. A first delivery says nothing: a worker that is killed
loses everything it holds. With further deliveries a sample runs beside fewer others, so that only one that
was alone when its worker died is dead-lettered. Time spent waiting here does not count as a delivery.
"""

import asyncio
from collections.abc import Callable

from tidemill.common.process.service import ServiceContext
from tidemill.common.streams import Delivery
from tidemill.common.streams.consumer import Consumer
from tidemill.common.wire.messages import Trajectory

FEW = 8
"""Most suspects that run together, before they run alone."""
UNRESTRICTED_DELIVERIES = 2
"""Deliveries beside any number of others, if `streams.max_attempts` allows enough deliveries after them."""


class Quarantine:
    """Shared by all lanes of a worker, which die together: while suspects run, no lane fetches."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._lone_from = min(UNRESTRICTED_DELIVERIES + 2, max(2, context.config.streams.max_attempts))
        self._most = max(self._lone_from, context.config.streams.max_attempts)
        self._num_running = 0
        self._is_quiet = asyncio.Event()
        self._is_open = asyncio.Event()
        self._is_quiet.set()
        self._is_open.set()
        self._one_at_a_time = asyncio.Lock()

    def attempts_exhausted(self, delivery: Delivery[Trajectory]) -> bool:
        """Whether it was delivered too often, in the end with nothing else in flight."""
        return delivery.attempts > self._most

    def is_suspect(self, delivery: Delivery[Trajectory]) -> bool:
        """Whether it may run beside a few others only, or alone."""
        return self._max_together(delivery) is not None

    def began(self) -> None:
        self._num_running += 1
        self._is_quiet.clear()

    def ended(self, count: int = 1) -> None:
        self._num_running -= count
        if not self._num_running:
            self._is_quiet.set()

    @property
    def is_open(self) -> bool:
        return self._is_open.is_set()

    async def until_open(self) -> None:
        """Wait while suspects run: nothing new is fetched then."""
        if not self.is_open:
            await self._context.unless_stopping(self._is_open.wait())

    async def admit(self, consumer: Consumer[Trajectory], deliveries: list[Delivery[Trajectory]]) -> None:
        """Hold back deliveries that were fetched while another lane's suspects began, until these end."""
        if deliveries and not self.is_open:
            await consumer.park(deliveries)
            await self.until_open()
            await consumer.unpark(deliveries)

    async def run_suspects(
        self,
        consumer: Consumer[Trajectory],
        suspects: list[Delivery[Trajectory]],
        start: Callable[[Delivery[Trajectory]], None],
    ) -> None:
        """Run suspects, at most `_max_together` at once; those beyond `FEW` are handed back to the stream."""
        suspects = sorted(suspects, key=lambda delivery: delivery.attempts)
        await consumer.hand_back(suspects[FEW:])
        waiting = suspects[:FEW]
        # They may wait for long: a death of this worker meanwhile must not count against them.
        await consumer.park(waiting)
        async with self._one_at_a_time:
            self._is_open.clear()
            try:
                while waiting and await self._is_alone():
                    count = self._max_together(waiting[0]) or FEW
                    # Only those that may run beside so many: one that has to be alone comes later, or it
                    # would be dead-lettered for the death that one beside it causes.
                    # They are a prefix, as those delivered most often are the last.
                    allowed = [self._max_together(delivery) or FEW for delivery in waiting[:count]]
                    num_together = sum(most >= count for most in allowed)
                    together = waiting[:num_together]
                    waiting = waiting[num_together:]
                    together = [delivery for delivery in together if not delivery.is_lost]
                    await consumer.unpark(together)  # before they start: from here on a death counts
                    for delivery in together:
                        start(delivery)
                # The last ones too: new samples beside them would be suspected of a death that they cause.
                await self._is_alone()
            finally:
                self._is_open.set()
        await consumer.unpark(waiting)  # the worker stops: handing them back undoes this count

    async def _is_alone(self) -> bool:
        """Wait until nothing is in flight. Returns False if the worker stops."""
        await self._context.unless_stopping(self._is_quiet.wait())
        return self._is_quiet.is_set() and not self._context.stopping.is_set()

    def _max_together(self, delivery: Delivery[Trajectory]) -> int | None:
        """Most samples in flight together, this one included; None: any number."""
        if delivery.attempts >= self._lone_from:
            return 1
        return FEW if delivery.attempts == self._lone_from - 1 and delivery.attempts > 1 else None
