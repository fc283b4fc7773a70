"""Spreads requests over replicas: the least loaded one that is healthy gets the next.

Guarantees: a replica that is down, whose breaker is open, or that asked for a pause gets nothing; replicas
join and leave while requests are under way; when none can be used, requests wait for `patience_s` at most.
Health is active (GET /health; a server without that path counts as healthy when it answers at all) and
passive (what became of requests).
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from urllib.parse import urlsplit

import httpx
import structlog

from tidemill.common.config.reward_kinds import RoutingConfig
from tidemill.common.run.replicas import ReplicaRegistry
from tidemill.common.telemetry import metrics
from tidemill.services.reward.remote.faults import FaultKind, RemoteFault

LONGEST_COOLDOWN_S = 60.0


class Breaker:
    """Closed while all is well. `is_closed`, `opens_at` and the trial after the cooldown are its state."""

    def __init__(
        self, max_failures: int, cooldown_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_failures, self._first_cooldown_s, self._clock = max_failures, cooldown_s, clock
        self._cooldown_s = cooldown_s
        self._failures = 0
        self._open_until: float | None = None
        self._is_trying = False
        self.is_paused = False
        """Whether it is open because the replica asked for a pause, and not for a failure."""

    @property
    def is_closed(self) -> bool:
        """Whether requests pass as usual."""
        return self._open_until is None

    @property
    def opens_in_s(self) -> float:
        """Seconds until a request is allowed again; 0 where one is now."""
        if self._open_until is None:
            return 0.0
        left_s = self._open_until - self._clock()
        return self._cooldown_s if self._is_trying and left_s <= 0 else max(0.0, left_s)

    @property
    def allows(self) -> bool:
        """Whether one more request may be sent: always while closed, one at a time after a cooldown."""
        return self.opens_in_s == 0.0

    def begin(self) -> None:
        """A request is sent."""
        self._is_trying = not self.is_closed

    def succeeded(self) -> None:
        """It was answered: everything is well again. Of a request from before a pause that says nothing."""
        if self._is_trying or not self.is_paused:
            self.reset()

    def failed(self) -> None:
        """It failed; enough in a row, or a failed trial, open the breaker."""
        self._failures += 1
        if self._is_trying:
            self._cooldown_s = min(2 * self._cooldown_s, LONGEST_COOLDOWN_S)
        if self._is_trying or (self.is_closed and self._failures >= self._max_failures):
            self._open_until, self.is_paused = self._clock() + self._cooldown_s, False
        self._is_trying = False

    def pause(self, pause_s: float) -> None:
        """The replica asked for a pause. After it one request tries, and not all that wait for it."""
        self._open_until = max(self._open_until or 0.0, self._clock() + pause_s)
        self._is_trying, self.is_paused = False, True

    def reset(self) -> None:
        """Forget everything: what failed is gone, and something new stands in its place."""
        self._failures, self._open_until, self._is_trying, self.is_paused = 0, None, False, False
        self._cooldown_s = self._first_cooldown_s

    def abandoned(self) -> None:
        """The request ended without an answer that says anything: it was cancelled."""
        self._is_trying = False


class Replica:
    """`url` is what requests go to; `origin`, its part before the path, answers /health."""

    def __init__(
        self,
        url: str,
        config: RoutingConfig,
        clock: Callable[[], float] = time.monotonic,
        is_registered: bool = False,
    ) -> None:
        self.url = url
        self.is_registered = is_registered
        """Whether it is a server of the run, which has its token, and not an address of the config's."""
        parts = urlsplit(url)
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.root = self.origin + parts.path.rstrip("/").removesuffix("/v1")
        """What a path such as /v1/chat/completions or /classify is appended to."""
        self.breaker = Breaker(config.breaker_failures, config.breaker_cooldown_s, clock)
        self.in_flight = 0
        self.is_healthy = True
        """What /health last said; the first request may come before the first look."""
        self.has_left = False
        self.last_used = 0

    @property
    def is_usable(self) -> bool:
        """Whether it may be sent a request now."""
        return self.is_healthy and not self.has_left and self.breaker.allows

    @property
    def usable_in_s(self) -> float:
        """Seconds until it may be, as far as it depends on time; 0 where it does not."""
        return self.breaker.opens_in_s

    @property
    def state(self) -> str:
        """One word for metrics: `up`, `down`, `open` (its breaker keeps requests away) or `paused`."""
        if not self.is_healthy:
            return "down"
        if not self.breaker.allows:
            return "paused" if self.breaker.is_paused else "open"
        return "up"

    @property
    def rank(self) -> tuple[int, int]:
        """Order of choice: the least loaded, then who waited longest.

        That it failed lately is no part of it: the breaker keeps requests away from who fails in a row, and
        only a request can show that all is well again.
        """
        return self.in_flight, self.last_used


log = structlog.get_logger(__name__)

STATES = ("up", "down", "open", "paused")


class Router:
    """The replicas of one reward, as one worker sees them. An async context, or `start` and `close`."""

    def __init__(
        self,
        name: str,
        urls: Sequence[str],
        config: RoutingConfig,
        http: httpx.AsyncClient,
        registry: ReplicaRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.config = name, config
        self._static, self._http, self._registry, self._clock = tuple(urls), http, registry, clock
        self._replicas = {url: Replica(url, config, clock) for url in urls}
        self._turns = itertools.count(1)
        self._changed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._looks: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> "Router":
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to watch the replicas; called by the first request where nobody does before."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._look_for_ever(), name=f"router {self.name}")

    async def close(self) -> None:
        """Stop watching."""
        tasks = [*self._looks.values(), *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def replicas(self) -> list[Replica]:
        """All known replicas."""
        return list(self._replicas.values())

    def has_another(self, avoid: Collection[str]) -> bool:
        """Whether a replica outside `avoid` can be used now."""
        return any(replica.is_usable and replica.url not in avoid for replica in self.replicas)

    async def is_down(self, url: str) -> bool:
        """Whether the replica that just failed a request is dead, by a look at its /health now.

        A server that dies takes all its requests with it at once: those that ask here share one look.
        """
        replica = self._replicas.get(url)
        if replica is None or not replica.is_healthy:
            return True
        look = self._looks.get(url)
        if look is None:
            look = self._looks[url] = asyncio.create_task(self._examine(replica))
            look.add_done_callback(lambda _: self._looks.pop(url, None))
        await asyncio.shield(look)
        return not replica.is_healthy

    @contextlib.asynccontextmanager
    async def lease(self, avoid: Collection[str] = ()) -> AsyncIterator[Replica]:
        """The replica for one request, outside `avoid` if there is any; its end says how the replica did.

        Raises:
            RemoteFault: no replica came up within `patience_s`.
        """
        replica = await self._choose(avoid)
        self._count(replica, +1)
        replica.breaker.begin()
        try:
            yield replica
        except RemoteFault as fault:
            fault.replica_url = replica.url
            self._blame(replica, fault)
            raise
        except BaseException:
            replica.breaker.abandoned()
            raise
        else:
            replica.breaker.succeeded()
        finally:
            self._count(replica, -1)
            self._wake()

    def states(self) -> Counter[str]:
        """How many replicas are in which state."""
        return Counter(replica.state for replica in self.replicas)

    async def look(self) -> None:
        """Learn which replicas there are, and how they are."""
        if self._registry is not None:
            self._adopt(await self._registry.urls())
        await asyncio.gather(*(self._examine(replica) for replica in self.replicas))
        states = self.states()
        for state in STATES:
            metrics.REPLICAS.labels(self.name, state).set(states[state])
        self._wake()

    async def _choose(self, avoid: Collection[str]) -> Replica:
        self.start()
        deadline = self._clock() + self.config.patience_s
        while True:
            self._raise_failure()
            usable = [replica for replica in self.replicas if replica.is_usable]
            others = [replica for replica in usable if replica.url not in avoid]
            if chosen := min(others or usable, key=lambda replica: replica.rank, default=None):
                chosen.last_used = next(self._turns)
                return chosen
            left_s = deadline - self._clock()
            if left_s <= 0:
                raise RemoteFault(FaultKind.NO_REPLICA, self._why_none())
            await self._until_changed(left_s)

    async def _until_changed(self, limit_s: float) -> None:
        """Wait until something may have become usable."""
        changed = self._changed
        times_s = [replica.usable_in_s for replica in self.replicas if replica.usable_in_s > 0]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(limit_s, *times_s, self.config.health_interval_s)):
                await changed.wait()

    def _wake(self) -> None:
        """Let everybody look again who waits; later waiters wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _count(self, replica: Replica, change: int) -> None:
        replica.in_flight += change
        metrics.REPLICA_IN_FLIGHT.labels(self.name, replica.origin).set(replica.in_flight)

    def _blame(self, replica: Replica, fault: RemoteFault) -> None:
        if fault.is_replicas:
            was_closed = replica.breaker.is_closed
            replica.breaker.failed()
            if was_closed and not replica.breaker.is_closed:
                log.warning(
                    "a replica fails and is left alone for a while",
                    reward=self.name,
                    replica=replica.origin,
                    error=str(fault),
                )
        elif not fault.asks_for_pause:
            replica.breaker.succeeded()  # it answered; that the answer is of no use is not its health
        if fault.asks_for_pause:
            replica.breaker.pause(fault.retry_after_s)

    def _adopt(self, registered: Sequence[str]) -> None:
        wanted = dict.fromkeys((*self._static, *registered))
        for url in wanted:
            if url not in self._replicas:
                log.info("a replica joined", reward=self.name, replica=url)
                self._replicas[url] = Replica(url, self.config, self._clock, is_registered=True)
        for url in set(self._replicas) - set(wanted):
            log.info("a replica left", reward=self.name, replica=url)
            gone = self._replicas.pop(url)
            gone.has_left = True
            metrics.REPLICA_IN_FLIGHT.remove(self.name, gone.origin)

    async def _examine(self, replica: Replica) -> None:
        was_healthy = replica.is_healthy
        try:
            answer = await self._http.get(f"{replica.origin}/health", timeout=self.config.health_timeout_s)
            replica.is_healthy = answer.status_code < 500
        except (httpx.HTTPError, httpx.InvalidURL):
            replica.is_healthy = False
        if was_healthy != replica.is_healthy:
            if replica.is_healthy:
                replica.breaker.reset()  # what failed was the server that is gone
            log.info(
                "a replica is " + ("up" if replica.is_healthy else "down"),
                reward=self.name,
                replica=replica.origin,
            )

    async def _look_for_ever(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self.config.health_interval_s)

    def _raise_failure(self) -> None:
        """The watch never ends by itself; an error nobody expected is for those that depend on it."""
        if self._watch is not None and self._watch.done() and not self._watch.cancelled():
            self._watch.result()

    def _why_none(self) -> str:
        known = ", ".join(f"{replica.origin} is {replica.state}" for replica in self.replicas)
        return (
            f"no replica of {self.name} could be used within {self.config.patience_s:g} s "
            f"(routing.patience_s): {known or 'none is configured or registered'}"
        )
