"""The example of a reward that fails: its reward, its three runs, and what is shown of them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from examples.outage import compare, flaky_tests
from tidemill.common.config import load_config

QUESTION = {"index": 7}
SUMMARY: dict[str, Any] = {
    "eval_before": 0.23046875,
    "eval_after": 0.90234375,
    "trajectories_trained": 8154,
    "dropped": {"failed_score": 4134, "too_few_scores": 240},
    "lost": 0,
    "wall_s": 61.4,
    "evaluations": [{"version": 0, "score": 0.23046875}, {"version": 24, "score": 0.90234375}],
}


def score_of(answer: str) -> float | None:
    """The score of an attempt; None where it never ends."""

    async def score() -> float | None:
        call = flaky_tests.compute_score("arith", answer, "17", QUESTION)
        task = asyncio.ensure_future(call)
        await asyncio.sleep(0)
        if task.done():
            return task.result()
        task.cancel()
        return None

    return asyncio.run(score())


@pytest.mark.parametrize(
    ("answer", "score"),
    [("", 0.0), ("17", 0.0), ("9+8=17\n#### 18", 0.5), ("#### -17", 0.5), ("####17", 0.0)],
)
def test_a_wrong_answer_has_its_score_at_every_attempt(answer: str, score: float) -> None:
    assert {score_of(answer) for _ in range(20)} == {score}


def test_an_attempt_at_a_right_answer_ends_or_does_not_by_itself() -> None:
    scores = [score_of("#### 17") for _ in range(40)]
    assert set(scores) == {1.0, None}
    drawn = [flaky_tests.times_out("7", "#### 17", attempt) for attempt in range(1, 41)]
    assert [score is None for score in scores] == drawn, "by question, answer and attempt alone"


def test_the_share_that_fails_is_the_one_that_is_given() -> None:
    """Of 4,000 answers; three attempts leave 0.8 cubed without a score."""
    num_failed = 0
    num_always_failed = 0
    for question in map(str, range(4000)):
        failures = [flaky_tests.times_out(question, "#### 17", attempt) for attempt in (1, 2, 3)]
        num_failed += failures[0]
        num_always_failed += all(failures)
    assert num_failed / 4000 == pytest.approx(0.8, abs=0.02)
    assert num_always_failed / 4000 == pytest.approx(0.512, abs=0.02)


def test_the_runs_differ_in_what_a_failure_means_alone() -> None:
    configs = {}
    for arm, changes in compare.ARMS.items():
        words = [f"{name}={value}" for name, value in changes.items()]
        configs[arm] = load_config(compare.CONFIG, words)
    tests = {arm: config.reward.named["tests"] for arm, config in configs.items()}
    assert {arm: (reward.max_attempts, reward.on_failure) for arm, reward in tests.items()} == {
        "zeros": (1, 0.0),
        "left_out": (1, "drop_sample"),
        "attempts": (3, "drop_sample"),
    }
    same = {config.model_copy(update={"reward": None}).model_dump_json() for config in configs.values()}
    assert len(same) == 1
    assert [bool(config.warnings) for config in configs.values()] == [True, False, False]


def test_the_last_line_and_the_table_have_the_numbers_of_the_summary() -> None:
    assert compare.result_of(SUMMARY) == {"before": 0.2305, "after": 0.9023, "lost": 0}
    assert compare.row_of("attempts", SUMMARY)[1:] == ("0.230", "0.902", "8,154", "4,374", 0, "61")


def test_the_curves_of_all_runs_are_drawn_into_one_picture(tmp_path: Path) -> None:
    curves = {label: compare.curve_of(SUMMARY) for label in compare.LABELS.values()}
    compare.plot_evaluations(curves, tmp_path / "outage.png")
    assert (tmp_path / "outage.png").read_bytes()[:6] == b"\x89PNG\r\n"
