"""Equivalence of mathematical answers, by math-verify: `1/2`, `0.5` and `\\boxed{\\frac{1}{2}}` are equal.

The answer is the last `\\boxed{}` of the completion, else its last expression. A completion without any
scores 0. Symbolic comparison can take for ever on hostile input, so it has a limit of its own; running
into it is a timeout and not a zero. Runs in a process of its own, in its main thread, as signals need.
"""

import logging
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tidemill.services.reward.outcome import AttemptError

BOX = "\\boxed"
# math-verify reads neither `####18`, where no number begins at a word's border, nor `-$5`, whose dollar it
# takes for the beginning of a formula. A dollar that another one closes is a formula, and stays. Numbers
# match as a whole only (`++`): trying shorter ones would read the rest again each time.
_MARK = re.compile(r"(?<!#)#{2,}(?=\S)")
_DEBT = re.compile(r"(?<![\w$)\]}])[-−][ \t]?\\?\$(?=(?:\d[\d,]*+(?:\.\d++)?+|\.\d++)(?![\d.,]*[ \t]*\\?\$))")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    limit_s: float = 5.0,
) -> float:
    """1 where the completion's answer is equivalent to the ground truth, else 0. `limit_s` bounds both."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off
    truth, solution_str = (readable(text) for text in (str(ground_truth), solution_str))
    boxed = truth if BOX in truth else f"{BOX}{{{truth}}}"
    latex, plain = LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()
    with _limit(limit_s):
        # Without the library's own limits: they use the same alarm signal, and would cancel ours.
        gold = parse(boxed, [latex], fallback_mode="no_fallback", parsing_timeout=0)
        if not gold:
            raise AttemptError(f"the ground truth {truth[:80]!r} cannot be read as a formula", is_final=True)
        # Only the last of several boxes counts; the library would read adjacent ones as one set.
        solution = solution_str[max(solution_str.rfind(BOX), 0) :]
        answer = parse(solution, [latex, plain], fallback_mode="no_fallback", parsing_timeout=0)
        return float(bool(answer) and verify(gold, answer, timeout_seconds=0))


def readable(text: str) -> str:
    """The text with `####` and negative sums of money in a form that math-verify reads."""
    return _DEBT.sub("-", _MARK.sub(r"\g<0> ", text))


class _LimitReached(BaseException):
    """Not an `Exception`: the library turns those into wrong answers."""


@contextmanager
def _limit(limit_s: float) -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _LimitReached

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    except _LimitReached:
        message = f"comparing the formulas took longer than {limit_s:g} s"
        raise AttemptError(message, is_timeout=True, is_final=True) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
