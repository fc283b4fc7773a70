"""Limits on what all reward workers of a run together ask of the servers of one section.

Redis decides, in one script with the server's clock: places for requests in flight, held under leases so that
those of a dead worker become free, and token buckets for requests and tokens per minute. Tokens are drawn by
estimate and corrected after the answer. Evaluation comes first: training leaves it a share of every limit,
and gets nothing while evaluation waits.
"""

import asyncio
import contextlib
import random
import secrets
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tidemill.common.config.servers import LimitsConfig
from tidemill.common.redis import reward_scripts
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.reward_scripts import Admission
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Lane

MAX_BATCH = 128
RENEWALS_PER_LEASE = 3
LONGEST_PAUSE_S = 0.25
"""Between two calls while something waits: another worker may have freed what it needs."""
SHORTEST_PAUSE_S = 0.02


@dataclass(slots=True, eq=False)
class Permit:
    """Permission for one request. `used_tokens` corrects the estimate; without it the estimate stands.

    Example: `tokens` 900, `used_tokens` 600: 300 are given back.
    """

    id: str
    tokens: int
    used_tokens: int | None = None

    @property
    def unused_tokens(self) -> int:
        """Tokens to give back; below zero where more were used."""
        return 0 if self.used_tokens is None else self.tokens - self.used_tokens


class Limiter:
    """The limits of one section of `servers`; `close` ends what the first request starts."""

    lease_s = 30.0
    """The places of a worker that is silent for this long become free."""
    burst_s = 2.0
    """The allowance of this many seconds may be used at once; a minute has at most its limit and a burst."""
    evaluation_share = 0.1
    """Share of every limit that training leaves to evaluation."""

    def __init__(self, broker: Broker, keys: Keys, servers: str, config: LimitsConfig) -> None:
        self.servers = servers
        self.config = config
        self._broker = broker
        self._levels = keys.limits(servers)
        self._in_flight = keys.requests(servers)
        self._prefix = secrets.token_hex(6)
        self._number = 0
        self._lines = {lane: asyncio.Lock() for lane in Lane}
        self._num_waiting = Counter[Lane]()
        self._held: set[str] = set()
        self._ended: deque[Permit] = deque()
        self._freed = asyncio.Event()
        self._upkeep: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def permit(self, lane: Lane, tokens: int) -> AsyncIterator[Permit]:
        """Wait until a request of about `tokens` may be sent; its end frees the place."""
        self._number += 1
        permit = Permit(f"{self._prefix}:{self._number}", tokens)
        if self.config == LimitsConfig():  # no limit
            yield permit
            return
        if self._upkeep is None:
            self._upkeep = asyncio.create_task(self._keep_up(), name=f"limits of {self.servers}")
        if self._upkeep.done():
            self._upkeep.result()  # an unexpected error: without renewal, no place is held
        started = time.monotonic()
        # Counted before it waits in line: the call that admits its predecessor reports that this one waits.
        self._num_waiting[lane] += 1
        try:
            # Only the first in line asks Redis, so that a thousand that wait cost no more calls than one.
            async with self._lines[lane]:
                self._held.add(permit.id)
                try:
                    await self._admission(lane, permit)
                except BaseException:  # given up, perhaps just as it was admitted
                    permit.used_tokens = 0
                    self._end(permit)
                    raise
        finally:
            self._num_waiting[lane] -= 1
        metrics.LIMITER_WAIT_SECONDS.labels(self.servers, lane).observe(time.monotonic() - started)
        try:
            yield permit
        finally:
            self._end(permit)

    async def close(self) -> None:
        """Give back all places, so that no other worker has to wait for leases to expire."""
        if self._upkeep is None:
            return
        self._upkeep.cancel()
        await asyncio.gather(self._upkeep, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                while self._ended:
                    await self._call(Lane.TRAIN)

    async def _admission(self, lane: Lane, permit: Permit) -> None:
        while True:
            freed = self._freed  # taken before the call: what is freed during it counts too
            admission = await self._call(lane, waiting=permit)
            if admission.num_admitted:
                return
            hint_s = admission.wait_ms / 1000 if admission.wait_ms > 0 else LONGEST_PAUSE_S
            # Random: in step with the other workers, the same one would always come first.
            pause_s = min(max(hint_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
            await _until_set(freed, pause_s)

    def _end(self, permit: Permit) -> None:
        self._held.discard(permit.id)
        self._ended.append(permit)
        self._freed.set()
        # A new event for later waiters; the old one stays set for those that hold it.
        self._freed = asyncio.Event()

    async def _keep_up(self) -> None:
        """Report ended requests if no waiting request's call does so, and renew leases."""
        renew_s = self.lease_s / RENEWALS_PER_LEASE
        renewed = time.monotonic()
        while True:
            # What ended before this task waited, or during its last call, has set an event that is gone.
            if not self._ended:
                await _until_set(self._freed, max(0.0, renewed + renew_s - time.monotonic()))
            # Let waiting requests run first: their call reports what has ended.
            await asyncio.sleep(0)
            while self._ended:
                await self._call(Lane.TRAIN)
            if time.monotonic() - renewed >= renew_s:
                renewed = time.monotonic()
                held = sorted(self._held)
                for start in range(0, len(held), MAX_BATCH):
                    await self._call(Lane.TRAIN, held[start : start + MAX_BATCH])

    async def _call(
        self, lane: Lane, held: list[str] | None = None, waiting: Permit | None = None
    ) -> Admission:
        """One call of the script, with requests that have ended, those that are held, and one that waits."""
        ended = [self._ended.popleft() for _ in range(min(len(self._ended), MAX_BATCH))]
        try:
            return await reward_scripts.limits(
                self._broker,
                levels=self._levels,
                in_flight=self._in_flight,
                lane=lane.value,
                lease_ms=int(self.lease_s * 1000),
                concurrency=self.config.concurrency,
                requests_per_minute=self.config.requests_per_minute,
                tokens_per_minute=self.config.tokens_per_minute,
                burst_ms=int(self.burst_s * 1000),
                evaluation_share=self.evaluation_share,
                worker=self._prefix,
                num_evaluations=self._num_waiting[Lane.EVAL],
                ended=[(permit.id, permit.unused_tokens) for permit in ended],
                renewed=held or [],
                waiting=[(waiting.id, waiting.tokens)] if waiting else [],
            )
        except BaseException:  # the caller has given up: the ended requests are still to be reported
            self._ended.extendleft(ended)
            raise


async def _until_set(event: asyncio.Event, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()
