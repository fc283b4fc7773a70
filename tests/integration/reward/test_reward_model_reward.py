"""A run's reward from a reward model: two local replicas, one dies; servers that misbehave."""

import math
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support.misbehaving import MisbehavingServer, says
from tests.support.model_servers import dependencies_of, servers_at
from tests.support.reward_models import tiny_classifier
from tests.support.runs import ServiceRun
from tests.support.samples import make_sample
from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.config import NamedRewardConfig
from tidemill.common.config.reward_kinds import RewardModelConfig
from tidemill.common.process.replicas import read_replicas
from tidemill.common.streams import Entry, append, read_range
from tidemill.common.wire.messages import Score, ScoreStatus
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.remote.reward_model import ModelReward

COUNT = 60
SAMPLE = make_sample((0, 0), False, "d", "w1", "1", {}, "w2", (5,), (6, 7))


def reward_of(url: str, http: httpx.AsyncClient, patience_s: float = 300.0, **fields: Any) -> ModelReward:
    config = NamedRewardConfig(model=RewardModelConfig(servers="there", **fields), timeout_s=10.0)
    return ModelReward("rm", config, dependencies_of(servers_at(url, http, patience_s=patience_s)))


async def test_killing_one_of_two_replicas_costs_no_sample(tmp_path: Path) -> None:
    path = tiny_classifier(tmp_path / "model")
    model = {"servers": "rm", "input": "ids", "normalise": "sigmoid"}
    servers = {"rm": {"model": str(path), "local": {"count": 2}}}
    reward = {"rewards": {"rm": {"model": model, "backoff_s": 0.05, "max_attempts": 5}}, "max_in_flight": 8}
    async with ServiceRun(tmp_path, make_config(run_id="test", reward=reward, servers=servers)) as run:
        for index in range(2):
            arguments = ("--servers", "rm", "--index", str(index))
            run.start("reward.replica", f"replica-{index}", arguments=arguments)
        run.start("reward")
        await wait_until(lambda: _num_replicas(run, 2))
        sent = [make_trajectory(ticket, **_completion(ticket)) for ticket in range(COUNT)]
        await append(run.broker, run.keys.trajectories(), *sent[: COUNT // 2])
        await wait_until(lambda: _num_scores(run, 10))
        await append(run.broker, run.keys.trajectories(), *sent[COUNT // 2 :])
        psutil.Process(run.processes["replica-0"].pid).children()[0].kill()  # the server, not its keeper
        await wait_until(lambda: _num_scores(run, COUNT))
        scores = await _scores(run)
        assert await run.stop("reward") == 0
    assert sorted(score.ticket for score in scores) == list(range(COUNT))
    assert {score.status for score in scores} == {ScoreStatus.OK}
    reference = AutoModelForSequenceClassification.from_pretrained(path)
    for score in scores:
        ids = [*make_trajectory().prompt_ids.tolist(), *_ids(score.ticket)]
        with torch.inference_mode():
            raw = float(reference(input_ids=torch.tensor([ids])).logits[0, 0])
        assert score.value == pytest.approx(1 / (1 + math.exp(-raw)), abs=1e-5)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (says(200, {"data": []}), "gave no answer to use"),
        (says(200, {"data": [{"probs": ["x"]}], "usage": {"prompt_tokens": 1}}), "gave no answer to use"),
        (says(200, {"data": [{"probs": [math.nan]}], "usage": {"prompt_tokens": 1}}), "nan"),
        (says(200, {"data": [{"probs": [1.0]}], "usage": {"prompt_tokens": 1}}), "label 1 is wanted"),
        (says(400), "status 400"),
        (says(429, **{"Retry-After": "7"}), "status 429"),
    ],
    ids=["nothing", "text", "nan", "labels", "400", "429"],
)
async def test_what_is_no_score_is_an_error_and_no_zero(behaviour: Any, said: str) -> None:
    label = 1 if "label" in said else 0
    async with MisbehavingServer(behaviour) as server, httpx.AsyncClient() as http:
        reward = reward_of(server.url, http, label=label, patience_s=0.0)
        with pytest.raises(AttemptError, match=said) as caught:
            await reward.score(SAMPLE)
        await reward._servers.close()
    assert caught.value.is_final == (said == "status 400")
    assert caught.value.retry_after_s == (7.0 if "429" in said else 0.0)


def _ids(ticket: int) -> list[int]:
    return [3 + (ticket * 7 + place) % 29 for place in range(1 + ticket % 5)]


def _completion(ticket: int) -> dict[str, Any]:
    return {"completion_ids": _ids(ticket), "logprobs": [-0.5] * len(_ids(ticket))}


async def _num_replicas(run: ServiceRun, count: int) -> bool:
    return len(await read_replicas(run.broker, run.keys, "rm")) == count


async def _scores(run: ServiceRun) -> list[Score]:
    found = await read_range(run.broker, run.keys.scores(), Score)
    return [entry.message for entry in found if isinstance(entry, Entry)]


async def _num_scores(run: ServiceRun, count: int) -> bool:
    return len(await _scores(run)) >= count
