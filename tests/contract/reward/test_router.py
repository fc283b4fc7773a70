"""The router and one attempt over the network, against real HTTP servers that misbehave, and a real Redis."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.support.misbehaving import MisbehavingServer, answers, hangs, says
from tests.support.waiting import wait_until
from tidemill.common.config.reward_kinds import HedgeConfig, LimitsConfig, RoutingConfig
from tidemill.common.redis.broker import Broker
from tidemill.common.run.replicas import ReplicaRegistry
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Lane
from tidemill.services.reward.remote.calls import RemoteCalls
from tidemill.services.reward.remote.faults import FaultKind, RemoteFault, status_fault
from tidemill.services.reward.remote.limiter import Limiter, Permit
from tidemill.services.reward.remote.router import Replica, Router

FAST: dict[str, Any] = {"health_interval_s": 0.05, "breaker_cooldown_s": 0.05, "patience_s": 20.0}


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(), verify=False) as client:
        yield client


@contextlib.asynccontextmanager
async def servers(count: int) -> AsyncIterator[list[MisbehavingServer]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(MisbehavingServer()) for _ in range(count)]


def make_router(http: httpx.AsyncClient, *found: MisbehavingServer, **config: Any) -> Router:
    return Router("judge", [server.url for server in found], RoutingConfig(**(FAST | config)), http)


async def test_the_least_loaded_replica_gets_the_next_request(http: httpx.AsyncClient) -> None:
    async with servers(3) as found, make_router(http, *found) as router, contextlib.AsyncExitStack() as held:
        leased = [await held.enter_async_context(router.lease()) for _ in range(9)]
        assert set(Counter(replica.url for replica in leased).values()) == {3}
        leased[4].in_flight -= 1  # as if one of its requests had ended
        assert (await held.enter_async_context(router.lease())).url == leased[4].url


async def test_a_replica_to_avoid_is_asked_only_when_there_is_no_other(http: httpx.AsyncClient) -> None:
    async with servers(2) as (first, second), make_router(http, first, second) as router:
        assert [await _leased(router, {first.url}) for _ in range(4)] == [second.url] * 4
        assert await _leased(router, {first.url, second.url}) in (first.url, second.url)


@pytest.mark.parametrize(
    "written", [b"\xff", b"http://[", b"http://a:b/", b"http://a:0/", b"x", b"file:///etc", b""]
)
async def test_what_is_no_address_is_no_replica(
    http: httpx.AsyncClient, broker: Broker, keys: Keys, written: bytes
) -> None:
    """One password of a reward worker must not end the judge of all others."""
    registry = ReplicaRegistry(broker, keys, "judge", 30.0)
    now_s = await broker.server_time_s()
    await broker.execute("ZADD", keys.replicas("judge"), now_s, written)
    async with servers(1) as (well,):
        router = Router("judge", [well.url], RoutingConfig(**FAST), http, registry)
        async with router:
            await router.look()
            assert [replica.url for replica in router.replicas] == [well.url]


async def test_a_replica_that_is_down_gets_nothing_until_it_is_up_again(http: httpx.AsyncClient) -> None:
    async with servers(2) as (sick, well), make_router(http, sick, well) as router:
        sick.health = 503
        await wait_until(lambda: router.states()["down"] == 1)
        assert {await _leased(router) for _ in range(4)} == {well.url}
        sick.health = 200
        await wait_until(lambda: router.states()["up"] == 2)
        assert {await _leased(router) for _ in range(4)} == {sick.url, well.url}


async def test_a_server_without_a_health_page_counts_as_healthy(http: httpx.AsyncClient) -> None:
    async with servers(1) as (hosted,), make_router(http, hosted) as router:
        hosted.health = 404
        await router.look()
        assert router.states()["up"] == 1


async def test_failures_in_a_row_open_the_breaker_and_a_trial_closes_it(http: httpx.AsyncClient) -> None:
    async with servers(2) as (broken, well):
        router = make_router(http, broken, well, breaker_failures=2, breaker_cooldown_s=0.2)
        async with router:
            for _ in range(2):
                with pytest.raises(RemoteFault):
                    async with router.lease(avoid={well.url}):
                        raise RemoteFault(FaultKind.SERVER_ERROR, "500")
            assert router.states()["open"] == 1
            assert {await _leased(router) for _ in range(4)} == {well.url}
            sought = asyncio.create_task(_leased(router, avoid={well.url}))
            assert await sought == well.url  # nothing else can be used
            await wait_until(lambda: router.has_another({well.url}))
            assert await _leased(router, avoid={well.url}) == broken.url
            assert router.states()["up"] == 2


async def test_a_replica_that_asks_for_a_pause_gets_one(http: httpx.AsyncClient) -> None:
    async with servers(2) as (busy, idle), make_router(http, busy, idle) as router:
        with pytest.raises(RemoteFault):
            async with router.lease(avoid={idle.url}):
                raise RemoteFault(FaultKind.RATE_LIMITED, "429", retry_after_s=30.0)
        assert router.states()["paused"] == 1
        assert {await _leased(router) for _ in range(4)} == {idle.url}


async def test_requests_wait_for_a_replica_and_give_up_when_patience_ends(http: httpx.AsyncClient) -> None:
    async with make_router(http, patience_s=0.05) as router:
        with pytest.raises(RemoteFault, match="none is configured or registered") as caught:
            await _leased(router)
        assert caught.value.is_final and caught.value.kind == "no_replica"


async def test_replicas_join_and_leave_through_redis_while_requests_go_on(
    http: httpx.AsyncClient, broker: Broker, keys: Keys
) -> None:
    registry = ReplicaRegistry(broker, keys, "judge", ttl_s=10.0)
    router = Router("judge", [], RoutingConfig(**FAST), http, registry)
    async with servers(2) as (first, second), router:
        waiting = asyncio.create_task(_leased(router))
        await registry.announce(first.url)
        assert await waiting == first.url
        await registry.announce(second.url)
        await wait_until(lambda: len(router.replicas) == 2)
        await registry.withdraw(first.url)
        await wait_until(lambda: len(router.replicas) == 1)
        assert await _leased(router) == second.url


async def test_a_replica_that_falls_silent_is_forgotten(broker: Broker, keys: Keys) -> None:
    registry = ReplicaRegistry(broker, keys, "judge", ttl_s=0.5)
    await registry.announce("http://127.0.0.1:1/v1")
    assert await registry.urls() == ["http://127.0.0.1:1/v1"]
    await wait_until(lambda: _is_empty(registry))
    await registry.announce("http://127.0.0.1:2/v1")
    assert await broker.execute("ZCARD", keys.replicas("judge")) == 1


class Stage:
    """`RemoteCalls` over servers, sending plain posts."""

    def __init__(self, http: httpx.AsyncClient, broker: Broker, keys: Keys) -> None:
        self.http, self.broker, self.keys = http, broker, keys

    @contextlib.asynccontextmanager
    async def calls(
        self,
        *found: MisbehavingServer,
        timeout_s: float = 20.0,
        hedge: HedgeConfig | None = None,
        patience_s: float = 20.0,
        **limits: Any,
    ) -> AsyncIterator[RemoteCalls]:
        limiter = Limiter(self.broker, self.keys, "judge", LimitsConfig(**limits))
        router = make_router(self.http, *found, patience_s=patience_s)
        calls = RemoteCalls("judge", router, limiter, timeout_s, hedge)
        try:
            yield calls
        finally:
            await calls.close()

    async def send(self, replica: Replica, permit: Permit) -> str:
        try:
            answer = await self.http.post(f"{replica.url}/chat/completions", json={})
        except httpx.HTTPError as error:
            raise RemoteFault(FaultKind.CONNECTION, str(error)) from error
        if answer.status_code != 200:
            raise status_fault(replica.origin, answer.status_code, answer.headers, answer.text)
        return replica.url


@pytest.fixture
def stage(http: httpx.AsyncClient, broker: Broker, keys: Keys) -> Stage:
    return Stage(http, broker, keys)


@pytest.mark.parametrize("fault", [says(500), hangs])
async def test_a_failed_request_goes_to_another_replica_at_once(stage: Stage, fault: Any) -> None:
    async with servers(2) as (broken, well):
        broken.default = fault
        async with stage.calls(broken, well, timeout_s=2.0) as calls:
            urls = [await calls.ask(stage.send, Lane.TRAIN, 0) for _ in range(3)]
        assert urls == [well.url] * 3
        assert calls.num_failovers >= 1 and calls.errors.total() == calls.num_failovers


async def test_a_replica_that_dies_in_the_middle_costs_no_request(stage: Stage) -> None:
    async with servers(2) as (victim, well), stage.calls(victim, well) as calls:
        victim.default = well.default = answers(delay_s=0.02)
        asking = [asyncio.create_task(calls.ask(stage.send, Lane.TRAIN, 0)) for _ in range(100)]
        await wait_until(lambda: len(victim.requests) > 5)
        await victim.stop()
        assert len(await asyncio.gather(*asking)) == 100
        assert calls.num_failovers > 0


async def test_a_lone_replica_that_fails_fails_the_attempt_at_once(stage: Stage) -> None:
    async with servers(1) as (broken,), stage.calls(broken) as calls:
        broken.default = says(500)
        with pytest.raises(RemoteFault, match="status 500"):
            await calls.ask(stage.send, Lane.TRAIN, 0)
        assert len(broken.requests) == 1  # whoever waits and tries again is the reward's policy


async def test_one_failed_request_diverts_nothing_but_itself(stage: Stage) -> None:
    async with servers(2) as (stumbles, well), stage.calls(stumbles, well) as calls:
        stumbles.script.append(says(500))
        stumbles.default = well.default = answers(delay_s=0.02)
        while not calls.errors:
            await calls.ask(stage.send, Lane.TRAIN, 0)
        urls = await asyncio.gather(*(calls.ask(stage.send, Lane.TRAIN, 0) for _ in range(500)))
        assert min(Counter(urls)[server.url] for server in (stumbles, well)) > 200


async def test_a_server_that_was_killed_and_came_back_gets_requests_again(stage: Stage) -> None:
    async with servers(2) as (victim, well), stage.calls(victim, well) as calls:
        victim.default = well.default = answers(delay_s=0.01)
        asking = [asyncio.create_task(calls.ask(stage.send, Lane.TRAIN, 0)) for _ in range(100)]
        await wait_until(lambda: len(victim.requests) > 5)
        await victim.stop()
        await asyncio.gather(*asking)
        await wait_until(lambda: calls.router.states()["down"] == 1)
        await victim.start()
        await wait_until(lambda: calls.router.states()["up"] == 2)
        urls = await asyncio.gather(*(calls.ask(stage.send, Lane.TRAIN, 0) for _ in range(320)))
        assert Counter(urls)[victim.url] > 100


async def test_health_that_comes_back_ends_the_pause_of_a_breaker(http: httpx.AsyncClient) -> None:
    async with servers(1) as (sick,):
        router = make_router(http, sick, breaker_failures=1, breaker_cooldown_s=3600.0)
        async with router:
            with pytest.raises(RemoteFault):
                async with router.lease():
                    raise RemoteFault(FaultKind.CONNECTION, "cut")
            assert router.states()["open"] == 1
            await sick.stop()
            await wait_until(lambda: router.states()["down"] == 1)
            await sick.start()
            assert await _leased(router) == sick.url


@pytest.mark.parametrize("end", ["refuses", "cuts", "says 500"])
async def test_a_dead_server_costs_no_attempt_the_samples_wait_for_one(stage: Stage, end: str) -> None:
    """Whether it dies before, in the middle, or with a last word; the limit is routing.patience_s."""
    async with servers(1) as (lone,), stage.calls(lone) as calls:

        async def dies(server: MisbehavingServer, writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
            server.health = 503
            if end == "says 500":
                await says(500)(server, writer, _)

        if end == "refuses":
            await lone.stop()
        else:
            lone.script.extend([dies] * 8)
        asking = [asyncio.create_task(calls.ask(stage.send, Lane.TRAIN, 0)) for _ in range(8)]
        await wait_until(lambda: calls.errors.total() == 8)
        await wait_until(lambda: calls.router.states()["down"] == 1 and not calls.router._looks)
        assert not any(task.done() for task in asking)
        lone.health = 200
        if end == "refuses":
            await lone.start()
        assert await asyncio.gather(*asking) == [lone.url] * 8


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_asks_for_a_pause_costs_no_attempt(stage: Stage, status: int) -> None:
    """It refuses all of them, and the one that tries after the first pause. Then it answers."""
    busy = says(status, None, Retry_After="0.2")
    async with servers(1) as (lone,), stage.calls(lone) as calls:
        lone.script.extend([busy] * 9)
        urls = await asyncio.gather(*(calls.ask(stage.send, Lane.TRAIN, 0) for _ in range(8)))
        assert urls == [lone.url] * 8
        assert calls.errors.total() == 9
        assert len(lone.requests) == 9 + 8


async def test_a_server_that_asks_for_pauses_for_ever_ends_the_users_patience(stage: Stage) -> None:
    async with servers(1) as (lone,), stage.calls(lone, patience_s=0.3) as calls:
        lone.default = says(429, None, Retry_After="0.1")
        with pytest.raises(RemoteFault, match="answered 429") as caught:
            await calls.ask(stage.send, Lane.TRAIN, 0)
        assert caught.value.kind == "no_replica" and caught.value.is_final


@pytest.mark.parametrize(("status", "headers"), [(429, {"Retry_After": "30"}), (500, {})])
async def test_without_patience_another_server_is_asked_all_the_same(
    stage: Stage, status: int, headers: dict[str, str]
) -> None:
    async with servers(2) as (gone, well), stage.calls(gone, well, patience_s=0.0) as calls:

        async def goes(server: MisbehavingServer, writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
            server.health = 503
            await says(status, None, **headers)(server, writer, _)

        gone.default = goes
        assert {await calls.ask(stage.send, Lane.TRAIN, 0) for _ in range(2)} == {well.url}
        assert len(gone.requests) == 1


async def test_waiting_for_a_dead_server_ends_with_the_users_patience(stage: Stage) -> None:
    async with servers(1) as (lone,):
        await lone.stop()
        async with stage.calls(lone, patience_s=0.3) as calls:
            with pytest.raises(RemoteFault, match=r"patience_s.*is down") as caught:
                await calls.ask(stage.send, Lane.TRAIN, 0)
        assert caught.value.kind == "no_replica" and caught.value.is_final


async def test_a_slow_request_gets_a_second_one_and_the_slow_one_is_cancelled(stage: Stage) -> None:
    async with servers(2) as (slow, fast):
        slow.default = hangs
        async with stage.calls(slow, fast, hedge=HedgeConfig(after_s=0.05)) as calls:
            urls = {await calls.ask(stage.send, Lane.TRAIN, 0) for _ in range(4)}
            assert urls == {fast.url} and calls.num_hedges >= 1
            await wait_until(lambda: slow.in_flight == 0)
            assert slow.num_cancelled >= 1 and calls.errors.total() == 0


async def test_a_hedge_learns_from_the_times_of_answers(stage: Stage) -> None:
    async with servers(2) as found, stage.calls(*found, hedge=HedgeConfig(quantile=0.9)) as calls:
        for _ in range(30):
            await calls.ask(stage.send, Lane.TRAIN, 0)
        found[0].default = hangs
        assert {await calls.ask(stage.send, Lane.TRAIN, 0) for _ in range(4)} == {found[1].url}


async def test_a_hedge_takes_nothing_from_those_that_wait_for_the_limits(stage: Stage) -> None:
    async with servers(2) as found:
        for server in found:
            server.default = answers(delay_s=0.1)
        limits = {"concurrency": 2, "evaluation_share": 0.0}
        async with stage.calls(*found, hedge=HedgeConfig(after_s=0.01), **limits) as calls:
            await asyncio.gather(*(calls.ask(stage.send, Lane.TRAIN, 0) for _ in range(6)))
        assert sum(server.peak for server in found) <= 2
        assert calls.num_hedges <= 2  # only the last two had nobody behind them


async def _leased(router: Router, avoid: set[str] | None = None) -> str:
    async with router.lease(avoid or set()) as replica:
        return replica.url


async def _is_empty(registry: ReplicaRegistry) -> bool:
    return await registry.urls() == []
