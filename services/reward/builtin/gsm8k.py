"""GSM8K answers: the number after the last `####`, as in verl's `strict` method, except for hedged answers.

How forms of the answer 1000 are treated:

| after `####` | strict |
|---|---|
| `1000`, `1,000`, `1000.0`, `1000.`, `$1,000`, `-$5` for -5 | equal as numbers: 1 |
| `1000 dollars`, `1000**` | the number counts, what follows it does not: 1 |
| `2000/2`, `1e3`, `\\boxed{1000}`, `one thousand` | not a plain number: 0 (the reward `math` reads those) |
| `1000 or 20`, `1000-20`, `1000:30`, `1000, 20`, `1000 = 20` | two numbers are no answer: 0 (verl: 1) |
| no `####` at all | 0 |

`flexible` takes the last plain number of the text instead, wherever it stands.
"""

import re
from decimal import Decimal
from typing import Any, Literal

from tidemill.services.reward.outcome import AttemptError

MARK = "####"
# Possessive quantifiers: a number that goes on as a fraction or a power is not cut short to fit.
_NUMBER = r"[-−]?\$?[-−]?(?:\d[\d,]*+(?:\.\d*+)?+|\.\d++)"
# A completion that names several numbers must not be paid for having the right one among them.
_HEDGE = rf"[ \t]*(?:(?<=,)|[-\u2010-\u2015−~:;/*+\u00d7\u00f7=^&|]|\b(?:or|and|to)\b)[ \t]*{_NUMBER}"
_AT_START = re.compile(rf"[ \t]*({_NUMBER})(?![\w/^])(?!{_HEDGE})")
# Other forms of numbers are matched too, without a group, and so skipped as a whole: trying each of their
# digits as a beginning would take time quadratic in their length.
_ANYWHERE = re.compile(rf"(?<![\w.])(?:({_NUMBER})(?![\w/^])|{_NUMBER})")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> float:
    """1 where the answer equals the ground truth as a number, else 0.

    `format_score` is the reward of a wrong answer in the right form. The ground truth may be a number or
    text, also a whole reference solution with its `####`.
    """
    truth = _truth(ground_truth)
    answer = _strict(solution_str) if method == "strict" else _flexible(solution_str)
    if answer is None:
        return 0.0
    return 1.0 if answer == truth else format_score


def _truth(ground_truth: Any) -> Decimal:
    text = str(ground_truth)
    truth = _strict(text) if MARK in text else _strict(MARK + text)
    if truth is None:
        raise AttemptError(f"gsm8k needs a number as ground truth, got {text[:40]!r}", is_final=True)
    return truth


def _strict(text: str) -> Decimal | None:
    _, mark, tail = text.rpartition(MARK)
    found = _AT_START.match(tail) if mark else None
    return _parse(found[1]) if found else None


def _flexible(text: str) -> Decimal | None:
    found = [number for number in _ANYWHERE.findall(text) if number]
    return _parse(found[-1]) if found else None


def _parse(number: str) -> Decimal:
    """The number without signs of currency and grouping. Two minus signs count as one."""
    is_negative = number.lstrip("$").startswith(("-", "−")) or number.startswith(("-", "−"))
    magnitude = Decimal(re.sub(r"[^\d.]", "", number))
    return -magnitude if is_negative else magnitude
