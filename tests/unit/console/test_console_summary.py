"""The run's summary from its commits: nothing lost, nothing trained twice, and how that would show."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.trajectories import make_config
from tidemill.common.wire.messages import Commit
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.status.report import (
    FEW_STEPS,
    CommitTotals,
    RunSummary,
    failures,
    mean_score,
    merge_evaluations,
    print_report,
    report_tree,
    summary_tree,
)


def commit(step: int, groups: dict[int, list[int]], **fields: Any) -> Commit:
    """A commit that trains the given indices of each ticket, one micro-batch for each."""
    micro_batches = tuple(tuple((ticket, index) for index in indices) for ticket, indices in groups.items())
    return Commit(step=step, version=step + 1, mini_batches=(micro_batches,), groups=tuple(groups), **fields)


def tally_of(*commits: Commit, tickets: int, group_size: int = 2) -> RunSummary:
    summary = RunSummary("run")
    totals = CommitTotals(summary, group_size)
    for item in commits:
        totals.add(item)
    totals.finish(tickets)
    return summary


def test_a_clean_run_loses_nothing() -> None:
    summary = tally_of(commit(0, {0: [0, 1]}), commit(1, {1: [0, 1]}), tickets=2)
    assert (summary.steps, summary.trajectories_trained) == (2, 4)
    assert (summary.lost, summary.duplicated_in_training) == (0, 0)


def test_a_ticket_without_an_end_is_a_lost_group() -> None:
    assert tally_of(commit(0, {0: [0, 1]}), tickets=3).lost == 4


def test_a_group_dropped_with_a_reason_is_not_lost() -> None:
    summary = tally_of(commit(0, {1: [0, 1]}, dropped=((0, -1, "zero_variance"),)), tickets=2)
    assert summary.lost == 0 and summary.dropped == {"zero_variance": 2}


def test_a_group_has_the_size_that_its_commit_says() -> None:
    sizes = {"0": 3, "2": 4}
    whole = commit(0, {0: [0, 1, 2], 1: [0, 1]}, dropped=((2, -1, "stale"),), sizes=sizes)
    summary = tally_of(whole, tickets=3)
    assert (summary.lost, summary.dropped) == (0, {"stale": 4})
    assert tally_of(commit(0, {0: [0, 1]}, sizes={"0": 3}), tickets=1).lost == 1


def test_a_sample_of_a_trained_group_must_be_trained_or_left_out() -> None:
    assert tally_of(commit(0, {0: [1]}), tickets=1).lost == 1
    left_out = commit(0, {0: [1]}, dropped=((0, 0, "failed_score"),))
    assert tally_of(left_out, tickets=1).lost == 0


def test_training_a_sample_in_two_steps_is_a_duplicate() -> None:
    summary = tally_of(commit(0, {0: [0, 1]}), commit(1, {0: [0, 1], 1: [0, 1]}), tickets=2)
    assert summary.duplicated_in_training == 2
    assert summary.trajectories_trained == 4


def test_training_a_sample_in_two_micro_batches_is_a_duplicate() -> None:
    twice = Commit(step=0, version=1, mini_batches=((((0, 0), (0, 1)), ((0, 0),)),), groups=(0,))
    assert tally_of(twice, tickets=1).duplicated_in_training == 1


def test_metrics_of_the_steps_are_summed_up() -> None:
    metrics = [
        {"reward": 0.25, "staleness/max": 0.0, "completion_tokens": 100.0, "step_time_s": 4.0},
        {"reward": 0.75, "staleness/max": 1.0, "completion_tokens": 200.0, "step_time_s": 1.0},
    ]
    steps = [commit(i, {i: [0, 1]}, metrics=item) for i, item in enumerate(metrics)]
    summary = tally_of(*steps, tickets=2)
    assert (summary.reward_first, summary.reward_last) == (0.25, 0.75)
    assert summary.reward_curve == [0.25, 0.75]
    assert summary.max_staleness_seen == 1
    assert summary.tokens_per_s == 60.0


def test_the_numbers_of_sessions_are_summed_up_and_shown() -> None:
    metrics = {"sessions/mean_turns": 3.0, "sessions/environment_tokens_share": 0.5, "sessions/engine_s": 1.0,
               "sessions/environment_s": 3.0, "sessions/faults": 2.0, "sessions/ended_done": 0.75,
               "sessions/ended_max_turns": 0.125, "sessions/ended_timeout": 0.125}  # fmt: skip
    steps = [commit(i, {i: [0, 1]}, metrics=metrics | {"sessions/mean_turns": 3.0 + i}) for i in (0, 1)]
    summary = tally_of(*steps, commit(2, {2: [0, 1]}), tickets=3)
    assert summary.sessions == {
        "mean_turns": 3.5, "environment_tokens_share": 0.5, "environment_time_share": 0.75,
        "truncated_share": 0.25, "faults": 4.0,
    }  # fmt: skip
    lines = {line.label: line.value for line in report_tree(summary_tree(summary, make_config())).children}
    assert (lines["turns a session"], lines["time in the environment"]) == (3.5, 0.75)
    assert tally_of(commit(0, {0: [0, 1]}), tickets=1).sessions == {}


def test_evaluations_that_a_restart_forgot_come_from_the_metrics_file() -> None:
    record = {"kind": "evaluation", "version": 0, "set": "held", "time": 1.0, "score": 0.2}
    merged = merge_evaluations([{"version": 4, "set": "held", "score": 0.8}], [record])
    assert [(item["version"], item["set"], item["score"]) for item in merged] == [
        (0, "held", 0.2),
        (4, "held", 0.8),
    ]


def test_an_evaluation_is_the_mean_over_its_datasets_that_have_a_score() -> None:
    evaluations = [
        {"version": 0, "score": 0.2},
        {"version": 0, "score": 0.4},
        {"version": 0, "score": float("nan")},
        {"version": 1, "score": None},
    ]
    assert mean_score(evaluations, 0) == pytest.approx(0.3)
    assert mean_score(evaluations, 1) is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({}, None),
        ({"steps": 3}, "3 of 4 steps"),
        ({"lost": 1}, "never accounted for"),
        ({"duplicated_in_training": 1}, "more than once"),
        ({"max_staleness_seen": 2}, "staleness 2"),
        ({"eval_after": 0.5}, "expected a gain of 0.4"),
        ({"eval_before": None}, "no evaluation has a score"),
    ],
)
def test_each_broken_expectation_is_named(changes: dict[str, Any], complaint: str | None) -> None:
    config = make_config(trainer={"steps": 4, "max_staleness": 1}, expect={"eval_gain": 0.4})
    good = {"steps": 4, "eval_before": 0.3, "eval_after": 0.7, "max_staleness_seen": 1}
    found = failures(RunSummary("run", **(good | changes)), config)
    assert (found == []) if complaint is None else (len(found) == 1 and complaint in found[0])


def test_the_report_of_a_long_run_says_what_one_more_worker_would_have_brought(tmp_path: Path) -> None:
    verdict = {"text": "reward is the bottleneck", "advice": "With one more reward worker: 7 s"}

    def printed(steps: int) -> str:
        out = io.StringIO()
        print_report(Console(file=out), RunFolder(tmp_path, "one"), {"steps": steps, "bottleneck": verdict})
        return out.getvalue()

    assert f"{verdict['text']}. {verdict['advice']}" in printed(FEW_STEPS)
    assert verdict["advice"] not in printed(FEW_STEPS - 1)
