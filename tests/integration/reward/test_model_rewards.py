"""Models that give rewards, behind real servers: a teacher's exact logprobs of every sampled token, a reward
model's score; or an error, and never a guess."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.misbehaving import MisbehavingServer, hangs, says
from tests.support.models import tiny_model, write_tokenizer
from tests.support.reward_models import CHAT_TEMPLATE, server_url, start_server, tiny_classifier
from tests.support.rewards import dependencies_of, make_sample, servers_at
from tests.support.runs import ServiceRun
from tests.support.sessions import make_segment, make_session
from tests.support.training import messages
from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.config import NamedRewardConfig
from tidemill.common.config.reward_kinds import RewardModelConfig, TeacherConfig
from tidemill.common.process.replicas import read_replicas
from tidemill.common.streams import append
from tidemill.common.wire.messages import Lane, Score, ScoreStatus, Trajectory
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.remote.reward_model import ModelReward
from tidemill.services.reward.remote.teacher import TeacherReward
from tidemill.services.reward.sample import RewardSample

COUNT = 24
SAMPLE = make_sample((0, 0), False, "d", "w1", "1", {}, "w2", (5,), (6, 7))


def teacher_of(
    url: str, http: httpx.AsyncClient, timeout_s: float = 30.0, patience_s: float = 300.0, **fields: Any
) -> TeacherReward:
    config = NamedRewardConfig(teacher=TeacherConfig(servers="there", **fields), timeout_s=timeout_s)
    return TeacherReward("wise", config, dependencies_of(servers_at(url, http, patience_s=patience_s)))


@contextlib.asynccontextmanager
async def teacher_at(url: str, **fields: Any) -> AsyncIterator[TeacherReward]:
    async with httpx.AsyncClient() as http:
        teacher = teacher_of(url, http, **fields)
        yield teacher
        await teacher._servers.close()


def reward_of(url: str, http: httpx.AsyncClient, patience_s: float = 300.0, **fields: Any) -> ModelReward:
    config = NamedRewardConfig(model=RewardModelConfig(servers="there", **fields), timeout_s=10.0)
    return ModelReward("rm", config, dependencies_of(servers_at(url, http, patience_s=patience_s)))


async def logprobs_of(teacher: TeacherReward, trajectory: Trajectory) -> np.ndarray:
    outcome = await teacher.score(RewardSample(trajectory, Lane.TRAIN))
    assert outcome.value is None and outcome.teacher_logprobs is not None
    return np.frombuffer(outcome.teacher_logprobs, np.float32)


def by_hand(path: Path, trajectory: Trajectory, own_prompt: list[int] | None = None) -> np.ndarray:
    """One row after the other, with whole logits."""
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    logprobs_of_tokens = []
    old = len(trajectory.prompt_ids)
    for segment in trajectory.segments:
        prompt = segment.prompt_ids.tolist()
        prompt = prompt if own_prompt is None else [*own_prompt, *prompt[old:]]
        ids = [*prompt, *segment.completion_ids.tolist()]
        with torch.inference_mode():
            logprobs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        places = len(prompt) + np.flatnonzero(segment.mask)
        logprobs_of_tokens += [float(logprobs[position - 1, ids[position]]) for position in places]
    return np.array(logprobs_of_tokens, np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("teacher"), seed=5)
    write_tokenizer(folder, chat_template=CHAT_TEMPLATE)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    server = start_server(path, log, "--head", "lm")
    try:
        await wait_until(lambda: server_url(log), 60)
        yield server_url(log) + "/v1"
    finally:
        server.terminate()
        await asyncio.to_thread(server.wait, 30)


@pytest.mark.asyncio(loop_scope="module")
class TestServer:
    async def test_logprobs_are_those_of_a_plain_forward_pass(self, url: str, path: Path) -> None:
        rng = np.random.default_rng(0)
        sizes = [1, 3, 9, 30, 2, 17]
        trajectories = [
            make_trajectory(
                i,
                prompt_ids=rng.integers(3, 32, 1 + i).astype(np.int32),
                completion_ids=rng.integers(0, 32, size).astype(np.int32),
                logprobs=np.full(size, -1.0, np.float32),
            )
            for i, size in enumerate(sizes)
        ]
        async with teacher_at(url) as teacher:
            results = await asyncio.gather(*(logprobs_of(teacher, t) for t in trajectories))
        for trajectory, logprobs in zip(trajectories, results, strict=True):
            np.testing.assert_allclose(logprobs, by_hand(path, trajectory), atol=2e-6)

    async def test_every_segment_of_a_session_is_scored_and_only_the_models_tokens(self, url, path):
        session = make_session(
            0, 1, make_segment((3, 4), (6,), (8, 9), (11, 12)), make_segment((14, 15, 16), (17, 18), (19,))
        )
        empty = make_trajectory(
            completion_ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32), spans=((0, 0),)
        )
        async with teacher_at(url) as teacher:
            result = await logprobs_of(teacher, session)
            nothing = await logprobs_of(teacher, empty)
        assert len(result) == sum(int(s.mask.sum()) for s in session.segments) == 5
        np.testing.assert_allclose(result, by_hand(path, session), atol=2e-6)
        assert len(nothing) == 0

    async def test_a_prompt_of_its_own_stands_where_the_rows_prompt_stood(self, url: str, path: Path) -> None:
        """The vocabulary is `w0` = 3, `w1` = 4, ...; the chat template puts `<user>`, unknown, before it."""
        extra = {"hint": "w4 w5 w6", "chat": [{"role": "user", "content": "w7"}]}
        plain = make_trajectory(extra=extra, completion_ids=np.array([5, 6, 7], np.int32))
        first = make_segment((3, 4), (6,), (8, 9), (11, 12))
        session = make_session(0, 1, first, make_segment((3, 4, 16), (17, 18)), extra=extra)
        for fields, extra_ids in (
            ({"prompt_column": "hint"}, [7, 8, 9]),
            ({"template": "{{ extra.hint }} w0"}, [7, 8, 9, 3]),
            ({"prompt_column": "chat"}, [2, 10]),
        ):
            async with teacher_at(url, **fields) as teacher:
                for trajectory in (plain, session):
                    result = await logprobs_of(teacher, trajectory)
                    np.testing.assert_allclose(result, by_hand(path, trajectory, extra_ids), atol=2e-6)
        elsewhere = make_session(0, 1, first, make_segment((14, 15), (17, 18)), extra=extra)
        async with teacher_at(url, prompt_column="hint") as teacher:
            with pytest.raises(AttemptError, match="segment 1 of the session does not begin") as caught:
                await logprobs_of(teacher, elsewhere)
        assert caught.value.is_final

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ({"prompt": [[3, 99]], "prompt_logprobs": 0}, "token id 99"),
            ({"prompt": [3] * 200, "prompt_logprobs": 0}, "200 tokens"),
            ({"prompt": [[3, 4]], "prompt_logprobs": 5}, "ask for 0"),
            ({"prompt": [[3, 4]], "prompt_logprobs": 0, "max_tokens": 9}, "generates nothing"),
            ({"prompt": "text", "prompt_logprobs": 0}, "prompt"),
            ({"prompt": [[3, 4]]}, "prompt_logprobs"),
            ({"prompt": [[3, 4]], "prompt_logprobs": 0, "model": "other"}, "not 'other'"),
        ],
    )
    async def test_what_it_cannot_say_is_refused_with_the_reason(self, url, body, said):
        async with httpx.AsyncClient() as http:
            answer = await http.post(f"{url}/completions", json=body)
        assert answer.status_code == 400 and said in answer.json()["error"]["message"]

    async def test_its_other_paths_say_where_to_ask(self, url: str) -> None:
        async with httpx.AsyncClient() as http:
            for path in ("/classify", "/pooling"):
                answer = await http.post(url.removesuffix("/v1") + path, json={"input": [3]})
                assert answer.status_code == 400 and "/v1/completions" in answer.text


PROBS = {"usage": {"prompt_tokens": 1}}
NO_SCORES = {
    "nothing": (says(200, {"data": []}), "gave no answer to use"),
    "text": (says(200, PROBS | {"data": [{"probs": ["x"]}]}), "gave no answer to use"),
    "nan": (says(200, PROBS | {"data": [{"probs": [math.nan]}]}), "nan"),
    "labels": (says(200, PROBS | {"data": [{"probs": [1.0]}]}), "label 1 is wanted"),
    "400": (says(400), "status 400"),
    "429": (says(429, **{"Retry-After": "7"}), "status 429"),
}
NO_LOGPROBS = {
    "nothing": (says(200, {"choices": []}), "gave no answer to use"),
    "null": (says(200, {"choices": [{"index": 0, "prompt_logprobs": [None] * 3}]}), "no logprob for token 1"),
    "text": (says(200, {"choices": [{"index": 0, "text": "hello"}]}), "no prompt_logprobs"),
    "400": (says(400), "status 400"),
    "hangs": (hangs, "no answer within"),
}


@pytest.mark.parametrize("kind", ["model", "teacher"])
async def test_what_is_no_answer_is_an_error_and_no_zero(kind: str) -> None:
    for behaviour, said in (NO_SCORES if kind == "model" else NO_LOGPROBS).values():
        async with MisbehavingServer(behaviour) as server, httpx.AsyncClient() as http:
            reward: Any = teacher_of(server.url, http, timeout_s=1.0, patience_s=0.0)
            if kind == "model":
                reward = reward_of(server.url, http, label=int("label" in said), patience_s=0.0)
            with pytest.raises(AttemptError, match=said) as caught:
                await reward.score(SAMPLE)
            await reward._servers.close()
        assert caught.value.is_final == (said == "status 400")
        assert caught.value.is_timeout == ("within" in said)
        assert caught.value.retry_after_s == (7.0 if "429" in said else 0.0)


async def test_a_replica_of_a_run_dies_and_every_sample_has_its_score_and_its_teachers_logprobs(
    path, tmp_path
):
    """Two replicas of a teacher, of which one dies, and one of a reward model."""
    scorer = tiny_classifier(tmp_path / "model")
    servers = {
        "wise": {"model": str(path), "local": {"engine": "transformers", "count": 2}},
        "rm": {"model": str(scorer), "local": {}},
    }
    tries = {"backoff_s": 0.05, "max_attempts": 5}
    rewards = {
        "wise": {"teacher": {"servers": "wise"}, "applies_to": ["taught"], **tries},
        "rm": {"model": {"servers": "rm", "input": "ids", "normalise": "sigmoid"}, **tries},
    }
    config = make_config(run_id="test", reward={"rewards": rewards, "max_in_flight": 8}, servers=servers)
    async with ServiceRun(tmp_path, config) as run:
        for name, index in (("wise", "0"), ("wise", "1"), ("rm", "0")):
            run.start("reward.replica", f"{name}-{index}", arguments=("--servers", name, "--index", index))
        run.start("reward")
        await wait_until(lambda: _have_replicas(run, wise=2, rm=1))
        sent = [_sent(ticket) for ticket in range(COUNT)]
        await append(run.broker, run.keys.trajectories(), *sent[: COUNT // 2])
        await wait_until(lambda: num_scores(run, 4))
        await append(run.broker, run.keys.trajectories(), *sent[COUNT // 2 :])
        psutil.Process(run.processes["wise-0"].pid).children()[0].kill()  # the server, not its keeper
        await wait_until(lambda: num_scores(run, COUNT))
        scores = {score.ticket: score for score in await scores_of(run)}
        assert await run.stop("reward") == 0
    assert {score.status for score in scores.values()} == {ScoreStatus.OK}
    reference = AutoModelForSequenceClassification.from_pretrained(scorer)
    for trajectory in sent:
        score = scores[trajectory.ticket]
        ids = [*trajectory.prompt_ids.tolist(), *trajectory.completion_ids.tolist()]
        with torch.inference_mode():
            raw = float(reference(input_ids=torch.tensor([ids])).logits[0, 0])
        assert score.value == pytest.approx(1 / (1 + math.exp(-raw)), abs=1e-5)
        if trajectory.data_source != "taught":
            assert score.teacher_logprobs is None
            continue
        assert score.teacher_logprobs is not None
        np.testing.assert_allclose(score.teacher_logprobs, by_hand(path, trajectory), atol=2e-6)
        assert score.components["wise/logprob"] == pytest.approx(float(score.teacher_logprobs.mean()))


def _sent(ticket: int) -> Trajectory:
    ids = np.array([3 + (ticket * 7 + position) % 29 for position in range(1 + ticket % 5)], np.int32)
    return make_trajectory(
        ticket,
        data_source="taught" if ticket % 3 else "other",
        completion_ids=ids,
        logprobs=np.full(len(ids), -0.5, np.float32),
    )


async def _have_replicas(run: ServiceRun, **counts: int) -> bool:
    counted = {name: len(await read_replicas(run.broker, run.keys, name)) for name in counts}
    return counted == counts


async def scores_of(run: ServiceRun) -> list[Score]:
    return await messages(run.broker, run.keys.scores(), Score)


async def num_scores(run: ServiceRun, count: int) -> bool:
    return len(await scores_of(run)) >= count
