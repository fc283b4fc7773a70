"""One attempt at one sample over the network: limits, a replica, the request, another replica if it fails.

A judge and a reward model differ in what they send and read; everything between stands here. An attempt asks
each replica at most once, and never waits for one that fails; pauses and further attempts are the policy of
the reward (`named.py`).
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from common import metrics
from common.config.remote import HedgeConfig
from common.messages import Lane
from services.reward.remote.faults import FaultKind, RemoteFault
from services.reward.remote.hedging import HedgeDelay, hedged
from services.reward.remote.limiter import Limiter, Permit
from services.reward.remote.replica import Replica
from services.reward.remote.router import Router

T = TypeVar("T")

Send = Callable[[Replica, Permit], Awaitable[T]]
"""Sends one request to a replica and reads the answer. It raises `RemoteFault`, and says in the permit what
the request has used."""

UNUSED = (FaultKind.CONNECTION, FaultKind.RATE_LIMITED, FaultKind.REFUSED_REQUEST)
"""Requests that failed like this were not computed: their tokens are given back."""


class RemoteCalls:
    """Requests of one reward."""

    def __init__(
        self, name: str, router: Router, limiter: Limiter, timeout_s: float, hedge: HedgeConfig | None = None
    ) -> None:
        self.name, self.router, self.limiter, self.timeout_s = name, router, limiter, timeout_s
        self.errors: Counter[str] = Counter()
        self.num_answered = self.num_failovers = self.num_hedges = 0
        self._hedge = HedgeDelay(hedge) if hedge else None

    async def ask(self, send: Send[T], lane: Lane, tokens: int) -> T:
        """The answer of the first replica that gives one.

        Raises:
            RemoteFault: none of those that were asked did, or asking another one cannot help.
        """
        tried: set[str] = set()
        for num_failovers in range(self.router.config.max_failovers + 1):
            try:
                return await self._try(send, lane, tokens, tried)
            except RemoteFault as fault:
                is_last = num_failovers == self.router.config.max_failovers
                if is_last or not fault.may_fail_over or not self.router.has_another(tried):
                    raise
                self.num_failovers += 1
                metrics.REMOTE_FAILOVERS.labels(self.name).inc()
        raise AssertionError("the last round returns or raises")

    async def close(self) -> None:
        """Stop watching replicas and give back what is held."""
        await self.router.close()
        await self.limiter.close()

    async def _try(self, send: Send[T], lane: Lane, tokens: int, tried: set[str]) -> T:
        """One request, or two where the first is slow."""
        sent = asyncio.Event()
        delay_s = self._hedge.delay_s if self._hedge else None
        if delay_s is None:
            return await self._once(send, lane, tokens, tried, sent)

        def second() -> Coroutine[Any, Any, T] | None:
            if self.limiter.is_busy or not self.router.has_another(tried):
                return None
            self.num_hedges += 1
            return self._once(send, lane, tokens, tried, asyncio.Event())

        first = self._once(send, lane, tokens, tried, sent)
        answer, winner = await hedged(first, second, sent, delay_s)
        if winner:
            metrics.REMOTE_HEDGES.labels(self.name, winner).inc()
        return answer

    async def _once(self, send: Send[T], lane: Lane, tokens: int, tried: set[str], sent: asyncio.Event) -> T:
        """One request to one replica that was not tried yet, if there is one."""
        try:
            async with self.limiter.permit(lane, tokens) as permit, self.router.lease(tried) as replica:
                tried.add(replica.url)
                sent.set()
                return await self._timed(send, replica, permit)
        except RemoteFault as fault:
            self.errors[fault.kind] += 1
            metrics.REMOTE_ERRORS.labels(self.name, fault.kind).inc()
            raise

    async def _timed(self, send: Send[T], replica: Replica, permit: Permit) -> T:
        started = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout_s):
                answer = await send(replica, permit)
        except TimeoutError:
            raise RemoteFault(
                FaultKind.TIMEOUT, f"{replica.origin} gave no answer within {self.timeout_s:g} s (timeout_s)"
            ) from None
        except RemoteFault as fault:
            if fault.fault in UNUSED:
                permit.used_tokens = 0
            raise
        time_s = time.monotonic() - started
        metrics.REMOTE_SECONDS.labels(self.name).observe(time_s)
        if self._hedge:
            self._hedge.observe(time_s)
        self.num_answered += 1
        return answer
