"""The servers of one section of the config, as one worker asks them.

Guarantees: the least loaded replica that is healthy and does not rest gets the next request, within the
run's limits. One attempt asks at most `1 + MAX_FAILOVERS` replicas that fail it. A server that dies, or that
asks for a pause, costs no attempt: its requests go to another one, or wait for one, for at most `patience_s`.
Replicas join and leave while requests are under way. Health is active (GET /health; a server without
that path counts as healthy when it answers at all) and passive (what became of requests).
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import structlog

from tidemill.common.config.servers import ServersConfig
from tidemill.common.errors import MachineFaultError
from tidemill.common.process.heartbeats import Heartbeat
from tidemill.common.process.replicas import LANE_HEADER
from tidemill.common.process.shortage import fault_in, is_machine_fault
from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import Lane
from tidemill.services.reward.attempts import retried
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.remote.faults import (
    SHOWN_CHARS,
    FaultKind,
    RemoteFault,
    connection_fault,
    status_fault,
)
from tidemill.services.reward.remote.limiter import Limiter, Permit
from tidemill.services.reward.remote.tokens import key_for

log = structlog.get_logger(__name__)

T = TypeVar("T")
Send = Callable[["Replica", Permit], Awaitable[T]]
"""Sends one request to a replica and reads the answer; sets `Permit.used_tokens`. Raises RemoteFault."""

MAX_FAILOVERS = 2
"""Further replicas that one attempt asks, one after the other, when a replica fails it."""
HEALTH_INTERVAL_S = 1.0
HEALTH_TIMEOUT_S = 5.0
UNUSED = (FaultKind.CONNECTION, FaultKind.RATE_LIMITED, FaultKind.REFUSED_REQUEST)
"""Kinds of failed requests that were not computed: their tokens are given back."""
FAILURES_BEFORE_REST = 5
"""Failures in a row. A single one may be the request's fault; /health shows at once that a server died."""
FIRST_REST_S = 5.0
LONGEST_REST_S = 60.0

STATES = ("up", "down", "resting")


class Replica:
    """One server as this worker sees it: how loaded it is, and whether it may be asked now.

    A replica that fails several times in a row, or that asks for a pause, rests. After the rest one request
    tries it, and not all that wait for it; while that fails, rests become longer. `url` is what requests go
    to; `origin`, its part before the path, answers /health.
    """

    def __init__(
        self, url: str, is_registered: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.url = url
        self.is_registered = is_registered
        parts = urlsplit(url)
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.root = self.origin + parts.path.rstrip("/").removesuffix("/v1")
        """Base URL of paths such as /classify."""
        self.in_flight = 0
        self.last_used = 0
        self.is_healthy = True
        """The last result of /health; True before the first."""
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forget failures: it has answered, or another server has its address."""
        self._num_failures = 0
        self._rests_until = 0.0

    @property
    def rests_for_s(self) -> float:
        """Seconds until one request may try it; 0 if it does not rest."""
        return max(0.0, self._rests_until - self._clock())

    @property
    def state(self) -> str:
        if not self.is_healthy:
            return "down"
        # Its rest is not over, or one request tries it already.
        return "resting" if self._rests_until and (self.rests_for_s or self.in_flight) else "up"

    def succeed(self) -> None:
        """Record an answer. During a rest it says nothing: the request is from before."""
        if not self.rests_for_s:
            self.reset()

    def fail(self) -> bool:
        """Record a failure. Returns whether its first rest since the last answer begins."""
        if self.rests_for_s:  # one of those that were under way as it began to rest
            return False
        self._num_failures += 1
        further = self._num_failures - FAILURES_BEFORE_REST
        if further >= 0:
            self.pause(min(FIRST_REST_S * 2**further, LONGEST_REST_S))
        return further == 0

    def pause(self, pause_s: float) -> None:
        self._rests_until = max(self._rests_until, self._clock() + pause_s)


class Failover:
    """What became of one request so far: which replica it may go to next, and until when.

    Example, with `MAX_FAILOVERS` 2: replicas a and b give no answer (`tried` {a, b}), c does.
    """

    def __init__(self, servers: "Servers") -> None:
        self.tried: set[str] = set()
        """URLs of the replicas that were asked."""
        self.deadline: float | None = None
        """Until when it waits for a replica that comes back, once one was away."""
        self._servers = servers
        self._num_failovers = 0
        self._last: RemoteFault | None = None
        """The last answer of a replica that was away."""

    async def pause_after(self, failure: AttemptError) -> float:
        """Let the next attempt go to another replica, at once.

        Raises:
            AttemptError: there is no other one, or it cannot help.
        """
        if not isinstance(failure, RemoteFault):
            raise failure
        if failure.kind == FaultKind.NO_REPLICA:
            raise self._without_replica(failure)
        servers = self._servers
        has_another = any(
            replica.state == "up" and replica.url not in self.tried for replica in servers.replicas
        )
        is_away = failure.asks_for_pause
        if not is_away and failure.is_replicas:
            is_away = await servers.is_down(failure.replica_url)
        if is_away:
            self._wait_for(failure, has_another)
        else:
            may_help = failure.is_replicas or failure.kind == FaultKind.RATE_LIMITED
            if self._num_failovers == MAX_FAILOVERS or not may_help or not has_another:
                raise failure
            self._num_failovers += 1
        servers.num_failovers += 1
        metrics.REMOTE_FAILOVERS.labels(servers.name).inc()
        return 0.0

    def _wait_for(self, failure: RemoteFault, has_another: bool) -> None:
        """A replica that is away costs no attempt, but `patience_s` limits the wait."""
        patience_s = self._servers.config.patience_s
        if failure.asks_for_pause and not has_another and not patience_s:
            raise failure  # it says when to retry
        self._last = failure
        self.deadline = self.deadline or time.monotonic() + patience_s
        if not has_another:
            self.tried.clear()  # a server that comes back is as good as new

    def _without_replica(self, failure: RemoteFault) -> RemoteFault:
        """The failure of a request for which no replica came up, with the last answer, if there was one."""
        if self._last is None:
            return failure
        fault = RemoteFault(FaultKind.NO_REPLICA, f"{failure}; the last answer: {self._last}")
        fault.__cause__ = self._last
        return fault


class Servers:
    """Asks the replicas of one section."""

    def __init__(
        self,
        name: str,
        config: ServersConfig,
        http: httpx.AsyncClient,
        limiter: Limiter,
        registered: Callable[[], Awaitable[list[str]]] | None = None,
        health_interval_s: float = HEALTH_INTERVAL_S,
    ) -> None:
        self.name = name
        self.config = config
        self.limiter = limiter
        self.errors: Counter[str] = Counter()
        self.num_answered = 0
        self.num_failovers = 0
        self.num_tokens = 0
        self._http = http
        self._registered = registered
        self._health_interval_s = health_interval_s
        self._replicas = {url: Replica(url) for url in config.base_urls}
        self._order = itertools.count(1)
        self._changed = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None

    @property
    def replicas(self) -> list[Replica]:
        return list(self._replicas.values())

    def states(self) -> Counter[str]:
        return Counter(replica.state for replica in self.replicas)

    async def ask_json(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[dict[str, Any]], T],
        *,
        lane: Lane,
        tokens: int,
        timeout_s: float,
    ) -> T:
        """Send `body`, with the section's `model`, and return what `read` finds in the JSON answer.

        A path without a slash at the beginning belongs to the replica's API (/v1), another one to its root.

        Raises:
            RemoteFault: see `ask`; if `read` raises, its kind is `GARBAGE`.
        """
        named = {"model": self.config.model, **body} if self.config.model else body

        async def send(replica: Replica, permit: Permit) -> T:
            url = replica.root + path if path.startswith("/") else f"{replica.url}/{path}"
            answer = await self.request(replica, "POST", url, headers={LANE_HEADER: lane.value}, json=named)
            if answer.status_code != 200:
                raise status_fault(replica.origin, answer.status_code, answer.headers, answer.text)
            try:
                tree = answer.json()
                result = read(tree)
                used = usage_of(tree)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                text = " ".join(answer.text.split())[:SHOWN_CHARS]
                raise RemoteFault(
                    FaultKind.GARBAGE, f"{replica.origin}{path} gave no answer to use ({error}): {text}"
                ) from error
            self.count_tokens(permit, *used)
            return result

        return await self.ask(send, lane, tokens, timeout_s)

    async def request(
        self, replica: Replica, method: str, url: str, headers: Mapping[str, str], **content: Any
    ) -> httpx.Response:
        """The answer to one request, with the replica's key.

        Raises:
            RemoteFault: there is none.
            MachineFaultError: this machine is short of descriptors or memory: the replica is not to blame.
        """
        key = key_for(replica.url, replica.is_registered, self.config.api_key_env)
        authorization = {"authorization": f"Bearer {key}"} if key else {}
        try:
            return await self._http.request(method, url, headers=authorization | dict(headers), **content)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            fault = fault_in(error, f"no connection to {replica.origin}")
            raise fault or connection_fault(replica.origin, error) from error

    async def ask(self, send: Send[T], lane: Lane, tokens: int, timeout_s: float) -> T:
        """The answer of the first replica that gives one. `tokens` is an estimate; each has `timeout_s`.

        Raises:
            RemoteFault: none of those that were asked did, or asking another one cannot help.
        """
        failover = Failover(self)

        async def once() -> T:
            return await self._once(send, lane, tokens, timeout_s, failover.tried, failover.deadline)

        return await retried(once, failover.pause_after)

    def count(self, fault: RemoteFault) -> None:
        """Count a request that failed, or whose answer could not be used."""
        self.errors[fault.kind] += 1
        metrics.REMOTE_ERRORS.labels(self.name, fault.kind).inc()

    def count_tokens(self, permit: Permit, prompt: int, completion: int) -> None:
        permit.used_tokens = prompt + completion
        self.num_tokens += prompt + completion
        metrics.REMOTE_TOKENS.labels(self.name, "prompt").inc(prompt)
        metrics.REMOTE_TOKENS.labels(self.name, "completion").inc(completion)
        metrics.REMOTE_COST.labels(self.name).inc(self.config.prices.cost(prompt, completion))

    def report(self, beat: Heartbeat) -> None:
        states = self.states()
        beat.counts |= {
            f"{self.name}/answered": self.num_answered,
            f"{self.name}/errors": self.errors.total(),
            f"{self.name}/failovers": self.num_failovers,
            f"{self.name}/tokens": self.num_tokens,
            f"{self.name}/replicas": states.total(),
            f"{self.name}/replicas_up": states["up"],
            f"{self.name}/in_flight": sum(replica.in_flight for replica in self.replicas),
        }
        notes = [beat.detail] if beat.detail else []
        if states["up"] < max(1, states.total()):
            notes.append(f"{self.name}: {states['up']} of {states.total()} replicas up")
        if self.errors:
            kinds = ", ".join(f"{count} {kind}" for kind, count in self.errors.most_common(3))
            notes.append(f"{self.name} errors: {kinds}")
        beat.detail = "; ".join(notes)

    def start(self) -> None:
        """Start to watch the replicas, if that was not done; the first request calls it."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._look_for_ever(), name=f"servers {self.name}")

    async def close(self) -> None:
        """Stop watching, and give back what the limits hold for this worker."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await self.limiter.close()

    async def look(self) -> None:
        """Update the list of replicas and their health."""
        if self._registered is not None:
            self._take_over(await self._registered())
        await asyncio.gather(*(self._examine(replica) for replica in self.replicas))
        states = self.states()
        for state in STATES:
            metrics.REPLICAS.labels(self.name, state).set(states[state])
        self._wake()

    async def _once(
        self,
        send: Send[T],
        lane: Lane,
        tokens: int,
        timeout_s: float,
        tried: set[str],
        deadline: float | None,
    ) -> T:
        """One request to one replica that was not tried yet, if there is one."""
        try:
            # The permit first: a request that waits for it must not count as load of a replica.
            async with self.limiter.permit(lane, tokens) as permit, self.replica(tried, deadline) as replica:
                tried.add(replica.url)
                started = time.monotonic()
                try:
                    async with asyncio.timeout(timeout_s):
                        answer = await send(replica, permit)
                except TimeoutError:
                    raise RemoteFault(
                        FaultKind.TIMEOUT,
                        f"{replica.origin} gave no answer within {timeout_s:g} s (timeout_s)",
                    ) from None
                except RemoteFault as fault:
                    if fault.kind in UNUSED:
                        permit.used_tokens = 0
                    raise
                except MachineFaultError:
                    permit.used_tokens = 0  # nothing was sent
                    raise
        except RemoteFault as fault:
            self.count(fault)
            raise
        metrics.REMOTE_SECONDS.labels(self.name).observe(time.monotonic() - started)
        self.num_answered += 1
        return answer

    @contextlib.asynccontextmanager
    async def replica(
        self, avoid: Collection[str] = (), deadline: float | None = None
    ) -> AsyncIterator[Replica]:
        """A replica for one request, outside `avoid` if possible; the end of the block records how it did.

        Raises:
            RemoteFault: none came up within `patience_s`, or before the deadline.
        """
        replica = await self._choose(avoid, deadline or time.monotonic() + self.config.patience_s)
        # Nothing is awaited since the choice, so the next request already sees it as load.
        replica.in_flight += 1
        in_flight = metrics.REPLICA_IN_FLIGHT.labels(self.name, replica.origin)
        in_flight.set(replica.in_flight)
        try:
            yield replica
        except RemoteFault as fault:
            fault.replica_url = replica.url
            if fault.is_replicas and replica.fail():
                log.warning(
                    "a replica fails and rests", servers=self.name, replica=replica.origin, error=str(fault)
                )
            if fault.asks_for_pause:
                replica.pause(fault.retry_after_s)
            elif not fault.is_replicas:
                replica.succeed()  # it answered; a useless answer does not count against it
            raise
        else:
            replica.succeed()
        finally:
            replica.in_flight -= 1
            in_flight.set(replica.in_flight)
            self._wake()

    async def _choose(self, avoid: Collection[str], deadline: float) -> Replica:
        """The least loaded usable replica, then the least recently used; prefers those outside `avoid`."""
        self.start()
        assert self._watch is not None
        while True:
            if self._watch.done() and not self._watch.cancelled():
                self._watch.result()  # an unexpected error of the watch is raised in its users
            usable = [replica for replica in self.replicas if replica.state == "up"]
            others = [replica for replica in usable if replica.url not in avoid]
            chosen = min(
                others or usable,
                key=lambda replica: (replica.in_flight, replica.last_used),
                default=None,
            )
            if chosen is not None:
                chosen.last_used = next(self._order)
                return chosen
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                states = ", ".join(f"{replica.origin} is {replica.state}" for replica in self.replicas)
                raise RemoteFault(
                    FaultKind.NO_REPLICA,
                    f"no replica of servers.{self.name} could be used within {self.config.patience_s:g} s "
                    f"(patience_s): {states or 'none is configured or registered'}",
                )
            # Read once: a rest that ends meanwhile must not become a timeout of 0.
            all_rests_s = [replica.rests_for_s for replica in self.replicas]
            rests_s = [rest_s for rest_s in all_rests_s if rest_s > 0]
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, *rests_s, self._health_interval_s)):
                    await self._changed.wait()

    async def is_down(self, url: str) -> bool:
        """Check the /health of a replica that just failed a request. Returns whether it is down."""
        replica = self._replicas.get(url)
        if replica is not None and replica.is_healthy:
            await self._examine(replica)
        return replica is None or not replica.is_healthy

    def _wake(self) -> None:
        """Wake waiting requests; later ones wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _take_over(self, registered: Collection[str]) -> None:
        """Keep the registered replicas and those of the config, and no others."""
        wanted = dict.fromkeys((*self.config.base_urls, *registered))
        for url in wanted.keys() - self._replicas.keys():
            log.info("a replica joined", servers=self.name, replica=url)
            self._replicas[url] = Replica(url, is_registered=True)
        for url in self._replicas.keys() - wanted.keys():
            log.info("a replica left", servers=self.name, replica=url)
            metrics.REPLICA_IN_FLIGHT.remove(self.name, self._replicas.pop(url).origin)

    async def _examine(self, replica: Replica) -> None:
        was_healthy = replica.is_healthy
        try:
            answer = await self._http.get(f"{replica.origin}/health", timeout=HEALTH_TIMEOUT_S)
            replica.is_healthy = answer.status_code < 500
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            # Short of descriptors, this machine can ask no replica: that says nothing of this one.
            if is_machine_fault(error):
                return
            replica.is_healthy = False
        if was_healthy != replica.is_healthy:
            if replica.is_healthy:
                replica.reset()  # the failures were those of the server that is gone
            state = "up" if replica.is_healthy else "down"
            log.info(f"a replica is {state}", servers=self.name, replica=replica.origin)

    async def _look_for_ever(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(self._health_interval_s)


def usage_of(tree: dict[str, Any]) -> tuple[int, int]:
    """Tokens of prompt and answer, 0 where it has none. Raises ValueError, TypeError: no numbers."""
    usage = tree.get("usage") or {}
    # Counters take nothing below 0, and the answer beside it may be right.
    prompt = max(0, int(usage.get("prompt_tokens") or 0))
    completion = max(0, int(usage.get("completion_tokens") or 0))
    return prompt, completion
