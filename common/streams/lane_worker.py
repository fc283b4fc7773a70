"""One lane of a worker: it fetches messages for its free slots, works on them, and at the end drains.

An unexpected error ends the whole process, never one lane alone.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

import structlog

from tidemill.common.errors import MachineFaultError
from tidemill.common.process.service import ServiceContext
from tidemill.common.store import resolved
from tidemill.common.streams.consumer import Consumer
from tidemill.common.streams.dead_letters import dead_letter
from tidemill.common.streams.entries import Delivery, Garbled
from tidemill.common.streams.log import has_claim
from tidemill.common.wire.messages import Lane, Message

log = structlog.get_logger(__name__)

BLOCK_S = 0.5
LONGEST_BLOCK_S = 2.0
"""Wait for new messages; a stop is noticed no later than this. While nothing comes, the wait grows: a
thousand workers whose evaluation lane is idle must not keep Redis busy."""
BLOCKS_PER_LEASE = 8
"""Least number of waits in a lease: abandoned messages are looked for between two waits."""

M = TypeVar("M", bound=Message)
Result = TypeVar("Result")


class LaneWorker(ABC, Generic[M]):
    """Takes messages of one lane until the context says stop. Subclasses say what is done with them."""

    def __init__(
        self, context: ServiceContext, lane: Lane, key: str, group: str, message_type: type[M]
    ) -> None:
        self.context = context
        self.lane = lane
        streams = context.config.streams
        self.consumer = Consumer(
            context.broker,
            key,
            group,
            context.consumer_name,
            message_type,
            lease_s=streams.lease_s,
            dead_key=context.keys.dead,
            label=context.keys.name_of(key),
            lease_keeper=context.lease_keeper,
        )
        self.running: set[asyncio.Task[Any]] = set()
        self._reading: dict[asyncio.Task[M], Delivery[M]] = {}
        """Held messages whose payloads are being read."""
        self._tasks = asyncio.TaskGroup()
        self._block_s = BLOCK_S
        self._longest_block_s = max(BLOCK_S, min(LONGEST_BLOCK_S, streams.lease_s / BLOCKS_PER_LEASE))
        self._slot_freed = asyncio.Event()
        """Set when a slot is free, and when the service must stop: one wait for both."""

    @property
    @abstractmethod
    def num_free(self) -> int:
        """Slots that are free; `free_slot` says when there are more."""

    @abstractmethod
    async def accept(self, deliveries: list[Delivery[M]]) -> None:
        """Begin to work on these messages."""

    @abstractmethod
    def given_up(self, delivery: Delivery[M]) -> str:
        """Why a message is given up, such as too many deliveries; empty where it is worked on."""

    @property
    def num_at_work(self) -> int:
        """Messages that are worked on."""
        return len(self.running)

    async def until_idle(self) -> None:
        """Wait until no message is worked on."""
        while self.running:
            await asyncio.wait(self.running)

    async def end_work(self) -> None:
        """End the work that is under way; on return it has ended."""
        # Read again each time: as a task ends, it may begin another one.
        while self.running:
            for task in self.running:
                task.cancel()
            await asyncio.wait(self.running)

    async def flush(self) -> None:
        """Publish what is finished; called before this worker leaves."""

    async def run(self) -> None:
        """Fetch and work until the service stops, then finish or hand back what is held."""
        # The consumer outlives the tasks: it renews the leases of messages that they still work on.
        async with self.consumer, self._tasks:
            self._tasks.create_task(self._wake_to_stop(), name=f"stop {self.lane}")
            while not self.context.stopping.is_set():
                if self.context.shortage.is_short:
                    await self._wait_out_shortage()
                    continue
                free = self.num_free
                if free <= 0:
                    # Nothing is awaited between the check and this, so no freed slot is missed.
                    self._slot_freed.clear()
                    await self._slot_freed.wait()
                    continue
                deliveries = []
                # Dead-lettered before work begins, while the leases are surely held.
                for entry in await self.fetch(free):
                    if isinstance(entry, Garbled):
                        await self.dead_letter(entry, entry.error)
                    elif reason := self.given_up(entry):
                        # This delivery was no attempt: no work was begun.
                        await self.dead_letter(entry, reason, entry.attempts - 1)
                    else:
                        deliveries.append(entry)
                await self._accept_or_hand_back(deliveries)
            await self._drain()

    async def _wake_to_stop(self) -> None:
        """Wake the lane that waits for a slot when the service must stop."""
        await self.context.stopping.wait()
        self._slot_freed.set()

    async def _accept_or_hand_back(self, deliveries: list[Delivery[M]]) -> None:
        """Begin to work on messages, unless this machine has proved to be short since they were asked for."""
        if self.context.shortage.is_short:
            await self.consumer.hand_back(deliveries)
        else:
            await self.accept(deliveries)

    async def hand_back_for(self, fault: MachineFaultError, delivery: Delivery[M]) -> None:
        """Give back a message that this machine cannot work on: no attempt, and nothing is said of it.

        This worker takes no more until a start works.
        """
        self.context.shortage.note(fault)
        await self.hand_back(delivery)

    async def hand_back(self, delivery: Delivery[M]) -> None:
        """Give back a message that is still held, for any worker; its delivery does not count."""
        if self.consumer.holds(delivery):
            await self.consumer.hand_back([delivery])

    async def _wait_out_shortage(self) -> None:
        """Give back what was fetched and not begun, and wait until a start works or the service stops."""
        await self.consumer.hand_back_ahead()
        await self.consumer.hand_back(list(self._reading.values()))
        self._stop_reading()
        await self.context.unless_stopping(self.context.shortage.until_over())

    async def fetch(self, count: int) -> list[Delivery[M] | Garbled]:
        if self._reading:
            return await self.context.unless_stopping(self._take_whole()) or []
        # Not cancelled by a stop: messages of a cancelled call would stay pending until their leases expire.
        deliveries = await self.consumer.fetch(count, self._block_s)
        self._block_s = BLOCK_S if deliveries else min(2 * self._block_s, self._longest_block_s)
        claims = self.context.broker.claims
        if claims is None:
            return deliveries
        for held in deliveries:
            if isinstance(held, Delivery) and has_claim(held.message):
                self._reading[self._tasks.create_task(resolved(claims, held.message))] = held
        claimed = list(self._reading.values())
        # The others are worked on meanwhile; those in `_reading` are held and renewed like these.
        return [held for held in deliveries if held not in claimed]

    async def _take_whole(self) -> list[Delivery[M] | Garbled]:
        """The messages whose payloads have been read; waits for the first. If none can be read for a lease,
        all are handed back, and this worker takes no more until the store is back."""
        lease_s = self.consumer.lease_s
        done, late = await asyncio.wait(self._reading, timeout=lease_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            # Before the wait: other workers may reach the store, and need not wait for these leases.
            await self.consumer.hand_back(list(self._reading.values()))
            await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
            self._stop_reading()
        whole = [self._reading.pop(task) for task in done]
        for held, task in zip(whole, done, strict=True):
            held.message = task.result()
        return [*whole]

    def _stop_reading(self) -> None:
        for task in self._reading:
            task.cancel()
        self._reading.clear()

    def begin_task(self, delivery: Delivery[M], work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Work on a message in a task, which is cancelled when the lease is lost to another worker."""
        task = self._tasks.create_task(work)
        self.running.add(task)
        # Before anything is awaited: a renewal that finds the lease gone must find the task too.
        delivery.on_lost = task.cancel
        task.add_done_callback(self.running.discard)
        return task

    def free_slot(self) -> None:
        self._slot_freed.set()

    async def dead_letter(self, entry: Delivery[M] | Garbled, error: str, attempts: int = 1) -> bool:
        """Move a message that cannot be processed to the dead letters; returns whether it was still held."""
        message = None if isinstance(entry, Garbled) else entry.message
        origin = self.consumer.label
        worker = self.context.name
        dead = dead_letter(
            origin, entry.entry_id, entry.fields, error, worker, message=message, attempts=attempts
        )
        is_dead_lettered = await self.consumer.dead_letter(entry, dead)
        if is_dead_lettered:
            log.error(
                "moved to the dead letters",
                stream=origin,
                entry=entry.entry_id,
                ticket=dead.ticket,
                error=error,
            )
        return is_dead_lettered

    async def _drain(self) -> None:
        """Let running work finish for a while, hand back the rest, and leave the group."""
        # Messages whose payloads were being read are still held: `leave` hands them back.
        self._stop_reading()
        if self.num_at_work:
            log.info("draining", lane=self.lane.value, in_flight=self.num_at_work)
            grace_s = self.context.config.streams.drain_s if self.context.failure is None else 0
            # Not `wait_for`, which forgets that it was cancelled where the work ends at that moment: `flush`
            # would wait for ever for the task that publishes, whose error had cancelled this.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.until_idle()
            num_late = self.num_at_work
            # Ended before they are handed back: two workers must not work on a message at once.
            await self.end_work()
            if num_late:
                log.info("handing back", lane=self.lane.value, count=num_late)
        # Publish before leaving: `leave` hands back what is held, and finished work would be done again.
        await self.flush()
        await self.consumer.leave()
