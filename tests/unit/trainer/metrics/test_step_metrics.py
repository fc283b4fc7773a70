"""The numbers of a step, and what it tells Prometheus, computed by hand."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from tests.support.samples import changed
from tests.support.sessions import make_segment, make_session
from tests.support.training import make_score, trainer_config
from tests.support.trajectories import make_trajectory
from tidemill.common.wire.choices import Rows
from tidemill.common.wire.messages import Choices, Commit, Trajectory
from tidemill.services.trainer.algorithm.losses.sums import Sums
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.group_filter import GroupFilter
from tidemill.services.trainer.groups.sample import make_sample
from tidemill.services.trainer.metrics.option_metrics import source_metrics
from tidemill.services.trainer.metrics.step_metrics import (
    observe_step,
    stage_metrics,
    staleness_shares,
    step_metrics,
)
from tidemill.services.trainer.policy.policy import UpdateResult
from tidemill.services.trainer.step import MiniBatch, StepResult


def sample_of(ticket: int, index: int, num_tokens: int, spans: Any, finish: str = "stop") -> Trajectory:
    return make_trajectory(
        ticket, index, group_size=2, prompt_ids=np.arange(5, dtype=np.int32),
        completion_ids=np.arange(num_tokens, dtype=np.int32), logprobs=np.zeros(num_tokens, np.float32),
        spans=spans, finish=finish,
    )  # fmt: skip


def group_of(samples: list[Trajectory], scores: list[Any]) -> Group:
    ticket = samples[0].ticket
    group = Group(ticket, 4, dict(enumerate(samples)), dict(enumerate(scores)))
    group_filter = GroupFilter(trainer_config(reward__min_group_size=1, max_staleness=3))
    assert group_filter.apply(group, step=4) is None
    return group


def two_samples() -> Group:
    samples = [sample_of(0, 0, 2, ((4, 0),)), sample_of(0, 1, 4, ((2, 0),))]
    return group_of(samples, [make_score(0, 0, 1.0), make_score(0, 1, 0.0)])


def step_of(*groups: Group) -> StepResult:
    return StepResult(list(groups), [MiniBatch([], Sums(), UpdateResult(grad_norm=0.25, lr=1e-3))])


def step_of_two_groups() -> StepResult:
    first = group_of(
        [sample_of(0, 0, 2, ((4, 0),)), sample_of(0, 1, 4, ((3, 0), (4, 3)), finish="length")],
        [
            make_score(0, 0, 1.0, latency_s=1.0, components={"format": 1.0, "length": None}),
            make_score(0, 1, 0.0, latency_s=2.0, components={"format": 0.0}),
        ],
    )
    second = group_of(
        [sample_of(1, 0, 3, ((2, 0),)), sample_of(1, 1, 1, ((4, 0),))],
        [make_score(1, 0, 0.5, latency_s=3.0), make_score(1, 1, None, latency_s=6.0)],
    )
    sums = Sums(
        sequences=3, tokens=9, denominator=4.5, loss_sum=-9.0, entropy_sum=18.0, kl_sum=0.45,
        rollout_kl_sum=0.9, clipped_low=1, clipped_high=2, clipped_dual=3, weight_sum=9.9, weight_max=1.5,
        weights_bounded=3, raw_weight_sum=12.0, raw_weight_square_sum=20.0, mismatch_sum=1.8,
        mismatch_max=0.7,
    )  # fmt: skip
    return StepResult([first, second], [MiniBatch([], sums, UpdateResult(grad_norm=0.25, lr=1e-3))])


def test_rewards_are_those_that_were_trained_on_and_completions_those_that_were_made():
    """Rewards 1, 0, 0.5 of a batch: unbiased deviation 0.5, as TRL logs it. The first group's is sqrt(0.5);
    one sample has none. Of trained tokens 3 are new, 3 one step old and 3 two; one sample has no reward."""
    numbers = step_metrics(4, step_of_two_groups(), num_dropped=3, step_time_s=1.5)
    expected = {
        "reward": 0.5, "reward_std": 0.5, "reward_group_std": math.sqrt(0.5) / 2, "frac_reward_zero_std": 0.5,
        "scores/failed_ratio": 0.25, "scores/latency_s": 3.0, "rewards/format/mean": 0.5,
        "rewards/format/std": math.sqrt(0.5), "groups_dropped": 3.0, "groups_dropped_ratio": 3 / 5,
        "step_time_s": 1.5, "completions/mean_length": 2.5, "completions/min_length": 1.0,
        "completions/max_length": 4.0, "completions/clipped_ratio": 0.25, "completion_tokens": 10.0,
        "step_tokens": 4 * 5 + 10.0, "staleness/max": 2.0, "staleness/mean": (3 * 1 + 3 * 2) / 9,
        **{f"staleness/share_{age}": 3 / 9 for age in range(3)},
    }  # fmt: skip
    assert {name: numbers[name] for name in expected} == pytest.approx(expected)
    absent = ("rewards/length/", "staleness/share_3", "sessions/", "source/", "value/")
    assert not [name for name in numbers if name.startswith(absent)]
    assert {type(value) for value in numbers.values()} == {float}


def test_masked_samples_have_no_staleness_and_count_as_completions():
    group = two_samples()
    masked = replace(group.samples[1], mask=np.zeros(4, dtype=bool))
    numbers = step_metrics(4, step_of(replace(group, samples=[group.samples[0], masked])), 0, 1.0)
    assert (numbers["staleness/max"], numbers["completions/max_length"]) == (0.0, 4.0)


def test_trained_tokens_are_counted_by_their_versions():
    """Of tokens 0 to 2 of version 3 and token 3 of version 4, the second is not trained."""
    samples = [sample_of(0, 0, 2, ((4, 0),)), sample_of(0, 1, 4, ((3, 0), (4, 3)))]
    group = group_of(samples, [make_score(0, 0, 1.0), make_score(0, 1, 0.0)])
    group.samples[1].set_mask(np.array([True, False, True, True]))
    assert group.trained_versions() == [{4: 2}, {3: 2, 4: 1}]
    group.samples[0].set_mask(np.zeros(2, dtype=bool))
    assert group.trained_versions() == [{}, {3: 2, 4: 1}]


def test_a_greedy_baseline_is_no_completion_of_the_step():
    group = two_samples()
    group.trajectories[1] = replaced(group.trajectories[1], is_greedy=True)
    numbers = step_metrics(4, step_of(replace(group, samples=group.samples[:1])), 0, 1.0)
    assert (numbers["staleness/max"], numbers["completions/max_length"]) == (0.0, 2.0)


def test_tokens_older_than_the_last_bucket_of_staleness_are_in_it():
    assert staleness_shares(Counter([0, 8, 9, 40])) == {
        "staleness/share_0": 0.25,
        **{f"staleness/share_{age}": 0.0 for age in range(1, 8)},
        "staleness/share_8": 0.75,
    }
    assert staleness_shares(Counter()) == {}


def test_policy_numbers_are_sums_over_tokens_and_the_loss_is_over_the_denominator():
    numbers = step_metrics(4, step_of_two_groups(), 0, 1.0)
    assert numbers["loss"] == -2.0
    expected = {
        "entropy": 2.0, "kl": 0.05, "rollout_kl": 0.1, "clip_ratio/low_mean": 1 / 9,
        "clip_ratio/high_mean": 2 / 9, "clip_ratio/region_mean": 3 / 9, "clip_ratio/dual_mean": 3 / 9,
        "sampling/importance_sampling_ratio/mean": 1.1, "sampling/importance_sampling_ratio/max": 1.5,
        "sampling/importance_sampling_ratio/bounded_mean": 3 / 9, "sampling/rejected_mean": 0.0,
        "sampling/off_policy_mean": 0.0, "sampling/effective_sample_size": 12**2 / (9 * 20),
        "logprob_gap/mean": 0.2, "logprob_gap/max": 0.7, "grad_norm": 0.25, "learning_rate": 1e-3,
        "update_skipped": 0.0, "micro_batches": 0.0,
    }  # fmt: skip
    assert {name: numbers[name] for name in expected} == pytest.approx(expected)


def test_a_value_head_is_judged_by_the_variance_it_explains():
    # Returns 0, 1, 2, 1: mean 1, variance 0.5. Squared errors of 0.1 each: 1 - 0.1 / 0.5 = 0.8.
    result = step_of_two_groups()
    result.mini_batches[0].sums = Sums(
        tokens=4, value_loss_sum=0.2, value_square_error_sum=0.4, return_sum=4.0, return_square_sum=6.0
    )
    result.mini_batches[0].update = UpdateResult(grad_norm=math.nan, lr=1e-3)
    numbers = step_metrics(4, result, 0, 1.0)
    assert math.isnan(numbers["grad_norm"]), "of the policy's own it says what the policy says"
    assert numbers["value/explained_variance"] == pytest.approx(0.8)
    assert (numbers["value/loss"], numbers["value/return_mean"]) == (0.05, 1.0)


def test_a_step_with_nothing_to_train_has_finite_numbers():
    empty = [sample_of(0, index, 0, ((4, 0),)) for index in range(2)]
    group = group_of(empty, [make_score(0, 0, 1.0), make_score(0, 1, 1.0)])
    update = UpdateResult(0.0, 1e-3, skipped=True, reason="nothing")
    numbers = step_metrics(4, StepResult([group], [MiniBatch([], Sums(), update)]), 0, 1.0)
    assert all(math.isfinite(value) for value in numbers.values())
    assert (numbers["loss"], numbers["update_skipped"], numbers["staleness/max"]) == (0.0, 1.0, 0.0)


def test_a_session_is_one_completion_of_the_models_tokens_and_has_numbers_of_its_own():
    first = make_segment((3, 4), (5, 6), (7, 8, 9), (10,), version=3)
    cached = [
        replaced(turn, num_cached_tokens=cached) for turn, cached in zip(first.turns, (-1, 4), strict=True)
    ]
    first = replaced(first, turns=tuple(cached))
    fork = make_segment((3, 4, 11), (12, 13), version=4)
    long = make_session(0, 0, first, fork, group_size=2, num_faults=2)
    short = make_session(
        0, 1, make_segment((3,), (4,), version=4), group_size=2, finish="length", end="timeout"
    )
    scores = [make_score(0, 0, 1.0), make_score(0, 1, 0.0)]
    result = step_of_two_groups()
    result.groups = [group_of([long, short], scores)]
    numbers = step_metrics(4, result, 0, 1.0)
    expected = {
        "completions/mean_length": 3.0, "completions/max_length": 5.0, "completions/clipped_ratio": 0.5,
        "completion_tokens": 6.0, "step_tokens": 15.0, "staleness/share_0": 4 / 6, "staleness/share_1": 2 / 6,
        "sessions/mean_turns": 2.0, "sessions/mean_segments": 1.5, "sessions/environment_tokens_share": 3 / 9,
        "sessions/tool_calls": 2.0, "sessions/wrong_calls_share": 1 / 4, "sessions/faults": 2.0,
        "sessions/ended_done": 0.5, "sessions/ended_timeout": 0.5, "sessions/ended_max_turns": 0.0,
        "sessions/cached_prompt_share": 4 / 7,
    }  # fmt: skip
    assert {name: numbers[name] for name in expected} == pytest.approx(expected)


def replaced(model: Any, **fields: Any) -> Any:
    return model.model_copy(update=fields)


def test_each_source_has_its_own_numbers_and_a_run_without_sources_none():
    """Source a: rewards 0, 1, 1 and 0; three of them of 2 tokens, one of 4, at step 4 of versions 3 and 2."""
    groups = []
    for ticket, (name, rewards) in enumerate([("a", [0.0, 1.0]), ("b", [0.4, 0.5]), ("a", [1.0, 0.0])]):
        sizes = [2, 4 if ticket == 2 else 2]
        trajectories = {
            i: make_trajectory(
                ticket, i, source=name, completion_ids=np.arange(n, dtype=np.int32),
                logprobs=np.full(n, -0.5, np.float32), spans=((2 if n == 4 else 3, 0),),
            )
            for i, n in enumerate(sizes)
        }  # fmt: skip
        rewarded = zip(map(make_sample, trajectories.values()), rewards, strict=True)
        samples = [changed(sample, reward=reward) for sample, reward in rewarded]
        scores = {i: make_score(ticket, i, reward) for i, reward in enumerate(rewards)}
        groups.append(Group(ticket, 4, trajectories, scores, samples=samples))
    numbers = source_metrics(4, groups, success_threshold=0.5)
    assert numbers == {
        "source/a/groups": 2.0, "source/a/reward": 0.5, "source/a/pass_rate": 0.5,
        "source/a/mean_length": 2.5, "source/a/staleness": (6 * 1 + 4 * 2) / 10, "source/b/groups": 1.0,
        "source/b/reward": 0.45, "source/b/pass_rate": 0.5, "source/b/mean_length": 2.0,
        "source/b/staleness": 1.0,
    }  # fmt: skip
    of_step = step_metrics(4, step_of(*groups), num_dropped=0, step_time_s=1.0)
    assert {name: value for name, value in of_step.items() if name.startswith("source/")} == numbers


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_the_step_says_how_far_the_policy_is_from_each_teacher(weight):
    """Groups that a teacher counts for are not without a lesson, although all rewards are equal."""
    rewards = {"rule": {"function": "math"}, "wise": {"teacher": {"servers": "there"}, "weight": weight}}
    logprobs = np.array([-0.25, -0.5, -1.0], np.float32)  # the rollout's are -0.5
    trajectories = {i: make_trajectory(7, i, group_size=2, spans=((5, 0),)) for i in range(2)}
    scores = {i: make_score(7, i, 1.0, teacher_logprobs=logprobs) for i in range(2)}
    judge = GroupFilter(trainer_config(reward__rewards=rewards, servers__there={}))
    group = Group(7, 5, trajectories, scores)
    assert judge.apply(group, 5) is None
    numbers = step_metrics(5, step_of(group), 0, 1.0)
    # -0.5 + 0.25, 0, -0.5 + 1: twice
    assert numbers["teacher/wise/reverse_kl"] == pytest.approx(0.25 / 3)
    assert numbers["teacher/wise/tokens"] == 6.0
    assert numbers["frac_reward_zero_std"] == (0.0 if weight else 1.0)
    # Of samples with sampling masks the rollout's logprobs are over other ids than the teacher's.
    kept = {"choices": Choices(rows={"kept": Rows.of_lists([[0, 1], [1], [2]])})}
    masked = {i: make_trajectory(7, i, group_size=2, spans=((5, 0),), **kept) for i in range(2)}
    group = Group(7, 5, masked, scores)
    assert judge.select(group) is None
    without = step_metrics(5, step_of(group), 0, 1.0)
    assert "teacher/wise/reverse_kl" not in without and without["teacher/wise/tokens"] == 6.0
    plain = stage_metrics(list(trajectories.values()), [make_score(7, 0)])
    assert numbers["stages/record_bytes"] == plain["stages/record_bytes"] + 4 * 3


def test_samples_that_failed_before_a_reward_saw_them_took_no_time_that_counts():
    played = [make_trajectory(0, n, started_at=10.0, finished_at=12.0, worker="r") for n in range(2)]
    failed = [make_trajectory(0, n, fault="an environment failed", started_at=0.0) for n in range(2, 6)]
    scores = [make_score(0, n, 1.0, latency_s=3.0, scored_at=20.0, worker="w") for n in range(2)]
    failures = [make_score(0, n, None, scored_at=1.0, worker="w") for n in range(2, 6)]
    numbers = stage_metrics([*played, *failed], [*scores, *failures])
    assert numbers == stage_metrics(played, scores)
    assert (numbers["stages/generation_s"], numbers["stages/score_s"]) == (2.0, 3.0)
    assert stage_metrics(failed, failures) == {}


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"tidemill_{name}", labels) or 0.0


def commit_of(finished_at: float) -> Commit:
    return Commit(
        step=4, version=5, groups=(0,), mini_batches=(),
        metrics={"step_time_s": 2.0, "reward": 0.5, "staleness/max": 1.0}, digest="", finished_at=finished_at,
    )  # fmt: skip


def test_tokens_are_counted_by_the_version_that_produced_each():
    names = [("trained_tokens_total", {"staleness": str(age)}) for age in range(3)]
    before = [value(name, **labels) for name, labels in names]
    counted = ("trained_staleness_count", "trained_staleness_sum", "trained_spans_sum")
    ages = [value(name) for name in counted]
    group = group_of(
        [sample_of(0, 0, 2, ((4, 0),)), sample_of(0, 1, 6, ((2, 0), (3, 1), (4, 3)))],
        [make_score(0, 0, 1.0), make_score(0, 1, 0.0)],
    )
    observe_step(commit_of(100.0), StepResult(groups=[group]))
    after = [value(name, **labels) for name, labels in names]
    # Two tokens and three are new, two of the step before, and one is two steps old.
    assert [b - a for a, b in zip(before, after, strict=True)] == [5, 2, 1]
    # Of trajectories counts the oldest token: 0 and 2 steps.
    assert [b - a for a, b in zip(ages, map(value, counted), strict=True)] == [2, 2, 4]
    assert (value("step_metric", metric="reward"), value("committed_version")) == (0.5, 5.0)


def test_each_trajectory_is_timed_from_stage_to_stage():
    stages = ("generate", "reward_queue", "reward", "trainer")
    before = {stage: value("stage_seconds_sum", stage=stage) for stage in stages}
    sample = sample_of(0, 0, 2, ((4, 0),)).model_copy(update={"started_at": 10.0, "finished_at": 13.0})
    second = sample_of(0, 1, 2, ((4, 0),)).model_copy(update={"started_at": 10.0, "finished_at": 12.0})
    scores = [
        make_score(0, 0, 1.0, latency_s=4.0, scored_at=22.0),
        # By a worker whose clock is behind: no stage takes less than no time.
        make_score(0, 1, 0.0, latency_s=4.0, scored_at=15.0),
    ]
    failed = second.model_copy(update={"index": 2, "fault": "an environment failed"})
    scores.append(make_score(0, 2, None, scored_at=20.0))
    group = group_of([sample, second, failed], scores)
    group.trajectory_ids = dict.fromkeys(range(3), "1000-0")
    group.score_ids = {0: "10000-0", 1: "3000-0", 2: "2000-0"}
    observe_step(commit_of(30.0), StepResult(groups=[group]))
    spent = {stage: value("stage_seconds_sum", stage=stage) - before[stage] for stage in stages}
    assert spent == pytest.approx({"generate": 5.0, "reward_queue": 5.0, "reward": 8.0, "trainer": 23.0})
