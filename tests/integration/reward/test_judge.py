"""A judge in a whole reward worker, against real HTTP servers that misbehave: nothing is lost or 0."""

import contextlib
import errno
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY

from tests.support.misbehaving import Behaviour, MisbehavingServer, answers, closes, cuts, hangs, says
from tests.support.rewards import announce_replica, beat_of, scores
from tests.support.rewards import worker as worker_with
from tests.support.training import messages
from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.errors import ConfigError
from tidemill.common.process.activity import Activity
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.streams import append
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Lane, Score, ScoreStatus
from tidemill.services.reward.remote import router
from tidemill.services.reward.remote.dependencies import RewardDependencies
from tidemill.services.reward.rewards.reward import check_reward

TEMPLATE = "{{ prompt }} {{ completion }} {{ ground_truth }}"


class Worker:
    """A reward worker with one judge, in this process, and what it has published."""

    def __init__(self, broker: Broker, keys: Keys) -> None:
        self.broker = broker
        self.keys = keys

    @contextlib.asynccontextmanager
    async def running(
        self, *servers: MisbehavingServer, judge: Any = None, asked: Any = None, **named: Any
    ) -> AsyncIterator[None]:
        judge = {"servers": "judge", "template": TEMPLATE} | (judge or {})
        asked = {"model": "m", "base_urls": [s.url for s in servers], "patience_s": 20.0} | (asked or {})
        rewards = {"judge": {"timeout_s": 20.0, "backoff_s": 0.01, "judge": judge} | named}
        started = worker_with(self.broker, self.keys, servers={"judge": asked}, drain_s=1.0, rewards=rewards)
        async with started as context:
            self.beat = partial(beat_of, context)
            yield

    async def put(self, count: int, lane: Lane = Lane.TRAIN, first: int = 0) -> None:
        samples = [make_trajectory(t, text=f"answer {t}") for t in range(first, first + count)]
        await append(self.broker, self.keys.trajectories(lane), *samples)

    async def scores(self, count: int, lane: Lane = Lane.TRAIN) -> list[Score]:
        return await scores(self.broker, self.keys, count, lane)

    async def score(self) -> Score:
        await self.put(1)
        return (await self.scores(1))[0]


@pytest.fixture
async def worker(redis: EmbeddedRedis, keys: Keys) -> AsyncIterator[Worker]:
    broker = await Broker.connect(redis.url)
    yield Worker(broker, keys)
    await broker.close()


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"tidemill_{name}", {"servers": "judge", **labels}) or 0.0


async def test_a_verdict_becomes_the_reward_and_its_words_and_tokens_are_kept(worker: Worker) -> None:
    before = metric("remote_tokens_total", kind="completion")
    cost = metric("remote_cost_total")
    async with MisbehavingServer(answers("Good. Score: 7", completion_tokens=5)) as server:
        judge = {"system": "You grade.", "temperature": 0.3, "max_tokens": 9, "extra_body": {"seed": 1}}
        prices = {"prompt": 1e6, "completion": 0.5e6}
        async with worker.running(server, judge=judge, asked={"prices": prices}):
            score = await worker.score()
            assert worker.beat().counts["judge/tokens"] == 15
    assert (score.status, score.value, score.components) == (ScoreStatus.OK, 7.0, {"judge": 7.0})
    assert score.detail["judge"]["judgement"] == "Good. Score: 7"
    assert score.detail["judge"]["judge_tokens"] == 15
    (request,) = server.requests
    assert request["messages"][0] == {"role": "system", "content": "You grade."}
    assert request["messages"][1] == {"role": "user", "content": " answer 0 1"}
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0.3, 9)
    assert request["seed"] == 1
    assert metric("remote_tokens_total", kind="completion") == before + 5
    assert metric("remote_cost_total") == cost + 10 * 1 + 5 * 0.5


async def test_the_completions_api_gets_the_bare_text(worker: Worker) -> None:
    async with MisbehavingServer() as server, worker.running(server, judge={"api": "completions"}):
        assert (await worker.score()).value == 7.0
    assert server.paths == ["/v1/completions"] and server.requests[0]["prompt"] == " answer 0 1"


async def test_the_key_comes_from_the_environment(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_JUDGE_KEY", "sesame")
    asked = {"api_key_env": "TEST_JUDGE_KEY"}
    async with MisbehavingServer() as server, worker.running(server, asked=asked):
        await worker.score()
    assert server.headers[0]["authorization"] == "Bearer sesame"
    monkeypatch.delenv("TEST_JUDGE_KEY")
    config = make_config(
        reward={"rewards": {"j": {"judge": {"servers": "judge", "template": "x"}}}},
        servers={"judge": {"model": "m", **asked}},
    )
    with pytest.raises(ConfigError, match="TEST_JUDGE_KEY"):
        check_reward("j", config.reward.named["j"], config.servers)


GARBAGE = b"<html>It works!</html>"
FAULTS: dict[str, tuple[Behaviour, str, str]] = {
    "hangs": (hangs, "timeout", "gave no answer within 3 s"),
    "500": (says(500), "server_error", "answered 500"),
    "503": (says(503, {"error": "overloaded"}), "server_error", "answered 503"),
    "closes": (closes, "connection", "no answer from"),
    "cuts": (cuts, "connection", "no answer from"),
    "web page": (says(200, GARBAGE, Content_Type="text/html"), "garbage", "It works!"),
    "broken JSON": (says(200, b'{"choices": [{'), "garbage", "gave no answer to use"),
    "other JSON": (says(200, {"choices": "none"}), "garbage", "gave no answer to use"),
    "no choices": (says(200, {"id": "1", "choices": []}), "garbage", "gave no answer to use"),
    "no number": (answers("I cannot say."), "no_verdict", "I cannot say."),
    "NaN": (answers("Score: NaN"), "no_verdict", "NaN"),
    "null": (answers(None), "no_verdict", "''"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_is_tried_again_and_fails_the_score_with_its_reason_only_where_it_stays(worker, name):
    behaviour, kind, reason = FAULTS[name]
    before = metric("remote_errors_total", kind=kind)
    timeout_s = 3.0 if name == "hangs" else 60.0
    async with (
        MisbehavingServer(answers("5"), behaviour, behaviour) as server,
        worker.running(server, timeout_s=timeout_s, max_attempts=2),
    ):
        failed = await worker.score()
        server.script.append(behaviour)
        await worker.put(1, first=1)
        passed = (await worker.scores(2))[1]
        assert worker.beat().counts["judge/errors"] == 3
        assert f"3 {kind}" in worker.beat().detail
    assert failed.status is (ScoreStatus.TIMEOUT if kind == "timeout" else ScoreStatus.FAILED)
    assert (failed.value, failed.attempts) == (None, 2)
    assert reason in failed.error
    assert (passed.status, passed.value, passed.attempts) == (ScoreStatus.OK, 5.0, 2)
    assert metric("remote_errors_total", kind=kind) == before + 3


async def test_a_judge_that_refuses_connections_fails_the_score_once_patience_ends(worker: Worker) -> None:
    server = MisbehavingServer()
    await server.start()
    await server.stop()
    async with worker.running(server, asked={"patience_s": 0.3}):
        await worker.put(3)
        scores = await worker.scores(3)
        assert {score.status for score in scores} == {ScoreStatus.FAILED}
        assert all(
            "no replica of servers.judge" in score.error or "no answer" in score.error for score in scores
        )
        assert "judge: 0 of 1 replicas up" in worker.beat().detail
        await server.start()
        await wait_until(lambda: worker.beat().counts["judge/replicas_up"] == 1)
        await worker.put(1, first=3)
        assert (await worker.scores(4))[-1].value == 7.0
    await server.stop()


async def test_a_request_that_is_refused_is_not_repeated(worker: Worker) -> None:
    refusal = says(400, {"error": {"message": "too long"}})
    async with MisbehavingServer(refusal) as server, worker.running(server):
        score = await worker.score()
    assert (score.status, score.attempts) == (ScoreStatus.FAILED, 1)
    assert "answered 400" in score.error and "too long" in score.error
    assert len(server.requests) == 1


async def test_evaluation_is_judged_while_training_uses_up_its_limits(worker: Worker) -> None:
    def behave(server: MisbehavingServer, writer: Any, request: dict[str, Any]) -> Any:
        is_training = "train" in request["messages"][0]["content"]
        return (hangs if is_training else answers("5"))(server, writer, request)

    asked = {"limits": {"concurrency": 4}}
    judge = {"template": "{{ completion }}"}
    async with MisbehavingServer(behave) as server, worker.running(server, judge=judge, asked=asked):
        stuck = [make_trajectory(t, text=f"train {t}") for t in range(20)]
        await append(worker.broker, worker.keys.trajectories(), *stuck)
        await wait_until(lambda: server.in_flight == 3)
        await worker.put(10, Lane.EVAL)
        assert {score.value for score in await worker.scores(10, Lane.EVAL)} == {5.0}
        assert server.peak <= 4
        assert await messages(worker.broker, worker.keys.scores(), Score) == []


@pytest.fixture
async def services(worker: Worker) -> AsyncIterator[RewardDependencies]:
    """What the rewards of a worker share, with servers that no reward asks itself."""
    config = make_config(servers={"judge": {"patience_s": 0.0}})
    context = ServiceContext("reward", "w1", worker.keys, config, worker.broker, Path(), Activity("reward"))
    services = RewardDependencies.of(context)
    yield services
    await services.close()


async def test_functions_reach_the_judges_servers_through_the_router(worker, services):
    address = await services.router_address("judge")
    assert await services.router_address("judge") == address
    async with MisbehavingServer(says(500)) as broken, MisbehavingServer(answers("5")) as well:
        for server in (broken, well):
            await announce_replica(worker.broker, worker.keys, "judge", server.url)
        await services.servers("judge").look()
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20) as client:
            for path in ("/v1/chat/completions", "/classify", "/v1/completions"):
                answer = await client.post(path, json={"model": "m"})
                assert answer.json()["choices"][0]["text"] == "5"
                assert well.paths[-1] == path
            assert services.servers("judge").num_failovers >= 1
            assert services.servers("judge").num_tokens == 36
            well.default = says(404, {"detail": "no such path"})
            answer = await client.post("/v1/nothing", json={})
            assert (answer.status_code, answer.json()) == (404, {"detail": "no such path"})


async def test_the_router_says_what_is_wrong_in_the_form_of_openai(worker, services):
    async with MisbehavingServer(says(429, None, Retry_After="3")) as busy:
        await announce_replica(worker.broker, worker.keys, "judge", busy.url)
        await services.servers("judge").look()
        address = await services.router_address("judge")
        async with httpx.AsyncClient(base_url=f"http://{address}", timeout=20) as client:
            answer = await client.post("/v1/completions", json={})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "3")
    assert answer.json()["error"]["code"] == "rate_limited"


async def test_a_router_that_nobody_has_is_a_mistake_of_the_config(services: RewardDependencies) -> None:
    with pytest.raises(ConfigError, match="judje"):
        await services.router_address("judje")


async def test_a_router_that_could_not_listen_is_started_again(services, monkeypatch):
    """Its functions would get an empty address for as long as the worker lives."""
    listen = router.listen
    failures = [OSError(errno.EMFILE, "Too many open files")]

    def failing_once(host: str) -> Any:
        if failures:
            raise failures.pop()
        return listen(host)

    monkeypatch.setattr(router, "listen", failing_once)
    with pytest.raises(OSError, match="Too many open files"):
        await services.router_address("judge")
    assert (await services.router_address("judge")).startswith("127.0.0.1:")
