"""Limits on what all reward workers of a run together ask of the servers of one section.

Redis decides, in one script with the server's clock: places for requests in flight, held under leases so that
a worker that dies gives them back, and token buckets for requests and tokens per minute. Tokens are drawn by
estimate and corrected after the answer. Evaluation comes first: training leaves it a share of everything, and
gets nothing while evaluation waits.

One loop per worker calls the script, for all requests that wait at a time, so that a thousand waiting samples
cost no more calls than one.
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
"""Between two calls while something waits: another worker may have freed what it needs."""
SHORTEST_PAUSE_S = 0.02
RENEWALS_PER_LEASE = 3
EVALUATION_SHARE = 0.1
"""Of everything, which training leaves to evaluation."""


@dataclass(slots=True, eq=False)
class Permit:
    """Leave for one request. `used_tokens` corrects the estimate; without it the estimate stands."""

    id: str
    tokens: int
    used_tokens: int | None = None
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
        evaluation_share: float = EVALUATION_SHARE,
    ) -> None:
        self.servers, self.config = servers, config
        self._broker, self._lease_s, self._burst_s = broker, lease_s, burst_s
        self._evaluation_share = evaluation_share
        self._keys = [keys.limits(servers), keys.requests(servers)]
        self._prefix, self._number = secrets.token_hex(6), 0
        self._waiting: dict[Lane, deque[Permit]] = {Lane.EVAL: deque(), Lane.TRAIN: deque()}
        self._held: set[str] = set()
        self._ended: deque[Permit] = deque()
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
        self._waiting[lane].append(permit)
        self._wake()
        try:
            await permit.admitted
        except asyncio.CancelledError:
            if not permit.admitted.cancelled():  # admitted just as it was given up
                permit.used_tokens = 0
                self._end(permit)
            raise
        metrics.LIMITER_WAIT_SECONDS.labels(self.servers, lane).observe(time.monotonic() - started)
        try:
            yield permit
        finally:
            self._end(permit)

    async def close(self) -> None:
        """Give back what is held, so that nobody has to wait for leases to run out."""
        if self._loop is None:
            return
        self._loop.cancel()
        await asyncio.gather(self._loop, return_exceptions=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                while self._ended:
                    await self._call(Lane.TRAIN, [], [])

    def _end(self, permit: Permit) -> None:
        self._held.discard(permit.id)
        self._ended.append(permit)
        self._wake()

    def _wake(self) -> None:
        self._work.set()
        if self._loop is None:
            self._loop = asyncio.create_task(self._run(), name=f"limits of {self.servers}")
            self._loop.add_done_callback(self._pass_on_failure)

    async def _run(self) -> None:
        """End, renew and admit, whenever there is something to do."""
        renew_s = self._lease_s / RENEWALS_PER_LEASE
        renewed = time.monotonic()
        while True:
            self._work.clear()
            while self._ended:  # before anything is admitted: it may need what they free
                await self._call(Lane.TRAIN, [], [])
            pauses_s = [renew_s]
            for lane, waiting in self._waiting.items():
                if waiting:
                    pauses_s.append(await self._admit(lane))
            if time.monotonic() - renewed >= renew_s:
                held = sorted(self._held)
                for start in range(0, len(held), MAX_BATCH):
                    await self._call(Lane.TRAIN, held[start : start + MAX_BATCH], [])
                renewed = time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pauses_s)):
                    await self._work.wait()

    async def _admit(self, lane: Lane) -> float:
        """Admit what may pass; returns the seconds after which to try again."""
        waiting = self._waiting[lane]
        while waiting and waiting[0].admitted.cancelled():
            waiting.popleft()
        batch = [permit for permit in list(waiting)[:MAX_BATCH] if not permit.admitted.cancelled()]
        if not batch:
            return LONGEST_PAUSE_S
        num_admitted, wait_ms = await self._call(lane, [], batch)
        for permit in batch[:num_admitted]:
            waiting.remove(permit)
            self._held.add(permit.id)
            if permit.admitted.cancelled():  # during the call
                permit.used_tokens = 0
                self._end(permit)
            else:
                permit.admitted.set_result(None)
        if num_admitted == len(batch):
            return 0.0 if waiting else LONGEST_PAUSE_S
        hint_s = wait_ms / 1000 if wait_ms > 0 else LONGEST_PAUSE_S
        # Not in step with the other workers, or the same one would always come first.
        return min(max(hint_s, SHORTEST_PAUSE_S), LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)

    async def _call(self, lane: Lane, held: list[str], waiting: list[Permit]) -> tuple[int, int]:
        """One call of the script, with requests that have ended, those that are held, and those that wait.

        Returns how many of the last are admitted, and after how many ms to ask for the next.
        """
        ended = [self._ended.popleft() for _ in range(min(len(self._ended), MAX_BATCH))]
        limits, lease_ms = self.config, int(self._lease_s * 1000)
        arguments: list[object] = [lane.value, lease_ms, limits.concurrency, limits.requests_per_minute]
        arguments += [limits.tokens_per_minute, int(self._burst_s * 1000), self._evaluation_share]
        arguments += [len(ended), len(held)]
        for permit in ended:
            arguments += [permit.id, 0 if permit.used_tokens is None else permit.tokens - permit.used_tokens]
        arguments += held
        for permit in waiting:
            arguments += [permit.id, permit.tokens]
        num_admitted, wait_ms = await self._broker.script("limits", self._keys, arguments)
        return num_admitted, wait_ms

    def _pass_on_failure(self, loop: "asyncio.Task[None]") -> None:
        """An unexpected error is raised in those that wait: they must not wait for ever."""
        if loop.cancelled() or (error := loop.exception()) is None:
            return
        for waiting in self._waiting.values():
            while waiting:
                permit = waiting.popleft()
                if not permit.admitted.done():
                    permit.admitted.set_exception(error)
        self._loop = None
