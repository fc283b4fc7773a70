"""What a run came to, from its commits: nothing lost, nothing trained twice, and how that would show."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.trajectories import make_config
from tidemill.common.wire.messages import Commit
from tidemill.services.console.look.report import (
    EXPECTED_HOLDS,
    FEW_STEPS,
    CommitTotals,
    EvaluatedSamples,
    RunSummary,
    failures,
    learning_of,
    mean_score,
    print_report,
    report_tree,
    summary_tree,
    verdict_lines,
)
from tidemill.services.console.run.folder import RunFolder


def commit(step: int, groups: dict[int, list[int]], **fields: Any) -> Commit:
    """A commit that trains the given indices of each ticket, one micro-batch for each."""
    micro_batches = []
    for ticket, indices in groups.items():
        micro_batches.append(tuple((ticket, index) for index in indices))
    mini_batches = (tuple(micro_batches),)
    return Commit(step=step, version=step + 1, mini_batches=mini_batches, groups=tuple(groups), **fields)


def totals_of(*commits: Commit, tickets: int) -> RunSummary:
    totals = CommitTotals("run", group_size=2)
    for item in commits:
        totals.add(item)
    return totals.finish(tickets)


FIRST = commit(0, {0: [0, 1]})
TWICE = Commit(step=0, version=1, mini_batches=((((0, 0), (0, 1)), ((0, 0),)),), groups=(0,))


@pytest.mark.parametrize(("commits", "tickets", "lost", "twice", "dropped"), [
    ((FIRST, commit(1, {1: [0, 1]})), 2, 0, 0, {}),
    ((FIRST,), 3, 4, 0, {}),  # tickets without an end
    ((commit(0, {1: [0, 1]}, dropped=((0, -1, "zero_variance"),)),), 2, 0, 0, {"zero_variance": 2}),
    (  # a group has the size that its commit says
        (
            commit(
                0,
                {0: [0, 1, 2], 1: [0, 1]},
                dropped=((2, -1, "stale"),),
                sizes={"0": 3, "2": 4},
            ),
        ),
        3, 0, 0, {"stale": 4},
    ),
    ((commit(0, {0: [0, 1]}, sizes={"0": 3}),), 1, 1, 0, {}),
    ((commit(0, {0: [1]}),), 1, 1, 0, {}),  # neither trained nor left out with a reason
    ((commit(0, {0: [1]}, dropped=((0, 0, "failed_score"),)),), 1, 0, 0, {"failed_score": 1}),
    ((FIRST, commit(1, {0: [0, 1], 1: [0, 1]})), 2, 0, 2, {}),  # in two steps
    ((TWICE,), 1, 0, 1, {}),  # in two micro-batches
])  # fmt: skip
def test_what_is_lost_or_trained_twice_is_counted(commits, tickets, lost, twice, dropped):
    summary = totals_of(*commits, tickets=tickets)
    assert (summary.lost, summary.duplicated_in_training, summary.dropped) == (lost, twice, dropped)


def test_metrics_of_the_steps_are_summed_up() -> None:
    metrics = [
        {"reward": 0.25, "staleness/max": 0.0, "completion_tokens": 100.0, "step_time_s": 4.0},
        {"reward": 0.75, "staleness/max": 1.0, "completion_tokens": 200.0, "step_time_s": 1.0},
    ]
    steps = [commit(i, {i: [0, 1]}, metrics=item) for i, item in enumerate(metrics)]
    summary = totals_of(*steps, tickets=2)
    assert (summary.steps, summary.trajectories_trained) == (2, 4)
    assert (summary.reward_first, summary.reward_last, summary.reward_curve) == (0.25, 0.75, [0.25, 0.75])
    assert (summary.max_staleness_seen, summary.tokens_per_s) == (1, 60.0)


def test_the_numbers_of_sessions_are_summed_up_and_shown() -> None:
    metrics = {"sessions/mean_turns": 3.0, "sessions/environment_tokens_share": 0.5, "sessions/engine_s": 1.0,
               "sessions/environment_s": 3.0, "sessions/faults": 2.0, "sessions/ended_done": 0.75,
               "sessions/ended_max_turns": 0.125, "sessions/ended_timeout": 0.125}  # fmt: skip
    steps = [commit(i, {i: [0, 1]}, metrics=metrics | {"sessions/mean_turns": 3.0 + i}) for i in (0, 1)]
    summary = totals_of(*steps, commit(2, {2: [0, 1]}, dropped=((9, -1, "too_old"),)), tickets=3)
    assert summary.sessions == {
        "mean_turns": 3.5, "environment_tokens_share": 0.5, "environment_time_share": 0.75,
        "truncated_share": 0.25, "faults": 4.0,
    }  # fmt: skip
    summary.best = {"metric": "held", "version": 2, "value": 0.5}
    tree = report_tree(summary_tree(summary, make_config()))
    lines = {line.label: line.value for line in tree.children}
    assert (lines["turns a session"], lines["time in the environment"]) == (3.5, 0.75)
    assert (lines["best version, by held"], lines["left out: too old"]) == ("2 (0.500)", 2)


def test_an_evaluation_is_the_mean_over_its_datasets_that_have_a_score() -> None:
    scores = ((0, 0.2), (0, 0.4), (0, float("nan")), (1, None))
    evaluations = [{"version": version, "score": score} for version, score in scores]
    assert mean_score(evaluations, 0) == pytest.approx(0.3) and mean_score(evaluations, 1) is None


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
        ({"eval_after_samples": EvaluatedSamples(90, 10, "no")}, None),
        (
            {"eval_after_samples": EvaluatedSamples(37, 91, "no")},
            "not known: .*37 of 128 samples; 91 failed: no",
        ),
    ],
)
def test_each_broken_expectation_is_named(changes: dict[str, Any], complaint: str | None) -> None:
    config = make_config(trainer={"steps": 4, "max_staleness": 1}, expect={"eval_gain": 0.4})
    good = {"steps": 4, "eval_before": 0.3, "eval_after": 0.7, "max_staleness_seen": 1}
    problems = failures(RunSummary("run", **(good | changes)), config)
    if complaint is None:
        assert problems == []
    else:
        (problem,) = problems
        assert re.search(complaint, problem)


@pytest.mark.parametrize(
    ("curve", "verdict", "words"),
    [
        ([0.1] * 8, "too_short", "8 steps"),
        ([0.5] * 9, "", ""),
        # Thirds of means 0.2 and 0.8: 0.6 apart, with an error of sqrt((0.01 + 0.01) / 3) = 0.082.
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], "learned", "from 0.200 in the first third"),
        ([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1], "fell", "to 0.200 in the last"),
        # Means 0.2 and 0.3: 0.1 apart, below twice the error.
        ([0.1, 0.2, 0.3, 0.2, 0.2, 0.2, 0.2, 0.3, 0.4], "nothing", "learned nothing"),
    ],
)
def test_a_report_says_whether_the_reward_rose(curve: list[float], verdict: str, words: str) -> None:
    learning, text = learning_of(RunSummary("r", reward_curve=curve))
    assert learning == verdict and words in text


def test_a_run_whose_evaluation_rose_has_not_learned_nothing() -> None:
    noisy = [0.1, 0.2, 0.3, 0.2, 0.2, 0.2, 0.2, 0.3, 0.4]  # twice its error is 0.16
    verdict, text = learning_of(RunSummary("r", reward_curve=noisy, eval_before=0.289, eval_after=0.734))
    assert verdict == "learned"
    assert text.startswith("the evaluation rose from 0.289 to 0.734; the reward went")
    verdict, _ = learning_of(RunSummary("r", reward_curve=noisy, eval_before=0.289, eval_after=0.3))
    assert verdict == "nothing"


def test_the_report_says_what_was_slow_and_what_failed(tmp_path: Path) -> None:
    slow = {"text": "reward is the bottleneck", "advice": "With one more reward worker: 7 s"}

    def printed(**fields: Any) -> str:
        out = io.StringIO()
        print_report(Console(file=out, width=200), RunFolder(tmp_path, "one"), {"bottleneck": slow} | fields)
        return out.getvalue()

    assert f"{slow['text']}. {slow['advice']}" in printed(steps=FEW_STEPS)
    assert slow["advice"] not in printed(steps=FEW_STEPS - 1), "too short to tell"
    learning = {"verdict": "nothing", "text": "learned nothing"}
    assert "failed  1 lost" in printed(failures=["1 lost"]) and "learning  learned" in printed(
        learning=learning
    )


def test_a_mean_says_how_many_samples_it_is_over_and_why_others_failed() -> None:
    row = {"version": 0, "num_samples": 37.0, "num_failed": 91.0, "reason": "KeyError: 'a' (my.py, line 4)"}
    summary = RunSummary("run", steps=4, eval_before=1.0, eval_after=None)
    summary.eval_before_samples = EvaluatedSamples.of([row, {**row, "version": 4}], 0)
    summary.eval_after_samples = EvaluatedSamples(0, 128, "no")
    tree = summary_tree(summary, make_config(trainer={"steps": 4}))
    assert tree["eval_before_samples"] == {
        "num_scored": 37, "num_failed": 91, "reason": "KeyError: 'a' (my.py, line 4)",
    }  # fmt: skip
    lines = {line.label: line.value for line in report_tree(tree).children}
    assert lines["evaluation before"] == (
        "1.000 of 37 of 128 samples; 91 failed: KeyError: 'a' (my.py, line 4)"
    )
    assert lines["evaluation after"] == "none: 0 of 128 samples; 128 failed: no"


def test_a_run_of_which_nothing_was_expected_says_so() -> None:
    def said(**sections: Any) -> str:
        summary = RunSummary("run", steps=4, eval_before=0.1, eval_after=0.9)
        tree = summary_tree(summary, make_config(trainer={"steps": 4}, **sections))
        (line,) = [line for line in verdict_lines(tree) if line.label == "ok"]
        return str(line.value)

    assert "Nothing was expected" in said()
    assert said(expect={"eval_gain": 0.5}) == EXPECTED_HOLDS
