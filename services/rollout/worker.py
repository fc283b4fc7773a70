"""Tickets in, groups out: bounded concurrency, evaluation in a lane of its own.

A finished group frees a slot. When the service stops, running groups get `streams.drain_s` to finish;
the rest is handed back, and whoever takes over generates only the missing samples.
"""

import structlog

from tidemill.common.errors import (
    BrokerError,
    EngineError,
    EnvironmentFaultError,
    LeaseLostError,
    first_cause,
)
from tidemill.common.process.heartbeats import Heartbeat
from tidemill.common.process.service import ServiceContext
from tidemill.common.streams import Delivery, Garbled
from tidemill.common.streams.lane_worker import LaneWorker
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import ROLLOUT_GROUP
from tidemill.common.wire.messages import Lane, Ticket
from tidemill.services.rollout.engines.engine import Engine
from tidemill.services.rollout.group import GroupGenerator
from tidemill.services.rollout.sessions.player import Player
from tidemill.services.rollout.weight_follower import WeightFollower

log = structlog.get_logger(__name__)


class RolloutWorker(LaneWorker[Ticket]):
    """Serves one lane with one engine until the context says stop."""

    def __init__(
        self,
        context: ServiceContext,
        lane: Lane,
        engine: Engine,
        follower: WeightFollower,
        player: Player,
    ) -> None:
        super().__init__(context, lane, context.keys.prompts(lane), ROLLOUT_GROUP, Ticket)
        self.generator = GroupGenerator(context, lane, self.consumer, engine, follower, player)
        self.max_groups = context.config.rollout.max_groups_in_flight
        metrics.GROUP_SLOTS.labels(lane).set(self.max_groups)

    @property
    def num_free(self) -> int:
        return self.max_groups - len(self.running)

    async def fetch(self, count: int) -> list[Delivery[Ticket] | Garbled]:
        """One at a time: a step's tickets arrive together, and must not all go to who asks first."""
        return await super().fetch(1)

    async def accept(self, deliveries: list[Delivery[Ticket]]) -> None:
        """Start a group, unless the service stops: then the ticket is handed back when draining."""
        for delivery in deliveries if not self.context.stopping.is_set() else ():
            self.begin(delivery, self._work(delivery)).add_done_callback(lambda _: self._count())
            self._count()

    def given_up(self, delivery: Delivery[Ticket]) -> str:
        """A ticket may be delivered `streams.max_attempts` times."""
        if delivery.attempts <= self.context.config.streams.max_attempts:
            return ""
        return f"given up after {delivery.attempts - 1} deliveries"

    async def dead_letter(self, entry: Delivery[Ticket] | Garbled, error: str, attempts: int = 1) -> bool:
        """Also forget the progress of a group that will never be complete."""
        # Only once the dead letter is written, under a lease that held: a worker that took the group over
        # needs its progress.
        is_dead_lettered = await super().dead_letter(entry, error, attempts)
        if is_dead_lettered and isinstance(entry, Delivery):
            await self.generator.forget(entry.message.ticket)
        return is_dead_lettered

    def report(self, beat: Heartbeat) -> None:
        beat.counts[f"groups_{self.lane}"] = len(self.running)

    def _count(self) -> None:
        metrics.GROUPS_IN_FLIGHT.labels(self.lane).set(len(self.running))
        self.free_slot()

    async def _work(self, delivery: Delivery[Ticket]) -> None:
        """Generate one group. The one place that catches broadly."""
        ticket = delivery.message.ticket
        try:
            await self.generator.generate(delivery)
        except* LeaseLostError:
            log.info("group taken over by another worker", ticket=ticket)
        except* (EngineError, BrokerError) as failures:  # the ticket is as good as ever
            cause = first_cause(failures)
            log.error("this process cannot go on; stopping so that it is restarted", error=str(cause))
            self.context.fail(cause)
        except* EnvironmentFaultError as faults:  # no fault of the ticket's: others may have more luck
            await self._hand_on(delivery, first_cause(faults))
        except* Exception as failures:
            cause = first_cause(failures)
            await self.dead_letter(delivery, f"{type(cause).__name__}: {cause}", delivery.attempts)

    async def _hand_on(self, delivery: Delivery[Ticket], fault: BaseException) -> None:
        """Give a ticket whose environment fails here to whoever reclaims it next; the last one buries it."""
        if delivery.attempts >= self.context.config.streams.max_attempts:
            await self.dead_letter(delivery, f"an environment failed: {fault}", delivery.attempts)
            return
        log.warning("handing a group on: its environment fails", error=str(fault))
        await self.consumer.hand_back([delivery], is_counted=True)
