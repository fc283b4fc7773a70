"""Servers and one attempt over the network, against real HTTP servers that misbehave, and a real Redis."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.support.misbehaving import MisbehavingServer, answers, hangs, says
from tests.support.rewards import announce_replica
from tests.support.waiting import wait_until
from tidemill.common.config.servers import ServersConfig
from tidemill.common.process import heartbeats
from tidemill.common.process.heartbeats import publish_heartbeat
from tidemill.common.process.replicas import read_replicas
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Lane
from tidemill.services.reward.remote import servers as resting
from tidemill.services.reward.remote.faults import FaultKind, RemoteFault, status_fault
from tidemill.services.reward.remote.limiter import Limiter, Permit
from tidemill.services.reward.remote.servers import Replica, Servers


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(), verify=False) as client:
        yield client


@contextlib.asynccontextmanager
async def servers(count: int) -> AsyncIterator[list[MisbehavingServer]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(MisbehavingServer()) for _ in range(count)]


class Stage:
    """`Servers` over servers that misbehave, sending plain posts."""

    def __init__(self, http: httpx.AsyncClient, broker: Broker, keys: Keys) -> None:
        self.http = http
        self.broker = broker
        self.keys = keys
        self.timeout_s = 20.0

    @contextlib.asynccontextmanager
    async def over(
        self, *started: MisbehavingServer, patience_s: float = 20.0, registers: bool = False, **limits: Any
    ) -> AsyncIterator[Servers]:
        urls = [server.url for server in started]
        config = ServersConfig.model_validate({"base_urls": urls, "patience_s": patience_s, "limits": limits})
        limiter = Limiter(self.broker, self.keys, "judge", config.limits)
        registered = partial(read_replicas, self.broker, self.keys, "judge") if registers else None
        pool = Servers("judge", config, self.http, limiter, registered, health_interval_s=0.05)
        pool.start()
        try:
            yield pool
        finally:
            await pool.close()

    async def ask(self, asked: Servers) -> str:
        return await asked.ask(self.send, Lane.TRAIN, 0, self.timeout_s)

    async def send(self, replica: Replica, permit: Permit) -> str:
        try:
            answer = await self.http.post(f"{replica.url}/chat/completions", json={})
        except httpx.HTTPError as error:
            raise RemoteFault(FaultKind.CONNECTION, str(error)) from error
        if answer.status_code != 200:
            raise status_fault(replica.origin, answer.status_code, answer.headers, answer.text)
        return replica.url


@pytest.fixture
def stage(http: httpx.AsyncClient, broker: Broker, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(resting, "FIRST_REST_S", 0.05)
    return Stage(http, broker, keys)


async def test_the_least_loaded_replica_gets_the_next_request(stage: Stage) -> None:
    async with servers(3) as started, stage.over(*started) as router, contextlib.AsyncExitStack() as held:
        leased = [await held.enter_async_context(router.replica()) for _ in range(9)]
        assert set(Counter(replica.url for replica in leased).values()) == {3}
        leased[4].in_flight -= 1  # as if one of its requests had ended
        assert (await held.enter_async_context(router.replica())).url == leased[4].url


async def test_a_replica_to_avoid_is_asked_only_when_there_is_no_other(stage: Stage) -> None:
    async with servers(2) as (first, second), stage.over(first, second) as router:
        assert [await _leased(router, {first.url}) for _ in range(4)] == [second.url] * 4
        assert await _leased(router, {first.url, second.url}) in (first.url, second.url)


@pytest.mark.parametrize("written", ["http://[", "http://a:b/", "http://a:0/", "x", "file:///etc", ""])
async def test_what_is_no_address_is_no_replica(stage, broker, keys, written):
    """One password of a reward worker must not end the judge of all others."""
    await announce_replica(broker, keys, "judge", written)
    async with servers(1) as (well,), stage.over(well, registers=True) as router:
        await router.look()
        assert [replica.url for replica in router.replicas] == [well.url]


async def test_a_replica_that_is_down_gets_nothing_until_it_is_up_again(stage: Stage) -> None:
    async with servers(2) as (sick, well), stage.over(sick, well) as router:
        sick.health = 503
        await wait_until(lambda: router.states()["down"] == 1)
        assert {await _leased(router) for _ in range(4)} == {well.url}
        sick.health = 200
        await wait_until(lambda: router.states()["up"] == 2)
        assert {await _leased(router) for _ in range(4)} == {sick.url, well.url}


async def test_a_server_without_a_health_page_counts_as_healthy(stage: Stage) -> None:
    async with servers(1) as (hosted,), stage.over(hosted) as router:
        hosted.health = 404
        await router.look()
        assert router.states()["up"] == 1


async def test_a_replica_that_fails_in_a_row_rests_until_a_trial_succeeds(stage, monkeypatch):
    monkeypatch.setattr(resting, "FIRST_REST_S", 0.2)
    async with servers(2) as (broken, well), stage.over(broken, well) as router:
        for _ in range(resting.FAILURES_BEFORE_REST):
            with pytest.raises(RemoteFault):
                async with router.replica(avoid={well.url}):
                    raise RemoteFault(FaultKind.SERVER_ERROR, "500")
        assert router.states()["resting"] == 1
        assert {await _leased(router) for _ in range(4)} == {well.url}
        sought = asyncio.create_task(_leased(router, avoid={well.url}))
        assert await sought == well.url  # nothing else can be used
        await wait_until(lambda: router.replicas[0].state == "up")
        assert await _leased(router, avoid={well.url}) == broken.url
        assert router.states()["up"] == 2


async def test_replicas_join_and_leave_through_redis_while_requests_go_on(stage, broker, keys):
    async with servers(2) as (first, second), stage.over(registers=True) as router:
        waiting = asyncio.create_task(_leased(router))
        beat = await announce_replica(broker, keys, "judge", first.url)
        assert await waiting == first.url
        await announce_replica(broker, keys, "judge", second.url)
        await announce_replica(broker, keys, "other", "http://127.0.0.1:1/v1")
        await wait_until(lambda: len(router.replicas) == 2)
        beat.url = ""
        await publish_heartbeat(broker, keys, beat)
        await wait_until(lambda: len(router.replicas) == 1)
        assert await _leased(router) == second.url


async def test_a_replica_that_falls_silent_is_none_any_more(broker, keys, monkeypatch):
    await announce_replica(broker, keys, "judge", "http://127.0.0.1:1/v1")
    assert await read_replicas(broker, keys, "judge") == ["http://127.0.0.1:1/v1"]
    monkeypatch.setattr(heartbeats, "GONE_AFTER_S", 0.5)

    async def is_gone() -> bool:
        return await read_replicas(broker, keys, "judge") == []

    await wait_until(is_gone)


@pytest.mark.parametrize("fault", [says(500), hangs])
async def test_a_failed_request_goes_to_another_replica_at_once(stage: Stage, fault: Any) -> None:
    async with servers(2) as (broken, well):
        broken.default = fault
        stage.timeout_s = 2.0
        async with stage.over(broken, well) as calls:
            urls = [await stage.ask(calls) for _ in range(3)]
        assert urls == [well.url] * 3
        assert calls.num_failovers >= 1 and calls.errors.total() == calls.num_failovers


async def test_a_replica_that_dies_in_the_middle_costs_no_request(stage: Stage) -> None:
    async with servers(2) as (victim, well), stage.over(victim, well) as calls:
        # It answers none: else all of its requests may have ended as it stops.
        victim.default = hangs
        well.default = answers(delay_s=0.02)
        asking = [asyncio.create_task(stage.ask(calls)) for _ in range(100)]
        await wait_until(lambda: len(victim.requests) > 5)
        await victim.stop()
        assert len(await asyncio.gather(*asking)) == 100
        assert calls.num_failovers > 0


async def test_a_lone_replica_that_fails_fails_the_attempt_at_once(stage: Stage) -> None:
    async with servers(1) as (broken,), stage.over(broken) as calls:
        broken.default = says(500)
        with pytest.raises(RemoteFault, match="status 500"):
            await stage.ask(calls)
        assert len(broken.requests) == 1  # whoever waits and tries again is the reward's policy


@pytest.mark.parametrize("how", [says(500), hangs, "cancelled"])
async def test_a_request_that_fails_is_no_load_of_its_replica_any_more(stage: Stage, how: Any) -> None:
    async with servers(1) as (server,), stage.over(server) as calls:
        if how == "cancelled":
            server.default = hangs
            stage.timeout_s = 600.0
        else:
            server.default = how
            stage.timeout_s = 0.5
        asking = asyncio.create_task(stage.ask(calls))
        await wait_until(lambda: server.requests)
        if how == "cancelled":
            asking.cancel()
        with pytest.raises((RemoteFault, asyncio.CancelledError)):
            await asking
        assert [replica.in_flight for replica in calls.replicas] == [0]


async def test_one_failed_request_diverts_nothing_but_itself(stage: Stage) -> None:
    async with servers(2) as (stumbles, well), stage.over(stumbles, well) as calls:
        stumbles.script.append(says(500))
        stumbles.default = answers(delay_s=0.02)
        well.default = stumbles.default
        while not calls.errors:
            await stage.ask(calls)
        urls = await asyncio.gather(*(stage.ask(calls) for _ in range(500)))
        assert min(Counter(urls)[server.url] for server in (stumbles, well)) > 200


async def test_health_that_comes_back_ends_a_rest(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resting, "FIRST_REST_S", 3600.0)
    monkeypatch.setattr(resting, "FAILURES_BEFORE_REST", 1)
    async with servers(1) as (sick,), stage.over(sick) as router:
        with pytest.raises(RemoteFault):
            async with router.replica():
                raise RemoteFault(FaultKind.CONNECTION, "cut")
        assert router.states()["resting"] == 1
        await sick.stop()
        await wait_until(lambda: router.states()["down"] == 1)
        await sick.start()
        assert await _leased(router) == sick.url


@pytest.mark.parametrize("end", ["refuses", "cuts", "says 500"])
async def test_a_dead_server_costs_no_attempt_the_samples_wait_for_one(stage: Stage, end: str) -> None:
    """Whether it dies before, in the middle, or with a last word; the limit is patience_s."""
    async with servers(1) as (lone,), stage.over(lone) as calls:

        async def dies(server: MisbehavingServer, writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
            server.health = 503
            if end == "says 500":
                await says(500)(server, writer, _)

        if end == "refuses":
            await lone.stop()
        else:
            lone.script.extend([dies] * 8)
        asking = [asyncio.create_task(stage.ask(calls)) for _ in range(8)]
        await wait_until(lambda: calls.num_failovers == 8 and calls.states()["down"] == 1)
        assert not any(task.done() for task in asking)
        lone.health = 200
        if end == "refuses":
            await lone.start()
        assert await asyncio.gather(*asking) == [lone.url] * 8


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_asks_for_a_pause_costs_no_attempt(stage: Stage, status: int) -> None:
    """It refuses all of them, and the one that tries after the first pause. Then it answers."""
    busy = says(status, None, Retry_After="0.2")
    async with servers(1) as (lone,), stage.over(lone) as calls:
        lone.script.extend([busy] * 9)
        urls = await asyncio.gather(*(stage.ask(calls) for _ in range(8)))
        assert urls == [lone.url] * 8
        assert calls.errors.total() == 9
        assert len(lone.requests) == 9 + 8


@pytest.mark.parametrize(("status", "headers"), [(429, {"Retry_After": "30"}), (500, {})])
async def test_without_patience_another_server_is_asked_all_the_same(stage, status, headers):
    async with servers(2) as (gone, well), stage.over(gone, well, patience_s=0.0) as calls:

        async def goes(server: MisbehavingServer, writer: asyncio.StreamWriter, _: dict[str, Any]) -> None:
            server.health = 503
            await says(status, None, **headers)(server, writer, _)

        gone.default = goes
        assert {await stage.ask(calls) for _ in range(2)} == {well.url}
        assert len(gone.requests) == 1


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("none", "none is configured or registered"),
        ("busy", "answered 429"),
        ("dead", r"patience_s.*is down"),
    ],
)
async def test_waiting_for_a_server_ends_with_the_users_patience(stage: Stage, state: str, said: str) -> None:
    async with servers(1) as (lone,):
        lone.default = says(429, None, Retry_After="0.1")
        if state == "dead":
            await lone.stop()
        async with stage.over(*([] if state == "none" else [lone]), patience_s=0.3) as calls:
            with pytest.raises(RemoteFault, match=said) as caught:
                await stage.ask(calls)
        assert caught.value.kind == "no_replica" and caught.value.is_final


async def _leased(router: Servers, avoid: set[str] | None = None) -> str:
    async with router.replica(avoid or set()) as replica:
        return replica.url
