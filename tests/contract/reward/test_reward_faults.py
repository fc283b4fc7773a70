"""Functions that misbehave, in a real worker: the outcome is what the policy says, and the run goes on."""

import asyncio
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.support.rewards import (
    Pool,
    beat_of,
    dependencies_of,
    make_sample,
    num_pending,
    obedient_functions,
    scores,
    worker,
)
from tests.support.trajectories import make_trajectory
from tidemill.common.config import NamedRewardConfig
from tidemill.common.process.heartbeats import FAILURES
from tidemill.common.streams import append
from tidemill.common.wire.messages import ScoreStatus
from tidemill.services.reward.outcome import AttemptError, RewardOutcome
from tidemill.services.reward.remote.faults import RemoteFault
from tidemill.services.reward.remote.judge import JudgeReward

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
    "never ends": (ScoreStatus.TIMEOUT, "no result within 2 s"),
}


@pytest.mark.parametrize(
    ("name", "policy"), [("plain", "drop_sample"), ("plain", -0.5), ("waits", "drop_group")]
)
async def test_what_a_function_does_wrong_has_the_outcome_of_its_policy_and_is_counted(
    broker, keys, tmp_path, name, policy
):
    path = tmp_path / "rewards.py"
    path.write_text(dedent(SOURCE))
    faults = FAULTS | ({"dies": (ScoreStatus.FAILED, "process of the reward")} if name == "plain" else {})
    texts = [*faults, "fine"]
    limits: dict[str, Any] = {"timeout_s": 2.0, "max_attempts": 1, "on_failure": policy}
    rewards = {"mine": {"function": f"{path}:{name}", **limits}, "rule": {"function": "exact_match"}}
    async with worker(broker, keys, rewards=rewards, processes=2) as context:
        await append(
            broker, keys.trajectories(), *[make_trajectory(t, text=text) for t, text in enumerate(texts)]
        )
        by_text = dict(zip(texts, await scores(broker, keys, len(texts)), strict=True))
        beat = beat_of(context)
    assert (by_text["fine"].status, by_text["fine"].value) == (ScoreStatus.OK, 1.0)
    for text, (status, reason) in faults.items():
        score = by_text[text]
        if isinstance(policy, float):
            assert (score.status, score.value) == (ScoreStatus.OK, -0.5), text
            assert reason in score.detail["failures"]["mine"]
        else:
            assert (score.status, score.value, score.on_failure) == (status, None, policy), text
            assert reason in score.error and score.error.startswith("mine: ")
    assert beat.counts[f"{FAILURES}mine:timeout"] == 1
    assert beat.counts[f"{FAILURES}mine:error"] == len(faults) - 1
    assert await num_pending(broker, keys) == 0


RAISED = {
    "raise KeyboardInterrupt('mine')": "KeyboardInterrupt: mine",
    "raise GeneratorExit": "GeneratorExit",
    "raise TimeoutError('upstream')": "upstream",
    "raise ValueError('\\ud800 no')": "\ufffd no",
    "sys.exit(1)": "SystemExit: 1",
    "raise asyncio.CancelledError": "CancelledError",
    "raise type('Mute', (Exception,), {'__str__': lambda _: 1 / 0})": "Mute: its text cannot be read",
    "raise BaseExceptionGroup('all', [KeyError('x'), SystemExit(3)])": "KeyError: 'x'; SystemExit: 3",
}
IN_TASKS = {
    "async def inner(): raise KeyboardInterrupt('inner')\nawait asyncio.create_task(inner())": "inner",
    "asyncio.get_running_loop().stop()\nraise ValueError('went on')": "went on",
}


@pytest.mark.parametrize("name", ["plain", "awaited"])
async def test_whatever_is_raised_is_that_calls_outcome_at_once(tmp_path: Path, name: str) -> None:
    is_async = name == "awaited"
    pool = Pool(f"{obedient_functions(tmp_path)}:{name}", is_async=is_async)
    waits = "await asyncio.sleep(0.5)" if is_async else "time.sleep(0.1)"
    raised = RAISED | (IN_TASKS if is_async else {})
    try:
        first = await pool.score(f"print(chr(0xD800)); {waits}")
        calls = [pool.score(code, 30, index=index) for index, code in enumerate([*raised, waits])]
        async with asyncio.timeout(120):
            *failures, neighbour = await asyncio.gather(*calls, return_exceptions=True)
        for failure, said in zip(failures, raised.values(), strict=True):
            assert isinstance(failure, AttemptError) and not failure.is_timeout
            assert said in str(failure)
        assert isinstance(neighbour, RewardOutcome)
        assert neighbour.components["pid"] == first.components["pid"]  # nobody was killed
    finally:
        await pool.close()


async def test_a_process_whose_loop_has_ended_is_replaced(tmp_path: Path) -> None:
    pool = Pool(f"{obedient_functions(tmp_path)}:awaited", is_async=True)
    loop = "asyncio.get_running_loop()"
    try:
        with pytest.raises(AttemptError, match="died"):
            async with asyncio.timeout(120):
                await pool.score(f"{loop}._closed = True; {loop}.stop(); await asyncio.sleep(60)", 30)
        assert (await pool.score("await asyncio.sleep(0)", 30)).value == 1.0
    finally:
        await pool.close()


class SaysItsCompletion:
    """Requests to a judge whose answer is what it judges."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.words = ""

    async def ask_json(self, *_: Any, **__: Any) -> tuple[str, int, bool]:
        return self.words, 2, False

    def count(self, fault: RemoteFault) -> None:
        self.kinds.append(fault.kind)


READS = """
    import os, time
    def read(words):
        if words == "sleeps": time.sleep(3600)
        if words == "exits": os._exit(3)
        if words == "interrupts": raise KeyboardInterrupt
        return float(words)
"""


@pytest.mark.parametrize("kind", ["regex", "function"])
async def test_reading_a_verdict_is_limited_and_holds_up_nothing(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "verdicts.py"
    path.write_text(dedent(READS))
    said = {"a" * 64 + "b": "within 0.5 s"}
    if kind == "function":
        said = {"sleeps": "within 0.5 s", "exits": "exit code 3", "interrupts": "KeyboardInterrupt"}
    verdict = {"regex": r"(?:a+)+$|\d"} if kind == "regex" else {"function": f"{path}:read"}
    calls = SaysItsCompletion()
    tree = {"servers": "s", "template": "{{ completion }}", "verdict": verdict}
    config = NamedRewardConfig.model_validate({"judge": tree, "timeout_s": 0.5})
    judge = JudgeReward("j", config, dependencies_of(calls, processes=1, threads=1))
    sample = make_sample((0, 0), False, "", "text", None)
    try:
        for calls.words, reason in said.items():
            failing = asyncio.create_task(judge.score(sample))
            await asyncio.sleep(0)  # this loop goes on meanwhile
            assert not failing.done()
            with pytest.raises(RemoteFault, match=f"no verdict: reading it: .*{reason}|{reason}"):
                await failing
        calls.words = "7"
        assert (await judge.score(sample)).value == 7.0
        assert calls.kinds == ["no_verdict"] * len(said)
    finally:
        await judge.close()
