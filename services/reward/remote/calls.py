"""One attempt at one sample over the network: limits, a replica, the request, another replica if it fails.

A judge and a reward model differ in what they send and read; everything between stands here. An attempt asks
each replica at most once, and never waits for one that fails; pauses and further attempts are the policy of
the reward (`named.py`). A server that dies, or that asks for a pause, costs no attempt: what it had is asked
of another one, or waits for one, `routing.patience_s` in all.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import httpx

from tidemill.common.config.reward_kinds import HedgeConfig, PricesConfig
from tidemill.common.process.heartbeats import Heartbeat
from tidemill.common.run.replicas import key_for
from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import Lane
from tidemill.services.reward.remote.faults import FaultKind, RemoteFault, connection_fault, status_fault
from tidemill.services.reward.remote.limiter import Limiter, Permit
from tidemill.services.reward.remote.router import Replica, Router

T = TypeVar("T")

WINDOW = 256
MIN_OBSERVED = 20
"""Answers to have seen before a quantile of their times says anything."""


class HedgeDelay:
    """After how many seconds a request is slow."""

    def __init__(self, config: HedgeConfig) -> None:
        self._config = config
        self._times_s: deque[float] = deque(maxlen=WINDOW)

    def observe(self, time_s: float) -> None:
        """A request was answered."""
        self._times_s.append(time_s)

    @property
    def delay_s(self) -> float | None:
        """None where too little is known yet."""
        if self._config.after_s is not None:
            return self._config.after_s
        if len(self._times_s) < MIN_OBSERVED:
            return None
        assert self._config.quantile is not None  # one of both is given
        ordered = sorted(self._times_s)
        return ordered[min(int(self._config.quantile * len(ordered)), len(ordered) - 1)]


async def hedged(
    first: Coroutine[Any, Any, T],
    second: Callable[[], Coroutine[Any, Any, T] | None],
    sent: asyncio.Event,
    delay_s: float,
) -> tuple[T, str]:
    """The answer of whichever request succeeds first, and its name: `first`, `second`, or `` without a race.

    The clock starts when `sent` is set. `second` may decline with None. When one of both fails, the other
    is waited for; when both do, the first one's error is raised.
    """
    tasks: dict[asyncio.Task[T], str] = {asyncio.create_task(first): "first"}
    (leader,) = tasks
    timer = asyncio.create_task(_after(sent, delay_s))
    try:
        await asyncio.wait({leader, timer}, return_when=asyncio.FIRST_COMPLETED)
        if leader.done() or (coroutine := second()) is None:
            return await leader, ""
        tasks[asyncio.create_task(coroutine)] = "second"
        pending = set(tasks)
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: tasks[task]):
                if not task.cancelled() and task.exception() is None:
                    return task.result(), tasks[task]
        return leader.result(), "first"
    finally:
        timer.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, timer, return_exceptions=True)


async def _after(sent: asyncio.Event, delay_s: float) -> None:
    await sent.wait()
    await asyncio.sleep(delay_s)


Send = Callable[[Replica, Permit], Awaitable[T]]
"""Sends one request to a replica and reads the answer. It raises `RemoteFault`, and says in the permit what
the request has used."""

UNUSED = (FaultKind.CONNECTION, FaultKind.RATE_LIMITED, FaultKind.REFUSED_REQUEST)
"""Requests that failed like this were not computed: their tokens are given back."""


class RemoteCalls:
    """Requests of one reward."""

    def __init__(
        self,
        name: str,
        router: Router,
        limiter: Limiter,
        timeout_s: float,
        hedge: HedgeConfig | None = None,
        api_key_env: str = "",
        prices: PricesConfig | None = None,
    ) -> None:
        self.name, self.router, self.limiter, self.timeout_s = name, router, limiter, timeout_s
        self.api_key_env = api_key_env
        """Name of the environment variable with the servers' key."""
        self.errors: Counter[str] = Counter()
        self.num_answered = self.num_failovers = self.num_hedges = self.num_tokens = 0
        self._prices = prices or PricesConfig()
        self._hedge = HedgeDelay(hedge) if hedge else None

    async def ask(self, send: Send[T], lane: Lane, tokens: int) -> T:
        """The answer of the first replica that gives one.

        Raises:
            RemoteFault: none of those that were asked did, or asking another one cannot help.
        """
        tried: set[str] = set()
        num_failovers, waits_until, waits_for = 0, 0.0, None
        while True:
            try:
                return await self._try(send, lane, tokens, tried)
            except RemoteFault as fault:
                if fault.fault is FaultKind.NO_REPLICA and waits_for is not None:
                    raise RemoteFault(fault.fault, f"{fault}; the last answer: {waits_for}") from waits_for
                is_down = fault.is_replicas and await self.router.is_down(fault.replica_url)
                if is_down or fault.asks_for_pause:
                    waits_for = fault
                    waits_until = waits_until or time.monotonic() + self.router.config.patience_s
                    if not self.router.has_another(tried):
                        if time.monotonic() >= waits_until:
                            raise self._out_of_patience(fault) from fault
                        tried.clear()  # who comes back is as good as new
                else:
                    is_last = num_failovers == self.router.config.max_failovers
                    if is_last or not fault.may_fail_over or not self.router.has_another(tried):
                        raise
                    num_failovers += 1
                self.num_failovers += 1
                metrics.REMOTE_FAILOVERS.labels(self.name).inc()

    def _out_of_patience(self, fault: RemoteFault) -> RemoteFault:
        """The servers keep dying, or asking for pauses: the sample is not the only one to suffer."""
        if fault.asks_for_pause and not self.router.config.patience_s:
            return fault  # who waits for nothing is told when to come back
        return RemoteFault(
            FaultKind.NO_REPLICA,
            f"the servers of {self.name} kept dying, or asking for pauses, for "
            f"{self.router.config.patience_s:g} s (routing.patience_s); the last answer: {fault}",
        )

    def count(self, fault: RemoteFault) -> None:
        """A request, or what was read from its answer, was of no use."""
        self.errors[fault.kind] += 1
        metrics.REMOTE_ERRORS.labels(self.name, fault.kind).inc()

    def count_tokens(self, prompt: int, completion: int) -> None:
        """What an answer has cost."""
        self.num_tokens += prompt + completion
        metrics.REMOTE_TOKENS.labels(self.name, "prompt").inc(prompt)
        metrics.REMOTE_TOKENS.labels(self.name, "completion").inc(completion)
        metrics.REMOTE_COST.labels(self.name).inc(self._prices.cost(prompt, completion))

    def report(self, beat: Heartbeat) -> None:
        """Fill in this reward's part of the worker's heartbeat."""
        states = self.router.states()
        beat.counts |= {
            f"{self.name}/answered": self.num_answered,
            f"{self.name}/errors": self.errors.total(),
            f"{self.name}/failovers": self.num_failovers,
            f"{self.name}/hedges": self.num_hedges,
            f"{self.name}/tokens": self.num_tokens,
            f"{self.name}/replicas": states.total(),
            f"{self.name}/replicas_up": states["up"],
            f"{self.name}/in_flight": sum(replica.in_flight for replica in self.router.replicas),
        }
        notes = [beat.detail] if beat.detail else []
        if states["up"] < max(1, states.total()):
            notes.append(f"{self.name}: {states['up']} of {states.total()} replicas up")
        if self.errors:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.errors.most_common(3))
            notes.append(f"{self.name} errors: {kinds}")
        beat.detail = "; ".join(notes)

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
            self.count(fault)
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


async def post(
    http: httpx.AsyncClient, replica: Replica, url: str, body: dict[str, Any], api_key_env: str
) -> httpx.Response:
    """The answer to one request of JSON, with the replica's key.

    Raises RemoteFault: there is none, or its status is not 200.
    """
    key = key_for(replica.url, replica.is_registered, api_key_env)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = await http.post(url, json=body, headers=headers)
    except httpx.HTTPError as error:
        raise connection_fault(replica.origin, error) from error
    if answer.status_code != 200:
        raise status_fault(replica.origin, answer.status_code, answer.headers, answer.text)
    return answer
