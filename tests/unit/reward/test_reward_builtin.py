"""The built-in rewards: right, wrong and malformed answers, and their forms."""

import os
import signal
import time
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
        answer = row.extra["answer"]
        truth = row.ground_truth
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
    assert caught.value.is_final and caught.value.is_code_error


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


PAIRS = r"""
# Boxes. One that cannot be read is wrong, whatever stands before it.
1 | 12 | We have 7 apples, so \boxed{12.}
0 | 7 | We have $7$ apples, so $\boxed{12.}$
0 | 7 | We have $7$ apples, so $\boxed{\unknown{12}{3}$
0 | 7 | We have $7$ apples, so \boxed{}
0 | 5 | \boxed{5} or \boxed{6
0 | 5 | \boxed{5
1 | 5 | \boxed{6 and \boxed{5}
1 | 5 | \boxed{\boxed{5}}
0 | 3 | \boxed{5 + \fbox{3}}
1 | 8 | \boxed{5 + \fbox{3}}
1 | 12 | so 17 \fbox{12}
0 | 17 | so 17 \fbox{12}
1 | 12 | \boxed 12
1 | \{1,2\} | \boxed{\left\{1, 2\right\}}
1 | 12 | \boxed{12,}
1 | 12 | \boxed{ $12$. }
1 | 12 | \boxed{= 12}
1 | 12. | \boxed{12}
# A sign of percent is a unit.
1 | 50 | \boxed{50\%}
1 | 50\% | \boxed{50}
0 | 50\% | \boxed{0.5}
0 | 0.5 | \boxed{50\%}
0 | \frac{1}{2} | \boxed{50\%}
1 | 12.5\% | \boxed{12.5}
1 | 12.5 | \boxed{12.5 \text{ percent}}
0 | 12.5\% | \boxed{0.125}
1 | 50 | it is 50%
# Words.
1 | true | \boxed{\text{True}}
0 | true | \boxed{\text{False}}
1 | \text{Tuesday} | \boxed{tuesday}
0 | Tuesday | \boxed{\text{Thursday}}
1 | No solution | \boxed{\text{no solution}}
1 | Tuesday | Tuesday
1 | Tuesday | so\n#### Tuesday
0 | Tuesday | It may be Monday or Tuesday or Friday
1 | A | \boxed{\text{(A)}}
0 | A | \boxed{B}
0 | A | \boxed{a}
0 | CAB | \boxed{ABC}
0 | CAB | \boxed{\text{ABC}}
0 | listen | \boxed{silent}
0 | listen | \boxed{s i l e n t}
0 | \{listen\} | \boxed{\{silent\}}
0 | 5 listen | \boxed{5 silent}
0 | AB | \boxed{ab}
1 | ab | \boxed{ba}
0 | x^2 | \boxed{X^2}
0 | x X | \boxed{x^2}
1 | \{\text{red}, \text{blue}\} | \boxed{\text{blue and red}}
0 | \{\text{red}, \text{blue}\} | \boxed{\{\text{red}, \text{green}\}}
0 | (\text{red}, \text{blue}) | \boxed{(\text{blue}, \text{red})}
0 | \text{red} | \boxed{\text{red}, \text{blue}}
1 | \infty | \boxed{\text{infinity}}
# Small decimals agree relatively.
0 | 6.63e-34 | \boxed{1.6e-19}
1 | 6.63e-34 | \boxed{6.63 \times 10^{-34}}
0 | 6.63 \times 10^{-34} | \boxed{6.62 \times 10^{-34}}
0 | 0.0000001 | \boxed{0.0000002}
0 | 0.000001 | \boxed{0.0000014}
0 | 0.0001234 | \boxed{0.0001231}
1 | \frac{1}{2000} | \boxed{0.0005}
0 | \sqrt{2} \times 10^{-20} | \boxed{\sqrt{3} \times 10^{-20}}
0 | 10^{-20} x | \boxed{2 \times 10^{-20} x}
0 | (0.0000001, 1) | \boxed{(0.0000002, 1)}
1 | (0.0000001, 1) | \boxed{(10^{-7}, 1)}
0 | \{10^{-9}, 1\} | \boxed{\{1, 2 \times 10^{-9}\}}
0 | x = 0.0000001 | \boxed{0.0000002}
1 | \frac{1}{3} | \boxed{0.333333}
0 | \frac{1}{3} | \boxed{0.33}
# Bases.
0 | 12_3 | \boxed{12_8}
1 | 12_3 | \boxed{12_{3}}
1 | 12_3 | \boxed{12}
0 | 12_3 | \boxed{5}
0 | 1A_{16} | \boxed{1A_{12}}
1 | \log_2 8 | \boxed{3}
# Numbers as people write them.
1 | 1000 | \boxed{1\,000}
1 | 1000 | \boxed{1 000}
1 | 1000 | \boxed{1{,}000}
1 | 1000 | \boxed{1e3}
1 | 1000 | \boxed{10^{3}}
0 | 35 | \boxed{3,5}
1 | -12 | \boxed{–12}
1 | \frac{3}{2} | \boxed{1 1/2}
1 | \frac{3}{2} | \boxed{1½}
1 | \frac{1}{3} | \boxed{0.\overline{3}}
1 | 5000000 | \boxed{5 \text{ million}}
0 | 5 | \boxed{5 \text{ million}}
1 | 12 | \boxed{12 dollars}
0 | 12 | \boxed{12 squared}
0 | 3 | \boxed{3 \text{ hours } 20 \text{ minutes}}
0 | 3 \text{ hours } 20 \text{ minutes} | \boxed{3 \text{ hours } 40 \text{ minutes}}
1 | 3 \text{ hours } 20 \text{ minutes} | \boxed{3\text{ h }20\text{ min}}
1 | 9.8 \text{ m/s}^2 | \boxed{9.8}
1 | (3 \text{ cm}, 4 \text{ cm}) | \boxed{(3, 4)}
1 | \frac{1}{2} \text{ or } 2 | \boxed{2 \text{ or } \frac{1}{2}}
0 | 12 | \boxed{12 \text{ or } 13 \text{ cm}}
1 | 12 | \boxed{\text{Area} = 12 \text{ cm}^2}
1 | 30^\circ | \boxed{30°}
1 | x^2 | \boxed{x²}
1 | \sqrt{2} | \boxed{√2}
# Sets, tuples, intervals, relations.
0 | (1,2) | \boxed{\{1,2\}}
0 | (1,2,3) | \boxed{\{1,2,3\}}
0 | [1,2) | \boxed{[1,2]}
1 | (1,2) | \boxed{1 < x < 2}
1 | 1 < x < 2 | \boxed{(1,2)}
1 | x = 5 | \boxed{5 = x}
0 | x = 5 | \boxed{y = 5}
"""


@pytest.mark.parametrize("pair", [line for line in PAIRS.strip().splitlines() if not line.startswith("#")])
def test_math_pays_right_answers_in_any_form_and_no_others(pair: str) -> None:
    reward, truth, solution = pair.split(" | ", 2)
    assert math_equivalence.compute_score("", solution.replace("\\n", "\n"), truth) == int(reward)


def test_math_that_takes_for_ever_is_a_timeout_and_not_a_zero() -> None:
    with pytest.raises(AttemptError, match=r"longer than 0.2 s of CPU time") as caught:
        math_equivalence.compute_score("", "\\boxed{\\prod_{n=1}^{100000} (n^2+x)}", "1", limit_s=0.2)
    assert caught.value.is_timeout and caught.value.is_final


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_limit_of_math_that_python_drops_is_raised_again() -> None:
    """Python drops what is raised while it frees an object, or in a callback of its garbage collector."""

    class SlowToFree:
        def __del__(self) -> None:
            begun = time.process_time()
            while time.process_time() - begun < 0.2:
                pass

    begun = time.monotonic()
    with pytest.raises(AttemptError, match=r"0\.1 s of CPU time") as caught, math_equivalence._limit(0.1):
        SlowToFree()
        while time.monotonic() - begun < 50.0:  # below the limit of the clock
            pass
    assert caught.value.is_timeout and caught.value.is_final


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_limit_of_the_clock_is_raised_again_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(math_equivalence, "BACKSTOP_S", -4.9)

    class SlowToFree:
        def __del__(self) -> None:
            time.sleep(0.2)

    with pytest.raises(AttemptError) as caught, math_equivalence._limit(5.0):
        SlowToFree()
        time.sleep(60.0)
    assert caught.value.is_timeout and not caught.value.is_final


def test_a_limit_of_math_that_comes_after_the_comparison_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    set_timer = signal.setitimer
    numbers = {signal.ITIMER_PROF: signal.SIGPROF, signal.ITIMER_REAL: signal.SIGALRM}
    late = []
    raised = []

    def comes_as_it_is_ended(timer: int, *seconds: float) -> None:
        if seconds == (0,):
            late.append(timer)
            try:
                signal.raise_signal(numbers[timer])
            except BaseException as error:
                raised.append(error)
        set_timer(timer, *seconds)

    monkeypatch.setattr(signal, "setitimer", comes_as_it_is_ended)
    with math_equivalence._limit(5.0):
        pass
    assert set(late) == numbers.keys() and raised == []


@pytest.mark.parametrize(("number", "is_final"), [(signal.SIGPROF, True), (signal.SIGALRM, False)])
def test_a_limit_of_math_is_final_by_cpu_time_and_not_by_the_clock_of_a_busy_machine(number, is_final):
    with pytest.raises(AttemptError) as caught, math_equivalence._limit(5.0):
        assert signal.getitimer(signal.ITIMER_PROF)[0] == pytest.approx(5.0, abs=1.0)
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 30.0
        os.kill(os.getpid(), number)
        for _ in range(1000):
            pass  # the handler runs between two instructions
    assert caught.value.is_timeout and caught.value.is_final is is_final
    assert signal.getitimer(signal.ITIMER_PROF)[0] == signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


@pytest.mark.parametrize(
    "truth",
    [
        "",
        " ",
        None,
        float("nan"),
        "nan",
        [],
        ["1", None],
        {"answer": 1},
        "\\frac{1}{0}",
        "\\{x \\mid x > 2\\}",
        "?",
    ],
)
def test_math_without_a_readable_ground_truth_fails_for_good(truth: Any) -> None:
    with pytest.raises(AttemptError, match=r"ground truth") as caught:
        math_equivalence.compute_score("", "\\boxed{1}", truth)
    assert caught.value.is_final and caught.value.is_code_error


def test_math_takes_a_list_of_ground_truths_as_alternatives() -> None:
    assert math_equivalence.compute_score("", "\\boxed{2}", ["1", 2]) == 1.0
    assert math_equivalence.compute_score("", "\\boxed{3}", ["1", 2]) == 0.0


def test_exact_match_sets_outer_spaces_aside_and_nothing_else() -> None:
    assert exact_match.compute_score("", " yes\n", "yes") == 1.0
    assert exact_match.compute_score("", "Yes", "yes") == 0.0
    assert exact_match.compute_score("", "Yes", "yes", ignore_case=True) == 1.0
    assert exact_match.compute_score("", "yes it is", "yes") == 0.0
    assert exact_match.compute_score("", "2", ["1", 2]) == 1.0
    assert exact_match.compute_score("", "3", ["1", 2]) == 0.0


def test_exact_match_takes_numbers_as_text_and_accents_in_either_form() -> None:
    assert exact_match.compute_score("", "5", 5) == 1.0
    assert exact_match.compute_score("", "5", 5.0) == 1.0
    assert exact_match.compute_score("", "5.0", 5.0) == 1.0
    assert exact_match.compute_score("", "5.0", 5) == 0.0
    assert exact_match.compute_score("", "true", True) == 1.0
    assert exact_match.compute_score("", "Cafe\u0301", "Caf\u00e9") == 1.0


@pytest.mark.parametrize("truth", [None, "", " ", [], ["a", None], float("nan"), {"answer": "a"}])
def test_exact_match_without_a_ground_truth_fails_for_good(truth: Any) -> None:
    with pytest.raises(AttemptError, match="exact_match needs") as caught:
        exact_match.compute_score("", "None", truth)
    assert caught.value.is_final and caught.value.is_code_error
