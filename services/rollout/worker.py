"""Tickets in, groups out: bounded concurrency, evaluation in a lane of its own.

A finished group frees a slot. When the service stops, running groups get `streams.drain_s` to finish;
the rest is handed back, and whoever takes over generates only the missing samples.
"""

import asyncio

import structlog

from common.errors import BrokerError, EngineError, LeaseLostError, first_cause
from common.process.heartbeats import Heartbeat
from common.process.service import ServiceContext
from common.streams import Consumer, Delivery, Garbled
from common.telemetry import metrics
from common.wire.keys import ROLLOUT_GROUP
from common.wire.messages import DeadLetter, Lane, Ticket
from services.rollout.engines.engine import Engine
from services.rollout.group import GroupGenerator
from services.rollout.weight_follower import WeightFollower

log = structlog.get_logger(__name__)

BLOCK_S = 1.0


class RolloutWorker:
    """Serves one lane with one engine until the context says stop."""

    def __init__(self, context: ServiceContext, lane: Lane, engine: Engine, follower: WeightFollower) -> None:
        self.context, self.lane, self.engine = context, lane, engine
        streams = context.config.streams
        self.consumer: Consumer[Ticket] = Consumer(
            context.broker,
            context.keys.prompts(lane),
            ROLLOUT_GROUP,
            context.consumer_name,
            Ticket,
            lease_s=streams.lease_s,
            dead_key=context.keys.dead,
            label=context.keys.name_of(context.keys.prompts(lane)),
            max_bytes=streams.max_message_mb << 20,
            stand_in=context.stand_in,
        )
        self.generator = GroupGenerator(
            context.broker, context.keys, lane, self.consumer, engine, follower, context.name
        )
        self.max_groups = context.config.rollout.max_groups_in_flight
        self.groups: set[asyncio.Task[None]] = set()
        metrics.GROUP_SLOTS.labels(lane).set(self.max_groups)

    async def run(self) -> None:
        """Fetch tickets while there are slots; drain at the end."""
        async with self.consumer:
            while not self.context.stopping.is_set():
                if len(self.groups) >= self.max_groups:
                    await self.context.unless_stopping(
                        asyncio.wait(self.groups, return_when=asyncio.FIRST_COMPLETED)
                    )
                    continue
                # Not cancelled by a stop: what a broken-off call was given would stay pending until its
                # lease expires.
                # One at a time: a step's tickets arrive together, and must not all go to who asks first.
                for delivery in await self.consumer.fetch(1, BLOCK_S):
                    await self._accept(delivery)
            await self._drain()

    def report(self, beat: Heartbeat) -> None:
        """Add this lane to the process's heartbeat."""
        beat.counts[f"groups_{self.lane}"] = len(self.groups)

    async def _accept(self, delivery: Delivery[Ticket] | Garbled) -> None:
        """Start a group, or bury a message that nobody can work on."""
        if isinstance(delivery, Garbled):
            await self._bury(delivery, delivery.error, 1)
        elif delivery.attempts > self.context.config.streams.max_attempts:
            await self._bury(
                delivery, f"given up after {delivery.attempts - 1} deliveries", delivery.attempts
            )
        elif not self.context.stopping.is_set():  # what arrives too late is handed back when draining
            task = asyncio.create_task(self._work(delivery), name=f"ticket {delivery.message.ticket}")
            self.groups.add(task)
            task.add_done_callback(self._finished)
            metrics.GROUPS_IN_FLIGHT.labels(self.lane).set(len(self.groups))

    def _finished(self, task: asyncio.Task[None]) -> None:
        self.groups.discard(task)
        metrics.GROUPS_IN_FLIGHT.labels(self.lane).set(len(self.groups))
        if not task.cancelled() and (error := task.exception()):
            cause = first_cause(error)
            log.error("this process cannot go on; stopping so that it is started anew", error=str(cause))
            self.context.fail(cause)

    async def _work(self, delivery: Delivery[Ticket]) -> None:
        """Generate one group; losing its lease cancels it. The one place that catches broadly."""
        ticket = delivery.message.ticket
        generation = asyncio.ensure_future(self.generator.generate(delivery))
        lost = asyncio.ensure_future(delivery.lost.wait())
        try:
            await asyncio.wait({generation, lost}, return_when=asyncio.FIRST_COMPLETED)
            if generation.done():
                generation.result()
        except* LeaseLostError:
            log.info("group taken over by another worker", ticket=ticket)
        except* (EngineError, BrokerError):
            raise  # the ticket is as good as ever
        except* Exception as failures:
            cause = first_cause(failures)
            log.error("group failed", ticket=ticket, error=str(cause))
            await self._bury(delivery, f"{type(cause).__name__}: {cause}", delivery.attempts)
        finally:
            lost.cancel()
            generation.cancel()
            await asyncio.gather(generation, lost, return_exceptions=True)

    async def _bury(self, delivery: Delivery[Ticket] | Garbled, error: str, attempts: int) -> None:
        ticket = delivery.message.ticket if isinstance(delivery, Delivery) else -1
        log.error("ticket moved to the dead letters", ticket=ticket, entry=delivery.entry_id, error=error)
        letter = DeadLetter(
            origin=self.context.keys.name_of(self.consumer.key),
            entry_id=delivery.entry_id,
            fields={name.decode(errors="replace"): value for name, value in delivery.fields.items()},
            error=error,
            attempts=attempts,
            ticket=ticket,
            worker=self.context.name,
        )
        if await self.consumer.bury(delivery, letter) and ticket >= 0:
            await self.generator.forget(ticket)

    async def _drain(self) -> None:
        """Let running groups finish for a while, then give the rest back."""
        if self.groups and self.context.failure is None:
            await asyncio.wait(set(self.groups), timeout=self.context.config.streams.drain_s)
        unfinished = set(self.groups)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        await self.consumer.leave()
