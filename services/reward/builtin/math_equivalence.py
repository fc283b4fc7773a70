"""Equivalence of mathematical answers, by math-verify: `1/2`, `0.5` and `\\boxed{\\frac{1}{2}}` are equal.

The answer is the last `\\boxed{}` or `\\fbox{}` of the completion; a box that cannot be read is a wrong
answer, and what stands before it never counts. Without a box it is the last expression; without any the
score is 0.

What math-verify takes for equal and is not (small decimals, bases, orders and cases of letters) is decided
here and in `math_text.py`; services/reward/README.md has the table. A ground truth that cannot be read, or
does not equal itself, is a failure and never a score.

Comparison can take for ever on hostile input, so it has a limit of CPU time; running into it is a timeout and
not a zero. Runs in a process of its own, in its main thread, as signals need.
"""

import logging
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import FrameType
from typing import Any

from tidemill.services.reward.answer_tag import answer_tag
from tidemill.services.reward.builtin.math_text import (
    are_words,
    choice_of,
    compare_words,
    formula_of_words,
    is_hedged,
    is_same_choice,
    last_box,
    must_differ,
    normalised,
    numeric_sides,
    readable,
    without_counted,
    without_modulus,
)
from tidemill.services.reward.outcome import AttemptError, truth_error

BACKSTOP_S = 60.0
"""Seconds on the clock beyond the CPU limit: a backstop for code that waits."""
AGAIN_S = 0.1
"""After a limit, how often it is raised again until the comparison ends."""
SMALL = 1e-3
SMALL_TOLERANCE = 1e-5
"""math-verify compares decimals after six places. Numbers below `SMALL` must agree relatively, too."""
_DIGITS = 30
_MISSING = ("", "nan", "null")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    limit_s: float = 5.0,
) -> float:
    """1 where the completion's answer is equivalent to the ground truth, else 0.

    A list of ground truths holds alternative right answers. `limit_s` bounds the CPU time of one comparison.
    """
    warm_up()
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    if not truths:
        raise truth_error("math needs a ground truth, got an empty list")
    with _limit(limit_s):
        # All of them, also after a right one: a truth that cannot be read must not hide behind right answers.
        return float(any([_is_right(_truth_text(truth), solution_str) for truth in truths]))


@cache
def warm_up() -> None:
    """Import the library, and have it build its parsers. Takes seconds, once in a process."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off
    formula = parse("\\boxed{\\frac{1}{2}x}", parsing_timeout=0)
    verify(formula, parse("it is 0.5x", parsing_timeout=0), timeout_seconds=0)


def _truth_text(truth: Any) -> str:
    is_number = isinstance(truth, int | float) and math.isfinite(truth)
    if not is_number and not (isinstance(truth, str) and truth.strip().lower() not in _MISSING):
        raise truth_error(
            f"math needs a number, a text or a list of them as ground truth, got {str(truth)[:80]!r}"
        )
    return str(truth)


def _is_right(truth_text: str, solution: str) -> bool:
    box = last_box(truth_text)
    truth = formula_of_words(normalised(truth_text if box is None else box))
    gold = _parse(truth)
    if not gold and not are_words(truth):
        raise truth_error(f"the ground truth {truth_text[:80]!r} cannot be read as a formula")
    box = last_box(solution)
    if box is None:
        solution = answer_tag(solution)
    # Words without a box count where they are all of the answer.
    answer_text = solution.rpartition("####")[2] if box is None else box
    answer_text = formula_of_words(without_counted(normalised(answer_text), truth))
    is_same = is_same_choice(truth, answer_text)
    if is_same is None:
        is_same = compare_words(truth, answer_text)
    if is_same is not None:
        return is_same
    if box is None:
        answer, answer_text = _last_expression(solution)
        if is_hedged(solution):
            answer = []
    else:
        _, answer_text = choice_of(without_modulus(answer_text, truth))
        answer = _parse(answer_text)
    if answer and not must_differ(truth, answer_text) and _verify(gold, answer):
        # `3 = 4` names two numbers: what stands before the last sign must be right as well.
        sides = [_parse(side) for side in numeric_sides(answer_text)]
        return all(_verify(gold, side) for side in sides if side)
    if gold and not _verify(gold, gold):
        raise truth_error(f"the ground truth {truth_text[:80]!r} does not equal itself")
    return False


def _parse(text: str) -> list[Any]:
    """What math-verify reads in an answer; empty if it can read nothing."""
    from math_verify import LatexExtractionConfig, parse

    if not text:
        return []
    latex = LatexExtractionConfig(boxed_match_priority=0)
    # Without the library's own limits: they use an alarm, and turn its end into a wrong answer.
    read: list[Any] = parse(f"\\boxed{{{text}}}", [latex], fallback_mode="no_fallback", parsing_timeout=0)
    return read


def _last_expression(solution: str) -> tuple[list[Any], str]:
    """The last expression of a text without a box, and how it is written."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    latex = LatexExtractionConfig(boxed_match_priority=-1)
    read = parse(readable(solution), [latex, ExprExtractionConfig()], "first_match", parsing_timeout=0)
    texts = [item for item in read if isinstance(item, str)]
    return [item for item in read if not isinstance(item, str)], "".join(texts)


def _verify(gold: list[Any], answer: list[Any]) -> bool:
    from math_verify import verify

    if not verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=0):
        return False
    return not (len(gold) == len(answer) == 1 and _differ_when_small(gold[0], answer[0]))


def _differ_when_small(gold: Any, answer: Any) -> bool:
    """Whether two expressions that agree to six places are, or contain, small numbers that differ.

    6.63e-34 and 1.6e-19 both round to 0. Tuples, sets, matrices and equations are compared by element.
    """
    from sympy import Eq, Expr, FiniteSet, Interval, MatrixBase, Tuple

    if gold == answer:
        return False
    if isinstance(gold, Eq) and isinstance(answer, Eq):
        return _differ_when_small(gold.lhs - gold.rhs, answer.lhs - answer.rhs) and _differ_when_small(
            gold.lhs - gold.rhs, answer.rhs - answer.lhs
        )
    if isinstance(gold, Eq) or isinstance(answer, Eq):
        gold = gold.rhs if isinstance(gold, Eq) else gold
        answer = answer.rhs if isinstance(answer, Eq) else answer
    if isinstance(gold, MatrixBase) and isinstance(answer, MatrixBase):
        return any(map(_differ_when_small, gold.flat(), answer.flat()))
    if isinstance(gold, Interval) and isinstance(answer, Interval):
        return _differ_when_small(gold.start, answer.start) or _differ_when_small(gold.end, answer.end)
    if isinstance(gold, FiniteSet | Tuple) and isinstance(answer, FiniteSet | Tuple):
        if len(gold.args) != len(answer.args):
            return False
        for element in gold.args:
            if all(_differ_when_small(element, candidate) for candidate in answer.args):
                return True
        return False
    return isinstance(gold, Expr) and isinstance(answer, Expr) and _differ_at_a_point(gold, answer)


def _differ_at_a_point(gold: Any, answer: Any) -> bool:
    """Whether two expressions have small, different values where their symbols have certain values."""
    from sympy import Derivative, Integral, Limit, Product, Sum

    if (gold + answer).has(Derivative, Integral, Limit, Product, Sum):
        return False  # their values may take long, and they are no decimals
    names = sorted({symbol.name for symbol in gold.free_symbols | answer.free_symbols})
    values = {name: (index + 2) / (index + 3) for index, name in enumerate(names)}
    sizes = []
    try:
        for expression in (gold, answer):
            point = {symbol: values[symbol.name] for symbol in expression.free_symbols}
            sizes.append(complex(expression.subs(point).doit().evalf(_DIGITS)))
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return False  # not a number: a function, or infinity
    largest = max(map(abs, sizes))
    if not 0 < largest < SMALL:
        return False
    return abs(sizes[0] - sizes[1]) > SMALL_TOLERANCE * largest


class _LimitReached(BaseException):
    """Not an `Exception`: the library turns those into wrong answers."""


@contextmanager
def _limit(limit_s: float) -> Iterator[None]:
    """Bound the CPU time of this process, and far behind it the time on the clock.

    A comparison that used up its CPU time would do so again: that is final. The clock may run on because the
    machine is busy: that is not.
    """

    is_bounded = True

    def stop(number: int, _frame: FrameType | None) -> None:
        if is_bounded:
            raise _LimitReached(number)

    timers = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}
    before = {number: signal.signal(number, stop) for number in timers}
    # Again and again: Python drops what is raised while it frees an object, or by its garbage collector.
    signal.setitimer(signal.ITIMER_PROF, limit_s, AGAIN_S)
    signal.setitimer(signal.ITIMER_REAL, limit_s + BACKSTOP_S, AGAIN_S)
    try:
        try:
            yield
        finally:
            is_bounded = False
    except _LimitReached as reached:
        is_final = reached.args[0] == signal.SIGPROF
        seconds = f"{limit_s:g} s of CPU time" if is_final else f"{limit_s + BACKSTOP_S:g} s"
        message = f"comparing the formulas took longer than {seconds}"
        raise AttemptError(message, is_timeout=True, is_final=is_final) from None
    finally:
        for number, timer in timers.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])
