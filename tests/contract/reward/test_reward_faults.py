"""Functions that misbehave, in a real worker: the outcome is what the policy says, and the run goes on."""

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from common.process.heartbeats import FAILURES, Heartbeat
from common.redis.broker import Broker
from common.streams import append
from common.wire.keys import Keys
from common.wire.messages import ScoreStatus
from tests.support.reward_worker import num_pending, scores, worker
from tests.support.trajectories import make_trajectory

SOURCE = """
    import asyncio, os
    import numpy as np

    RETURNED = {
        "fine": 1.0, "none": None, "text": "0.5", "array": np.zeros(3), "nan": float("nan"), "empty": {},
    }

    def plain(data_source, solution_str, ground_truth):
        if solution_str == "raises":
            raise KeyError("verdict")
        if solution_str == "never ends":
            while True: pass
        if solution_str == "dies":
            os._exit(1)
        return RETURNED[solution_str]

    async def waits(data_source, solution_str, ground_truth):
        if solution_str == "raises":
            raise KeyError("verdict")
        if solution_str == "never ends":
            await asyncio.Event().wait()
        return RETURNED[solution_str]
"""
FAULTS = {
    "raises": (ScoreStatus.FAILED, "KeyError: 'verdict'"),
    "none": (ScoreStatus.FAILED, "returned None"),
    "text": (ScoreStatus.FAILED, "returned the text '0.5'"),
    "array": (ScoreStatus.FAILED, "an array of shape (3,)"),
    "nan": (ScoreStatus.FAILED, "returned nan"),
    "empty": (ScoreStatus.FAILED, "without 'score'"),
    "never ends": (ScoreStatus.TIMEOUT, "no result within 1 s"),
}


@pytest.mark.parametrize("name", ["plain", "waits"])
@pytest.mark.parametrize("policy", ["drop_sample", "drop_group", "value"])
async def test_what_a_function_does_wrong_has_the_outcome_of_its_policy_and_is_counted(
    broker: Broker, keys: Keys, tmp_path: Path, name: str, policy: str
) -> None:
    path = tmp_path / "rewards.py"
    path.write_text(dedent(SOURCE))
    faults = FAULTS | ({"dies": (ScoreStatus.FAILED, "process of the reward")} if name == "plain" else {})
    texts = [*faults, "fine"]
    limits: dict[str, Any] = {"timeout_s": 1.0, "max_attempts": 1, "on_failure": policy}
    if policy == "value":
        limits["failure_value"] = -0.5
    rewards = {"mine": {"function": f"{path}:{name}", **limits}, "rule": {"function": "exact_match"}}
    async with worker(broker, keys, rewards=rewards, processes=2) as context:
        await append(
            broker, keys.trajectories(), *[make_trajectory(t, text=text) for t, text in enumerate(texts)]
        )
        made = dict(zip(texts, await scores(broker, keys, len(texts)), strict=True))
        beat = Heartbeat("w1", "reward")
        for report in context.reporters:
            report(beat)
    assert (made["fine"].status, made["fine"].value) == (ScoreStatus.OK, 1.0)
    for text, (status, reason) in faults.items():
        score = made[text]
        if policy == "value":
            assert (score.status, score.value) == (ScoreStatus.OK, -0.5), text
            assert reason in score.detail["failures"]["mine"]
        else:
            assert (score.status, score.value, score.on_failure) == (status, None, policy), text
            assert reason in score.error and score.error.startswith("mine: ")
    assert beat.counts[f"{FAILURES}mine:timeout"] == 1
    assert beat.counts[f"{FAILURES}mine:error"] == len(faults) - 1
    assert await num_pending(broker, keys) == 0
