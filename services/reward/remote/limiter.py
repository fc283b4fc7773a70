"""Limits on what all reward workers of a run together ask of the servers of one section.

Redis decides, in one script with the server's clock: places for requests in flight, held under leases so that
a worker that dies gives them back, and token buckets for requests and tokens per minute. Tokens are drawn by
estimate and put right after the answer. Evaluation comes first: training leaves it a share of everything, and
gets nothing while evaluation waits.

One loop per worker talks to Redis, for all requests that wait at a time, so that a thousand waiting samples
cost no more calls than one. A settled request frees its place.
"""

import asyncio
import contextlib
import random
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tidemill.common.config.servers import LimitsConfig
from tidemill.common.redis.broker import Broker
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Lane

MAX_BATCH = 128
LEASE_S = 30.0
"""A worker that is silent this long gives back the concurrency that it held."""
BURST_S = 2.0
"""What this many seconds allow may be used at once; no minute has more than its limit and one burst."""
LONGEST_PAUSE_S = 0.25
"""Between two looks while something waits: another worker may have freed what it needs."""
SHORTEST_PAUSE_S = 0.02
RENEWALS_PER_LEASE = 3


@dataclass(slots=True, eq=False)
class Permit:
    """Leave for one request. `used_tokens` corrects the estimate; without it the estimate stands."""

    id: str
    tokens: int
    used_tokens: int | None = None


@dataclass(slots=True, eq=False)
class _Waiter:
    permit: Permit
    admitted: "asyncio.Future[None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Limiter:
    """The limits of one section of `servers`. Its loop starts with the first request; `close` ends it."""

    def __init__(
        self,
        broker: Broker,
        keys: Keys,
        servers: str,
        config: LimitsConfig,
        lease_s: float = LEASE_S,
        burst_s: float = BURST_S,
    ) -> None:
        self.servers, self.config = servers, config
        self._broker, self._lease_s, self._lease_ms = broker, lease_s, int(lease_s * 1000)
        self._burst_ms = int(burst_s * 1000)
        self._keys = [keys.limits(servers), keys.requests(servers)]
        self._prefix, self._number = secrets.token_hex(6), 0
        self._waiting: dict[Lane, deque[_Waiter]] = {Lane.EVAL: deque(), Lane.TRAIN: deque()}
        self._held: set[str] = set()
        self._settled: list[Permit] = []
        self._work = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def permit(self, lane: Lane, tokens: int) -> AsyncIterator[Permit]:
        """Wait until a request of about `tokens` may be sent; its end frees the place."""
        self._number += 1
        permit = Permit(f"{self._prefix}:{self._number}", tokens)
        if not self.config.is_limited:
            yield permit
            return
        started = time.monotonic()
        await self._admission(lane, permit)
        metrics.LIMITER_WAIT_SECONDS.labels(self.servers, lane).observe(time.monotonic() - started)
        try:
            yield permit
        finally:
            self._settle(permit)

    async def close(self) -> None:
        """Give back what is held, so that nobody has to wait for leases to run out."""
        if self._loop is None:
            return
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self._settle_all()

    async def _admission(self, lane: Lane, permit: Permit) -> None:
        waiter = _Waiter(permit)
        self._waiting[lane].append(waiter)
        self._wake()
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter.admitted.done() and not waiter.admitted.cancelled():
                self._settle(permit, is_unused=True)  # admitted just as it was given up
            raise

    def _settle(self, permit: Permit, is_unused: bool = False) -> None:
        if is_unused:
            permit.used_tokens = 0
        self._held.discard(permit.id)
        self._settled.append(permit)
        self._wake()

    def _wake(self) -> None:
        self._work.set()
        if self._loop is None:
            self._loop = asyncio.create_task(self._run(), name=f"limits of {self.servers}")
            self._loop.add_done_callback(self._pass_on_failure)

    async def _run(self) -> None:
        """Settle, admit and renew, whenever there is something to do."""
        renew_s = self._lease_s / RENEWALS_PER_LEASE
        renewed = time.monotonic()
        while True:
            self._work.clear()
            await self._settle_all()
            pauses_s = [renew_s]
            for lane, waiting in self._waiting.items():
                if waiting:
                    pauses_s.append(await self._admit(lane))
            if time.monotonic() - renewed >= renew_s:
                await self._renew()
                renewed = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pauses_s)):
                    await self._work.wait()

    async def _admit(self, lane: Lane) -> float:
        """Admit what may pass; returns the seconds after which to try again."""
        waiting = self._waiting[lane]
        while waiting and waiting[0].admitted.cancelled():
            waiting.popleft()
        batch = [waiter for waiter in list(waiting)[:MAX_BATCH] if not waiter.admitted.cancelled()]
        if not batch:
            return 0.0 if waiting else LONGEST_PAUSE_S
        config = self.config
        arguments: list[object] = [
            lane.value,
            self._lease_ms,
            config.concurrency,
            config.requests_per_minute,
            config.tokens_per_minute,
            self._burst_ms,
            config.evaluation_share,
        ]
        for waiter in batch:
            arguments += [waiter.permit.id, waiter.permit.tokens]
        num_admitted, wait_ms = await self._broker.script("limit_acquire", self._keys, arguments)
        for waiter in batch[:num_admitted]:
            waiting.remove(waiter)
            self._held.add(waiter.permit.id)
            if waiter.admitted.cancelled():
                self._settle(waiter.permit, is_unused=True)
            else:
                waiter.admitted.set_result(None)
        if num_admitted == len(batch):
            return 0.0 if waiting else LONGEST_PAUSE_S
        hint_s = wait_ms / 1000 if wait_ms > 0 else LONGEST_PAUSE_S
        # Not in step with the other workers, or the same one would always come first.
        return min(max(hint_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)

    async def _settle_all(self) -> None:
        while self._settled:
            batch, self._settled = self._settled[:MAX_BATCH], self._settled[MAX_BATCH:]
            arguments: list[object] = []
            for permit in batch:
                used = permit.tokens if permit.used_tokens is None else permit.used_tokens
                arguments += [permit.id, permit.tokens - used]
            await self._broker.script("limit_settle", self._keys, arguments)

    async def _renew(self) -> None:
        held = sorted(self._held)
        for start in range(0, len(held), MAX_BATCH):
            arguments = [self._lease_ms, *held[start : start + MAX_BATCH]]
            await self._broker.script("limit_renew", self._keys[1:], arguments)

    def _pass_on_failure(self, loop: "asyncio.Task[None]") -> None:
        """An error nobody expected is for those that wait: they must not wait for ever."""
        if loop.cancelled() or (error := loop.exception()) is None:
            return
        for waiting in self._waiting.values():
            while waiting:
                waiter = waiting.popleft()
                if not waiter.admitted.done():
                    waiter.admitted.set_exception(error)
        self._loop = None
