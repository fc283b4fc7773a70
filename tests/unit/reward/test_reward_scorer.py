"""Attempts, backoff, and what a score says in the end."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.rewards import scorer_of
from tests.support.trajectories import make_trajectory
from tidemill.common.config import RewardConfig
from tidemill.common.store import ClaimStore
from tidemill.common.wire.messages import Lane, Score, ScoreStatus
from tidemill.services.reward.outcome import AttemptError, RewardOutcome
from tidemill.services.reward.sample import RewardSample


class ScriptedReward:
    """Gives one answer after another: an outcome, or an error to raise."""

    def __init__(self, *answers: RewardOutcome | BaseException) -> None:
        self.answers, self.samples = list(answers), []  # type: ignore[var-annotated]

    async def score(self, sample: RewardSample) -> RewardOutcome:
        self.samples.append(sample)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def close(self) -> None: ...


async def score(reward: Any, lane: Lane = Lane.TRAIN, **config: Any) -> Score:
    scorer = scorer_of(reward, RewardConfig(**({"backoff_s": 0.0} | config)))
    return await scorer.score(make_trajectory(3, 2), lane)


async def test_a_sample_whose_payload_cannot_be_had_has_failed_and_no_reward_is_asked(tmp_path: Path) -> None:
    store, reward = ClaimStore(tmp_path, 1), ScriptedReward()
    claim = store.check_in(make_trajectory(3, 2))
    next(store.folder.iterdir()).unlink()
    made = await scorer_of(reward, RewardConfig()).score(store.resolve(claim), Lane.TRAIN)
    assert (made.key, made.status, made.value) == ((3, 2), ScoreStatus.FAILED, None)
    assert "cannot be had: No such file" in made.error and not reward.samples


async def test_a_score_carries_value_components_and_who_made_it() -> None:
    made = await score(
        ScriptedReward(RewardOutcome(0.5, {"fluency": 1.0, "judge": None}, {"verdict": "good"}))
    )
    assert (made.key, made.status, made.value, made.attempts) == ((3, 2), ScoreStatus.OK, 0.5, 1)
    assert (made.components, made.detail) == ({"fluency": 1.0, "judge": None}, {"verdict": "good"})
    assert (made.worker, made.error) == ("w1", "")
    assert made.latency_s > 0


async def test_a_failed_attempt_is_repeated_and_all_of_several_are_on_record() -> None:
    made = await score(ScriptedReward(AttemptError("once"), ValueError("twice"), RewardOutcome(1.0)))
    assert (made.status, made.value, made.attempts, made.error) == (ScoreStatus.OK, 1.0, 3, "")
    names, took_s, paused_s, errors = zip(*made.tries, strict=True)
    assert len(set(names)) == 1 and errors[0] == "once" and "twice" in errors[1] and errors[2] == ""
    assert paused_s[0] == 0.0 and min(*took_s, *paused_s) >= 0.0
    assert (await score(ScriptedReward(RewardOutcome(1.0)))).tries == ()
    lost = await score(ScriptedReward(*[AttemptError("no")] * 2), max_attempts=2)
    assert [error for *_, error in lost.tries] == ["no", "no"]


@pytest.mark.parametrize(
    ("error", "status", "attempts"),
    [
        (AttemptError("no"), ScoreStatus.FAILED, 2),
        (AttemptError("late", is_timeout=True), ScoreStatus.TIMEOUT, 2),
        (AttemptError("never", is_final=True), ScoreStatus.FAILED, 1),
    ],
)
async def test_after_the_last_attempt_the_score_has_a_status_and_no_value(
    error: AttemptError, status: ScoreStatus, attempts: int
) -> None:
    reward = ScriptedReward(*[error] * 5)
    made = await score(reward, max_attempts=2)
    assert (made.status, made.value, made.attempts, made.error) == (status, None, attempts, str(error))
    assert len(reward.answers) == 5 - attempts


async def test_cancelling_ends_the_work_at_once() -> None:
    with pytest.raises(asyncio.CancelledError):
        await score(ScriptedReward(asyncio.CancelledError(), RewardOutcome(1.0)))


async def test_the_delay_of_benchmarks_depends_on_the_trajectory_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []

    async def note(delay_s: float) -> None:
        slept.append(delay_s)

    monkeypatch.setattr("tidemill.services.reward.worker.asyncio.sleep", note)
    for worker in ("one", "two"):
        reward = ScriptedReward(*[RewardOutcome(1.0)] * 3)
        scorer = scorer_of(reward, RewardConfig(delay_s=(1.0, 40.0)), worker, seed=7)
        for index in range(3):
            await scorer.score(make_trajectory(5, index), Lane.TRAIN)
    assert slept[:3] == slept[3:]
    assert len(set(slept)) == 3
    assert all(1.0 <= delay_s <= 40.0 for delay_s in slept)
