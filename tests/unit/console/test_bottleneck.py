"""Which stage makes a run slow, from shares of time made by hand."""

import time
from typing import Any

import pytest

from tidemill.common.process.heartbeats import Heartbeat
from tidemill.services.console.status.bottleneck import Evidence, find_bottleneck, gather_evidence

WORKERS = {"trainer": 1, "rollout": 1, "reward": 1}


def verdict(trainer: dict[str, float], rollout: Any = None, reward: Any = None, **fields: Any) -> Any:
    shares = {"trainer": trainer, "rollout": rollout or {}, "reward": reward or {}}
    given: dict[str, Any] = {"num_workers": WORKERS, "is_live": True, "step_s": 10.0} | fields
    found = find_bottleneck(Evidence(shares, **given))
    assert found is not None
    return found


def test_while_no_step_tells_there_is_no_verdict() -> None:
    assert find_bottleneck(Evidence()) is None
    assert find_bottleneck(gather_evidence([], [], max_staleness=1)) is None


def test_waiting_for_scores_is_blamed_on_reward() -> None:
    found = verdict(
        {"wait:scores": 0.71, "train": 0.29},
        {"generate": 0.3, "wait:tickets": 0.7},
        {"score": 0.95, "wait:trajectories": 0.05},
        score_use=1.0,
    )
    assert (found.stage, found.blame["reward"]) == ("reward", pytest.approx(0.71))
    assert found.text == (
        "reward is the bottleneck: the trainer waits 71% of its time for scores; "
        "1 reward worker scores 100% of what is possible"
    )


def test_waiting_for_someone_who_waits_for_redis_is_blamed_on_redis() -> None:
    found = verdict(
        {"wait:trajectories": 0.8, "wait:redis": 0.1, "train": 0.1},
        {"generate": 0.1, "wait:redis": 0.3, "wait:tickets": 0.6},
        redis_s=0.05,
    )
    assert found.stage == "redis"
    assert found.blame == pytest.approx({"redis": 0.1 + 0.8 * 3 / 4, "rollout": 0.2, "trainer": 0.1})
    assert "a command takes 50 ms" in found.text and "trainer 10%, rollout 30%" in found.text


def test_waiting_for_groups_that_wait_for_their_version_is_blamed_on_the_weights() -> None:
    found = verdict({"wait:trajectories": 0.6, "weights": 0.3, "train": 0.1}, {"wait:weights": 0.9})
    assert found.stage == "weights" and found.blame["weights"] == pytest.approx(0.9)


def test_sessions_that_wait_while_the_engine_has_nothing_to_do_are_blamed_on_the_environment() -> None:
    found = verdict(
        {"wait:trajectories": 0.8, "train": 0.2},
        {"generate": 0.2, "wait:environment": 0.6, "wait:tickets": 0.2},
    )
    assert found.stage == "environment"
    assert found.blame == pytest.approx({"environment": 0.6, "rollout": 0.2, "trainer": 0.2})
    assert found.text == (
        "environment is the bottleneck: the trainer waits 80% of its time for trajectories; "
        "rollout waits 60% of its own for environments, with idle engines"
    )
    assert "rollout.environment.processes" in found.advice


def test_a_trainer_that_works_is_the_bottleneck_itself() -> None:
    found = verdict({"train": 0.7, "update": 0.2, "wait:scores": 0.1}, {"generate": 0.5})
    assert found.stage == "trainer"
    assert (
        found.text
        == "trainer is the bottleneck: it works 90% of its time (train 70%, update 20%), and waits 10%"
    )


def test_a_trainer_that_waits_for_another_stage_is_not_what_the_run_waits_for() -> None:
    trainer = {"train": 0.55, "wait:scores": 0.45}
    assert verdict(trainer, {"generate": 0.2}, {"score": 1.0}, score_use=1.0).stage == "reward"
    assert verdict(trainer, {"generate": 0.2}, {"score": 1.0}, max_staleness=0).stage == "trainer"


def test_a_role_without_a_living_worker_is_said() -> None:
    found = verdict({"wait:scores": 1.0}, num_workers={"trainer": 1, "rollout": 1, "reward": 0})
    assert "no reward worker is alive" in found.text
    assert found.advice == "Start one: python -m tidemill.services.reward --run RUN_ID."


def test_shares_without_a_large_one_are_not_called_a_bottleneck() -> None:
    found = verdict({"wait:trajectories": 0.35, "wait:scores": 0.34, "train": 0.31}, max_staleness=0)
    assert found.text.startswith(
        "no stage stands out: of a step's time, rollout 35%, reward 34%, trainer 31%"
    )


def test_with_one_more_worker_the_next_busiest_stage_sets_the_pace() -> None:
    trainer = {"wait:scores": 0.6, "train": 0.4}
    rollout = {"generate": 0.7, "wait:tickets": 0.3}
    found = verdict(trainer, rollout, score_use=1.0)
    assert found.step_with_one_more_s == pytest.approx({"rollout": 10.0, "reward": 7.0})
    assert "7 s instead of 10 s, at best" in found.advice


def test_stages_that_take_turns_gain_by_their_part_of_the_step() -> None:
    trainer = {"wait:trajectories": 0.5, "wait:scores": 0.3, "train": 0.2}
    more = verdict(trainer, {"generate": 0.5}, {"score": 0.3}, max_staleness=0).step_with_one_more_s
    assert more == pytest.approx({"rollout": 7.5, "reward": 8.5})


def test_workers_whose_slots_are_empty_are_not_said_to_be_too_few() -> None:
    found = verdict({"wait:scores": 0.9, "train": 0.1}, reward={"score": 1.0}, score_use=0.1)
    assert found.stage == "reward" and "more workers would not help" in found.advice


STEP = {
    "step_time_s": 4.0, "time/train_s": 1.0, "time/wait_scores_s": 3.0, "stages/rollout_workers": 2.0,
    "stages/rollout_busy_s": 2.0, "stages/reward_workers": 1.0, "stages/reward_busy_s": 4.0,
    "stages/score_s": 2.0, "stages/scores": 8.0, "time/wait_share": 0.75,
}  # fmt: skip


def test_a_run_whose_processes_are_gone_is_judged_by_its_steps() -> None:
    evidence = gather_evidence([STEP] * 3, [], max_staleness=1)
    assert evidence.shares["trainer"] == {"train": 0.25, "wait:scores": 0.75}
    assert (evidence.busy("rollout"), evidence.busy("reward")) == (0.25, 1.0)
    assert evidence.num_workers == {"rollout": 2, "reward": 1}
    found = find_bottleneck(evidence)
    assert found is not None and found.stage == "reward"


def beat(role: str, shares: dict[str, float], **counts: float) -> Heartbeat:
    return Heartbeat(role, role, shares=shares, counts=counts, at=time.time())


def test_a_trainer_is_judged_by_its_steps_unless_none_has_come_for_long() -> None:
    stuck = beat("trainer", {"wait:trajectories": 1.0})
    for since_commit_s, share in ((5.0, 0.0), (70.0, 1.0)):
        evidence = gather_evidence([STEP], [stuck], max_staleness=1, since_commit_s=since_commit_s)
        assert evidence.share("trainer", "wait:trajectories") == share


def test_reward_workers_are_busy_as_far_as_they_use_what_they_can_do_at_once() -> None:
    workers = [beat("reward", {"score": 1.0}, parallel=8.0, redis_ms=3.0)]
    evidence = gather_evidence([STEP], workers, max_staleness=1)
    assert evidence.busy("reward") == pytest.approx(8 * 2.0 / (8 * 4.0))
    assert evidence.redis_s == pytest.approx(0.003)


def test_what_the_workers_said_last_is_remembered_when_they_are_gone() -> None:
    verdict = {"shares": {"rollout": {"wait:redis": 0.5, "generate": 0.1}, "reward": {}}, "score_use": 0.4}
    evidence = gather_evidence([STEP], [], max_staleness=1, remembered=verdict)
    assert evidence.share("rollout", "wait:redis") == 0.5
    assert (evidence.busy("reward"), evidence.share("reward", "score")) == (0.4, 1.0)
