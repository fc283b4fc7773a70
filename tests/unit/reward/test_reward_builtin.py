"""The built-in rewards: right, wrong and malformed answers, and their forms."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.support.rows import read_dataset
from tidemill.services.reward.builtin import exact_match, gsm8k, math_equivalence
from tidemill.services.reward.outcome import AttemptError

GSM8K = Path(__file__).parents[3] / "examples" / "gsm8k" / "data"


def test_all_reference_solutions_of_gsm8k_score_1_and_wrong_numbers_0() -> None:
    rows = read_dataset([GSM8K / "train.jsonl", GSM8K / "test.jsonl"])
    assert len(rows) == 8792
    for row in rows:
        answer, truth = row.extra["answer"], row.ground_truth
        reasoning, _, _ = answer.rpartition("####")
        wrong = Decimal(truth) + 1
        assert gsm8k.compute_score(row.data_source, answer, truth, row.extra) == 1.0, row.origin
        assert gsm8k.compute_score(row.data_source, f"{reasoning}#### {wrong}", truth) == 0.0, row.origin
        assert gsm8k.compute_score(row.data_source, reasoning, truth) == 0.0, row.origin


@pytest.mark.parametrize(
    ("solution", "truth", "reward"),
    [
        ("#### 18", "18", 1),
        ("#### 18", 18, 1),
        ("#### 18", 18.0, 1),
        ("####18", "18", 1),
        ("  so it is\n#### 18  \n", "18", 1),
        ("#### 18.0", "18", 1),
        ("#### 18.", "18", 1),
        ("#### $18", "18", 1),
        ("#### 18 dollars", "18", 1),
        ("#### 1,000", "1000", 1),
        ("#### 1000", "1,000", 1),
        ("#### -5", "-5", 1),
        ("#### -$5", "-5", 1),
        ("#### $-5", "-5", 1),
        ("#### −5", "-5", 1),
        ("#### .5", "0.5", 1),
        ("#### 17\nno, wait\n#### 18", "18", 1),
        ("#### 18\nno, wait\n#### 17", "18", 0),
        ("#### 5", "-5", 0),
        ("#### 180", "18", 0),
        ("#### 1.8", "18", 0),
        ("#### 36/2", "36", 0),
        ("#### 36.0/2", "36", 0),
        ("#### 18e3", "18", 0),
        ("#### 18x", "18", 0),
        ("#### \\boxed{18}", "18", 0),
        ("#### eighteen", "18", 0),
        # Hedges: an answer that names a second number has not said which one it is.
        ("#### 18 or 20", "18", 0),
        ("#### 18-20", "18", 0),
        ("#### 18 – 20", "18", 0),
        ("#### 18:30", "18", 0),
        ("#### 18, 20", "18", 0),
        ("#### 18 and $20", "18", 0),
        ("#### 18 / 2", "18", 0),
        ("#### 18 = 20", "18", 0),
        ("#### 18 dollars and 5 cents", "18", 1),
        ("#### 18, as there are 20", "18", 1),
        ("#### 18. 20 are left", "18", 1),
        ("#### 18 - that is all", "18", 1),
        # Signs, currencies and groups of thousands.
        ("#### +3", "3", 1),
        ("#### 3", "+3", 1),
        ("#### + 3", 3, 1),
        ("#### +3", "-3", 0),
        ("#### +$3", "3", 1),
        ("#### - 5", "-5", 1),
        ("#### - 5", "5", 0),
        ("#### –5", "-5", 1),
        ("#### −$5", "-5", 1),
        ("#### $ 5", "5", 1),
        ("#### \\$5", "5", 1),
        ("#### €5", "5", 1),
        ("#### 60%", "60", 1),
        ("#### 60%", "0.6", 0),
        ("#### **18**", "18", 1),
        ("#### \uff11\uff18", "18", 1),
        ("#### \uff11\uff0c\uff10\uff10\uff10\uff0e\uff15", "1000.5", 1),
        ("#### \uff0d\uff15", "-5", 1),
        ("#### 1'000", "1000", 1),
        ("#### 1\u2009000\u2009000", "1000000", 1),
        ("#### 1\u202f000", "1000", 1),
        ("#### 1 000", "1000", 1),
        ("#### 1 000", "1", 0),
        ("#### 1,00,000", "100000", 1),
        ("#### 1000", "1 000", 1),
        # A comma that groups no thousands stands between two numbers, or is a decimal comma.
        ("#### 3,5", "35", 0),
        ("#### 3,5", "3", 0),
        ("#### 1000,200", "1000200", 0),
        ("#### 1,0000", "10000", 0),
        ("#### 18 + 2", "18", 0),
        ("#### 10²", "10", 0),
        ("#### 5½", "5", 0),
        ("####", "18", 0),
        ("####\n18", "18", 0),
        ("18", "18", 0),
        ("", "18", 0),
    ],
)
def test_forms_of_gsm8k_answers(solution: str, truth: Any, reward: float) -> None:
    assert gsm8k.compute_score("", solution, truth) == reward


def test_gsm8k_flexible_takes_the_last_number_and_format_score_rewards_the_form() -> None:
    assert gsm8k.compute_score("", "of 20 there are 18 left.", "18", method="flexible") == 1.0
    assert gsm8k.compute_score("", "18 of 20", "18", method="flexible") == 0.0
    assert gsm8k.compute_score("", "none", "18", method="flexible") == 0.0
    assert gsm8k.compute_score("", "that is 20 - 18", "18", method="flexible") == 1.0
    assert gsm8k.compute_score("", "the change is +3.", "3", method="flexible") == 1.0
    assert gsm8k.compute_score("", "it is -£3.", "-3", method="flexible") == 1.0
    assert gsm8k.compute_score("", "the points 3,5", "35", method="flexible") == 0.0
    assert gsm8k.compute_score("", "#### 17", "18", format_score=0.1) == 0.1
    assert gsm8k.compute_score("", "17", "18", format_score=0.1) == 0.0


@pytest.mark.parametrize("truth", [None, "", "many", "3,5", "18 or 20", "1/2", float("nan"), ["18"]])
def test_gsm8k_without_a_number_to_compare_with_fails_for_good(truth: Any) -> None:
    with pytest.raises(AttemptError, match="gsm8k needs a number") as caught:
        gsm8k.compute_score("", "#### 18", truth)
    assert caught.value.is_final


@pytest.mark.parametrize(
    ("solution", "truth", "reward"),
    [
        ("The answer is \\boxed{18}.", "18", 1),
        ("\\boxed{36/2}", "18", 1),
        ("\\boxed{\\frac{1}{2}}", "0.5", 1),
        ("it is 1/2", "\\frac{1}{2}", 1),
        ("it is $18$", "18", 1),
        ("18.0", 18, 1),
        ("\\boxed{1,000}", "1000", 1),
        ("\\boxed{x^2 + 2x + 1}", "(x+1)^2", 1),
        ("\\boxed{17}, no, \\boxed{18}", "18", 1),
        ("\\boxed{18}, no, \\boxed{17}", "18", 0),
        ("#### 18", "18", 1),
        ("\\boxed{17}", "18", 0),
        ("I do not know", "18", 0),
        ("\\boxed{", "18", 0),
        ("", "18", 0),
        ("\\boxed{18}", "\\boxed{18}", 1),
        ("####18", "18", 1),
        ("so\n####18\n", "18", 1),
        ("####-5", "-5", 1),
        ("-$5", "-5", 1),
        ("it is -$5.", "-5", 1),
        ("#### -$5", "-5", 1),
        ("-\\$1,000", "-1000", 1),
        ("−$5", "-5", 1),
        ("\\boxed{-$5}", "-$5", 1),
        ("-$5", "5", 0),
        ("$x$-$5$", "5", 1),  # two formulas, not a debt
    ],
)
def test_math_compares_by_meaning(solution: str, truth: Any, reward: float) -> None:
    assert math_equivalence.compute_score("", solution, truth) == reward


def test_math_that_takes_for_ever_is_a_timeout_and_not_a_zero() -> None:
    with pytest.raises(AttemptError, match=r"longer than 0.2 s") as caught:
        math_equivalence.compute_score("", "\\boxed{\\prod_{n=1}^{100000} (n^2+x)}", "1", limit_s=0.2)
    assert caught.value.is_timeout and caught.value.is_final


def test_math_without_a_readable_ground_truth_fails_for_good() -> None:
    with pytest.raises(AttemptError, match="cannot be read as a formula") as caught:
        math_equivalence.compute_score("", "\\boxed{1}", "")
    assert caught.value.is_final


def test_exact_match_sets_outer_spaces_aside_and_nothing_else() -> None:
    assert exact_match.compute_score("", " yes\n", "yes") == 1.0
    assert exact_match.compute_score("", "Yes", "yes") == 0.0
    assert exact_match.compute_score("", "Yes", "yes", ignore_case=True) == 1.0
    assert exact_match.compute_score("", "yes it is", "yes") == 0.0
    assert exact_match.compute_score("", "2", ["1", 2]) == 1.0
    assert exact_match.compute_score("", "3", ["1", 2]) == 0.0
