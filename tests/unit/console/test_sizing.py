"""How many workers, how much memory and disk: the formulas, with numbers worked out by hand."""

import time
from dataclasses import replace
from typing import Any

import pytest

from tests.support.trajectories import make_config
from tidemill.common.errors import ConfigError
from tidemill.common.process.heartbeats import Heartbeat
from tidemill.services.console.plan.plan import what_times_rest_on
from tidemill.services.console.plan.sizing import (
    Plan,
    Workers,
    disk_bytes,
    limit_of_scores,
    needed_reward,
    needed_rollout,
    records_held,
    redis_bytes,
    step_time,
)
from tidemill.services.console.plan.stage_times import StageTimes, assumed_times, measured_times
from tidemill.services.console.status.bottleneck import find_bottleneck, gather_evidence


def config_of(staleness: int = 1, **sections: Any) -> Any:
    trainer = {"groups_per_step": 4, "group_size": 5, "max_staleness": staleness, "steps": 100}
    return make_config(trainer=trainer | sections.pop("trainer", {}), **sections)


TIMES = StageTimes(
    source="by hand",
    completions=20,
    completion_tokens=100,
    rollout_tokens_per_s=50,
    generation_s=6.0,
    score_s=10.0,
    score_p95_s=14.0,
    scores_per_s=0.4,
    trainer_s=9.0,
    redis_s=1.0,
)


def test_stages_that_overlap_take_as_long_as_the_slowest() -> None:
    step = step_time(config_of(), TIMES, Workers(2, 4))
    # 2,000 tokens / (50 x 2); 20 scores / (0.4 x 4); (6 + 14 + 10) / 2 steps
    assert (step.rollout_s, step.reward_s, step.way_s, step.step_s) == (20.0, 12.5, 15.0, 20.0)
    assert step.slowest == "rollout"


def test_stages_that_take_turns_take_all_their_times() -> None:
    step = step_time(config_of(staleness=0), TIMES, Workers(2, 4))
    assert step.step_s == 20 + 10 + 10


def test_where_no_stage_is_slow_the_way_of_a_ticket_is_the_bound() -> None:
    step = step_time(config_of(), TIMES, Workers(8, 16))
    assert (step.slowest, step.step_s) == ("staleness", 15.0)
    assert step_time(config_of(staleness=3), TIMES, Workers(8, 16)).slowest == "trainer"


def test_rollout_workers_keep_up_with_the_trainer_and_no_faster_than_tickets_come() -> None:
    assert needed_rollout(config_of(staleness=3), TIMES) == 4  # 40 s alone, over the trainer's 10 s
    assert needed_rollout(config_of(staleness=1), TIMES) == 3  # over the 15 s of a ticket's way


def test_reward_workers_keep_up_with_the_slowest_other_stage_with_head_room_for_the_tail() -> None:
    # Of rollout's 20 s, 80 %, less (14 - 10) / 2 s: 14 s for 50 s of work.
    assert needed_reward(config_of(), TIMES, rollout=2) == 4
    # Of the trainer's 10 s, less 4 / 4 s: 7 s.
    assert needed_reward(config_of(staleness=3), TIMES, rollout=8) == 8


def test_a_long_tail_leaves_at_least_a_quarter_of_the_time() -> None:
    slow = assumed_times("reward=1s,reward_p95=100s,rollout=1000tok/s,trainer=10s,at_once=2", config_of())
    assert needed_reward(config_of(staleness=99), slow, rollout=100) == 2  # 10 s in 8 s less 0.99 s
    assert needed_reward(config_of(staleness=9), slow, rollout=100) == 4  # in a quarter of 11 s


def test_limits_of_a_judge_say_when_workers_cannot_help() -> None:
    judge = {
        "model": "m",
        "template": "{response}",
        "base_urls": ["http://localhost:1/v1"],
        "limits": {"concurrency": 3},
    }
    rewards = {"opinion": {"judge": judge}, "length": {"function": "exact_match"}}
    assert limit_of_scores(config_of(reward={"rewards": rewards}), TIMES) == ("opinion", 0.3)
    assert limit_of_scores(config_of(), TIMES)[0] == ""


def test_redis_holds_what_is_under_way_and_what_the_oldest_checkpoint_needs() -> None:
    no_archive = {"archive": {"enabled": False}}

    def held(streams: Any = no_archive, **trainer: Any) -> int:
        trainer = {"checkpoint_every": 3, "keep_checkpoints": 2} | trainer
        return records_held(config_of(trainer=trainer, streams=streams))

    assert held({}) == (1 + 1) * 20, "the archive has the rest"
    assert held() == (1 + 1 + 3 * 2) * 20
    assert held(max_staleness=0) == (1 + 6) * 20
    assert held(steps=4) == (2 + 4) * 20
    assert records_held(config_of(streams={"trim": False})) == 102 * 20
    assert held(checkpoint_every=0) == 102 * 20
    plain = config_of(streams=no_archive)
    assert redis_bytes(plain, 1000) == records_held(plain) * 1000 + (20 + 32) * (2000 + 16 * 20)


def test_redis_holds_what_waits_for_the_archive_as_far_as_there_is_so_much() -> None:
    # Two steps of 20 samples are under way, and of the commits 32 stay.
    least = 2 * 20 * 1000 + 32 * (2000 + 16 * 20)
    assert redis_bytes(config_of(), 1000) - least == 100 * 20 * 1000, "102 steps in all"
    small = config_of(streams={"archive": {"segment_mb": 0.25}})
    assert redis_bytes(small, 1000) - least == 1.5 * 2**18


def test_disk_is_what_is_kept_and_what_is_being_written() -> None:
    config = config_of(trainer={"keep_weights": 3, "keep_checkpoints": 2})
    sizes = disk_bytes(config, replace(TIMES, record_bytes=1000), model_bytes=100)
    assert sizes == {"weights": 500, "checkpoints": 3 * 600, "archive": 100 * 20 * 1000}
    bounded = config_of(streams={"archive": {"keep_gb": 0.001}})
    assert disk_bytes(bounded, replace(TIMES, record_bytes=1000), 100)["archive"] == int(0.001 * 2**30)


def test_assumed_times_are_read_with_their_units() -> None:
    config = config_of(reward={"function": "gsm8k", "processes": 3})
    times = assumed_times("reward=500ms, rollout=2e3tok/s,trainer=0.5min,tokens=80tok", config)
    assert (times.score_s, times.rollout_tokens_per_s, times.trainer_s) == (0.5, 2000, 30)
    assert (times.completion_tokens, times.scores_per_s) == (80, 6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("reward=5s", "lacks rollout, trainer"),
        ("reward=5s,speed=3", "'speed=3' is not understood"),
        ("reward=fast,rollout=1,trainer=1", "reward=5s"),
        ("reward=5s,rollout=10s,trainer=1", "rollout=2000tok/s"),
        ("reward=0s,rollout=10,trainer=1", "a number above 0"),
    ],
)
def test_an_assumption_that_is_not_understood_says_what_is(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        assumed_times(text, config_of())


STEP = {
    "step_time_s": 10.0, "time/train_s": 3.0, "time/weights_s": 1.0, "time/wait_redis_s": 0.5,
    "time/wait_scores_s": 5.5, "stages/scores": 20.0, "stages/score_s": 4.0, "stages/score_p95_s": 6.0,
    "stages/reward_workers": 2.0, "stages/reward_busy_s": 20.0, "stages/rollout_workers": 1.0,
    "stages/rollout_busy_s": 4.0, "stages/generation_s": 2.0, "completions/mean_length": 50.0,
    "groups_dropped_ratio": 0.2, "stages/record_bytes": 900.0,
}  # fmt: skip


def test_times_are_measured_from_the_steps_of_a_run(tmp_path: Any) -> None:
    evidence = gather_evidence([STEP] * 4, [], max_staleness=1)
    times = measured_times([STEP] * 4, evidence, tmp_path, "a run")
    assert times is not None
    # A fifth of the groups is replaced: 25 completions for the 20 that are trained.
    assert (times.completions, times.trainer_s, times.redis_s) == (25.0, 4.0, 0.5)
    assert times.rollout_tokens_per_s == pytest.approx(25 * 50 / 4)
    assert times.scores_per_s == pytest.approx(25 / 20)
    verdict = find_bottleneck(evidence)
    plan = Plan(config_of(), times, Workers(1, 2), Workers(1, 2), verdict)
    assert plan.bottleneck == "reward" and plan.as_dict()["step"]["measured_s"] == 10.0


def test_steps_of_an_older_release_tell_nothing(tmp_path: Any) -> None:
    old = {"step_time_s": 10.0, "time/train_s": 3.0}
    assert measured_times([old], gather_evidence([old], [], max_staleness=1), tmp_path, "") is None


def test_times_of_another_step_size_are_scaled() -> None:
    scaled = TIMES.scaled_to(config_of(trainer={"groups_per_step": 8}))
    assert (scaled.completions, scaled.trainer_s, scaled.score_s) == (40, 18.0, 10.0)
    filtered = replace(TIMES, completions=30, trained=20)  # a third is replaced
    assert filtered.scaled_to(config_of(trainer={"groups_per_step": 8})).completions == 60


def test_the_number_of_workers_does_not_change_how_fast_one_is() -> None:
    one, many = config_of(), config_of(reward={"workers": 9}, rollout={"workers": 4})
    assert what_times_rest_on(one) == what_times_rest_on(many)
    assert what_times_rest_on(one) != what_times_rest_on(config_of(reward={"processes": 7}))


@pytest.mark.parametrize(
    ("parallel", "scores_per_s"),
    # 20 scores of 4 s in 10 s: of 16 at once half is in use, and 4 a second are possible. With 8 at once all
    # is in use, and with one at once the rest of the 4 s is waiting within the worker: it does 2 a second.
    [(16.0, 4.0), (8.0, 2.0), (1.0, 2.0)],
)
def test_a_reward_worker_can_do_more_than_it_did_as_far_as_it_had_room(
    tmp_path: Any, parallel: float, scores_per_s: float
) -> None:
    step = STEP | {"groups_dropped_ratio": 0.0}
    worker = Heartbeat("w", "reward", counts={"parallel": parallel}, at=time.time())
    evidence = gather_evidence([step], [worker], max_staleness=1)
    times = measured_times([step], evidence, tmp_path, "a run")
    assert times is not None and times.scores_per_s == pytest.approx(scores_per_s)
