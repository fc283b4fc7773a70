"""Which stage makes a run slow, from shares of time made by hand."""

import time
from typing import Any

import pytest

from tidemill.common.process.heartbeats import Heartbeat
from tidemill.services.console.look.bottleneck import Bottleneck, Evidence, find_bottleneck, gather_evidence

WORKERS = {"trainer": 1, "rollout": 1, "reward": 1}
BUSY = {"generate": 0.2}


def verdict(trainer: dict[str, float], rollout: Any = None, reward: Any = None, **fields: Any) -> Bottleneck:
    shares = {"trainer": trainer, "rollout": rollout or {}, "reward": reward or {}}
    evidence: dict[str, Any] = {"num_workers": WORKERS, "is_live": True, "step_s": 10.0} | fields
    bottleneck = find_bottleneck(Evidence(shares, **evidence))
    assert bottleneck is not None
    return bottleneck


@pytest.mark.parametrize(
    ("bottleneck", "blame", "said"),
    [
        (
            verdict({"wait:scores": 0.71, "train": 0.29}, BUSY, {"score": 0.95}, score_use=1.0),
            {"reward": 0.71, "trainer": 0.29},
            ("reward", "waits 71% of its time for scores; 1 reward worker scores 100% of what is possible"),
        ),
        (  # who waits for someone that waits for Redis waits for Redis
            verdict(
                {"wait:trajectories": 0.8, "wait:redis": 0.1, "train": 0.1},
                {"generate": 0.1, "wait:redis": 0.3, "wait:tickets": 0.6},
                redis_s=0.05,
            ),
            {"redis": 0.1 + 0.8 * 3 / 4, "rollout": 0.2, "trainer": 0.1},
            ("redis", "trainer 10%, rollout 30%; a command takes 50 ms"),
        ),
        (
            verdict({"wait:trajectories": 0.6, "weights": 0.3, "train": 0.1}, {"wait:weights": 0.9}),
            {"weights": 0.9, "trainer": 0.1},
            ("weights", "the trainer writes them 30% of its time, rollout waits for them 90%"),
        ),
        (
            verdict(
                {"wait:trajectories": 0.8, "train": 0.2},
                {"generate": 0.2, "wait:environment": 0.6, "wait:tickets": 0.2},
            ),
            {"environment": 0.6, "rollout": 0.2, "trainer": 0.2},
            ("environment", "waits 80% of its time for trajectories; rollout waits 60% of its own"),
        ),
        (
            verdict({"train": 0.7, "update": 0.2, "wait:scores": 0.1}, {"generate": 0.5}),
            {"trainer": 0.9, "reward": 0.1},
            ("trainer", "it works 90% of its time (train 70%, update 20%), and waits 10%"),
        ),
        (
            verdict({"wait:disk": 0.6, "train": 0.4}),
            {"disk": 0.6, "trainer": 0.4},
            ("disk", "it takes 60% of the trainer's time"),
        ),
        (
            verdict({"wait:scores": 1.0}, num_workers={"trainer": 1, "rollout": 1, "reward": 0}),
            {"reward": 1.0},
            ("reward", "no reward worker is alive"),
        ),
        (
            verdict({"wait:trajectories": 0.35, "wait:scores": 0.34, "train": 0.31}, max_staleness=0),
            {"rollout": 0.35, "reward": 0.34, "trainer": 0.31},
            ("rollout", "no stage stands out: of a step's time, rollout 35%, reward 34%, trainer 31%"),
        ),
    ],
)
def test_the_largest_part_of_a_step_is_to_blame(bottleneck: Bottleneck, blame: Any, said: Any) -> None:
    assert bottleneck.blame == pytest.approx(blame)
    assert (bottleneck.stage, said[1] in bottleneck.text) == (said[0], True), bottleneck.text
    assert ("stands out" in bottleneck.text) != ("is the bottleneck" in bottleneck.text), "one of the two"


def test_while_no_step_tells_there_is_no_verdict() -> None:
    assert find_bottleneck(Evidence()) is None
    assert find_bottleneck(gather_evidence([], [], max_staleness=1)) is None


def test_a_trainer_that_waits_for_another_stage_is_not_what_the_run_waits_for() -> None:
    trainer = {"train": 0.55, "wait:scores": 0.45}
    assert verdict(trainer, BUSY, {"score": 1.0}, score_use=1.0).stage == "reward"
    bottleneck = verdict(trainer, BUSY, {"score": 1.0}, max_staleness=0)
    assert bottleneck.stage == "trainer" and "max_staleness 1" in bottleneck.advice


def test_one_more_worker_brings_what_the_next_busiest_stage_allows() -> None:
    bottleneck = verdict(
        {"wait:scores": 0.6, "train": 0.4}, {"generate": 0.7, "wait:tickets": 0.3}, score_use=1.0
    )
    assert bottleneck.step_with_one_more_s == pytest.approx({"rollout": 10.0, "reward": 7.0})
    assert "7 s instead of 10 s, at best" in bottleneck.advice
    # Where stages take turns, it brings its part of the step.
    trainer = {"wait:trajectories": 0.5, "wait:scores": 0.3, "train": 0.2}
    more = verdict(trainer, {"generate": 0.5}, {"score": 0.3}, max_staleness=0).step_with_one_more_s
    assert more == pytest.approx({"rollout": 7.5, "reward": 8.5})
    idle = verdict({"wait:scores": 0.9, "train": 0.1}, reward={"score": 1.0}, score_use=0.1)
    assert idle.stage == "reward" and "more workers would not help" in idle.advice


STEP = {
    "step_time_s": 4.0, "time/train_s": 1.0, "time/wait_scores_s": 3.0, "stages/rollout_workers": 2.0,
    "stages/rollout_busy_s": 2.0, "stages/reward_workers": 1.0, "stages/reward_busy_s": 4.0,
    "stages/score_s": 2.0, "stages/scores": 8.0, "time/wait_share": 0.75,
}  # fmt: skip


def beat(role: str, shares: dict[str, float], **counts: float) -> Heartbeat:
    return Heartbeat(role, role, shares=shares, counts=counts, at=time.time())


def test_a_run_whose_processes_are_gone_is_judged_by_its_steps() -> None:
    evidence = gather_evidence([STEP] * 3, [], max_staleness=1)
    assert evidence.shares["trainer"] == {"train": 0.25, "wait:scores": 0.75}
    assert (evidence.busy("rollout"), evidence.busy("reward")) == (0.25, 1.0)
    assert evidence.num_workers == {"rollout": 2, "reward": 1}


def test_living_processes_are_asked_and_the_trainer_only_where_no_step_has_come_for_long() -> None:
    stuck = beat("trainer", {"wait:trajectories": 1.0})
    workers = [stuck, beat("reward", {"score": 1.0}, parallel=8.0, redis_ms=3.0)]
    for since_commit_s, share in ((5.0, 0.0), (70.0, 1.0)):
        evidence = gather_evidence([STEP], workers, max_staleness=1, since_commit_s=since_commit_s)
        assert evidence.share("trainer", "wait:trajectories") == share
    assert evidence.busy("reward") == pytest.approx(8 * 2.0 / (8 * 4.0)), "of what it can do at once"
    assert evidence.redis_s == pytest.approx(0.003)


def test_no_worker_is_advised_while_most_attempts_fail() -> None:
    """More of them would only fail more often."""
    waits = {"wait:scores": 0.9, "train": 0.1}
    for failing_share, is_advised in ((0.9, False), (0.1, True)):
        bottleneck = verdict(waits, BUSY, {"score": 0.95}, score_use=1.0, failing_share=failing_share)
        assert bottleneck.stage == "reward"
        assert ("one more reward worker" in bottleneck.advice) is is_advised
        assert ("90% of the attempts fail" in bottleneck.advice) is not is_advised
    worker = Heartbeat("r", "reward", counts={"failing_share": 0.75}, at=time.time())
    assert gather_evidence([], [worker], max_staleness=1).failing_share == 0.75
    steps = [{"scores/failed_ratio": 0.25}]
    assert gather_evidence(steps, [], max_staleness=1).failing_share == 0.25, (
        "without a process, the steps say"
    )
