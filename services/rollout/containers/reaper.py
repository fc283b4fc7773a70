"""Removes containers of sessions whose lease nobody holds: what a killed worker has left on this node.

A container's name says which entry of which lane its session was played for, and by whom. The entry is the
lease: while its consumer in Redis is the one that the name says, and has renewed it, the container stays.

Guarantees: a container without a session's name of this run is never touched; neither is one whose worker
renews its lease. Where Redis or the container engine does not answer, nothing is removed.
"""

import asyncio
import time
from typing import Any

import structlog
from redis import exceptions as redis_errors

from tidemill.common.errors import BrokerError
from tidemill.common.process.service import ServiceContext
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import ROLLOUT_GROUP
from tidemill.common.wire.messages import Lane
from tidemill.services.rollout.containers.command import Container, EngineAwayError
from tidemill.services.rollout.containers.names import unique_end
from tidemill.services.rollout.containers.sessions import SessionContainers

log = structlog.get_logger(__name__)

LOOKS_PER_LEASE = 2
LATE_S = 0.05
"""A look at a lease's end comes so much after it."""


class Reaper:
    def __init__(self, context: ServiceContext, containers: SessionContainers) -> None:
        self._broker = context.broker
        self._keys = context.keys
        self._containers = containers
        self._lease_s = context.config.streams.lease_s
        self._consumer = unique_end(context.consumer_name)
        self._waited_s = context.broker.waited_s
        self._patient_until = 0.0
        self._expired_since: dict[tuple[Lane, str, str], float] = {}
        """Leases that were seen expired, and since when."""

    async def run(self) -> None:
        """Look at once, and then twice a lease; also as soon as a lease of a silent worker ends."""
        while True:
            pause_s = self._lease_s / LOOKS_PER_LEASE
            try:
                pause_s = min(pause_s, await self.look())
            except EngineAwayError:
                pass  # logged where it was noticed
            except (BrokerError, redis_errors.RedisError) as error:
                log.warning(
                    "containers of lost sessions stay: Redis does not say whose they are", error=str(error)
                )
            await asyncio.sleep(pause_s)

    async def look(self) -> float:
        """Remove what nobody holds; returns the seconds until the next lease can end.

        Raises:
            EngineAwayError: the engine does not answer.
            BrokerError: Redis does not.
        """
        # Before Redis is asked: what is listed now was delivered before, so Redis knows of its lease.
        listed = await self._containers.list_containers()
        of_run = [container for container in listed if container.session.run_uid == self._containers.run_uid]
        metrics.CONTAINERS_HELD.set(len(of_run))
        next_end_s = self._lease_s
        abandoned: list[Container] = []
        leases: dict[tuple[Lane, str], tuple[str, float]] = {}
        for container in of_run:
            session = container.session
            if session.consumer == self._consumer:
                if str(session) not in self._containers.live:
                    abandoned.append(container)
                continue
            entry = (session.lane, session.entry_id)
            if entry not in leases:
                leases[entry] = await self._lease_of(*entry)
            holder, idle_s = leases[entry]
            lease = (*entry, session.consumer)
            if holder != session.consumer:
                abandoned.append(container)
            elif idle_s < self._lease_s:
                self._expired_since.pop(lease, None)
                next_end_s = min(next_end_s, self._lease_s - idle_s + LATE_S)
            elif self._is_over(lease):
                abandoned.append(container)
        if abandoned:
            await self._containers.remove(abandoned, "lease")
            names = sorted({str(container.session) for container in abandoned})
            log.warning(
                "removed containers whose session nobody plays", num=len(abandoned), sessions=names[:8]
            )
        return next_end_s

    async def _lease_of(self, lane: Lane, entry_id: str) -> tuple[str, float]:
        """The unique end of the name of the entry's consumer, and for how long it has not renewed; an empty
        name where nobody has the entry."""
        reply: list[Any] = await self._broker.execute(
            "XPENDING", self._keys.prompts(lane), ROLLOUT_GROUP, entry_id, entry_id, 1
        )
        # After an outage all holders look silent, for none could renew: they get a lease's time.
        if self._broker.waited_s != self._waited_s:
            self._waited_s = self._broker.waited_s
            self._patient_until = time.monotonic() + self._lease_s
            self._expired_since.clear()
        if not reply:
            return "", 0.0
        _, consumer, idle_ms, _ = reply[0]
        return unique_end(consumer.decode()), int(idle_ms) / 1000

    def _is_over(self, lease: tuple[Lane, str, str]) -> bool:
        """Whether an expired lease has stayed so for half a lease: a holder that lives would have renewed.

        The clock of Redis may have jumped, and a worker may have been stopped for a moment.
        """
        now = time.monotonic()
        since = self._expired_since.setdefault(lease, now)
        return now >= self._patient_until and now - since >= self._lease_s / LOOKS_PER_LEASE
