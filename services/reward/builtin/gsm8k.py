"""GSM8K answers: the number after the last `####`, as in verl's `strict` method, except for hedged answers.

How forms of the answer 1000 are treated:

| after `####` | strict |
|---|---|
| `1000`, `1,000`, `1000.0`, `1000.`, `+1000`, `$1,000`, `€ 1000`, and `-$5`, `$-5`, `- 5` for -5 | equal: 1 |
| `1'000`, `1 000` (also with no-break or thin spaces), `1,00,000` for 100000 | groups of thousands: 1 |
| digits, signs and points of full width; the minus sign or a dash before a number | as in ASCII: 1 |
| `1000 dollars`, `1000%`, `1000**`, `**1000**` | the number counts, what stands around it does not: 1 |
| `2000/2`, `1e3`, `\\boxed{1000}`, `10²`, `5½`, `one thousand` | no plain number: 0 (`math` reads most) |
| `1000 or 20`, `1000-20`, `1000:30`, `1000, 20`, `3,5`, `1000 = 20` | two numbers: 0 (verl: 1 for most) |
| `1000 (20)`, `5 feet 3 inches`, `5 1/2`, `1000, but maybe 20` | two numbers: 0 |
| `1000, as 20 are there`, `1000. 20 are left`, `1000 (980 + 20 = 1000)` | an explanation follows: 1 |
| `5 thousand`, `5 squared`, `5 plus`, `5 and a half`, `5√x`, `5\\sqrt{x}` | goes on as a number: 0 |
| no `####` at all | 0 |

A ground truth is read in the same way; one that is no plain number is a failure with its reason, never a 0.

`flexible` takes the last plain number of the text instead, wherever it stands.
"""

import re
from decimal import Decimal
from typing import Any, Literal

from tidemill.services.reward.outcome import truth_error

MARK = "####"
_MINUS = "\u2010\u2011\u2013\u2212-"
_SEPARATORS = ",'\u2019\u00a0\u2009\u202f"


def _number_regex(space: str, separators: str) -> str:
    """Possessive quantifiers: a number that goes on as a fraction or a power is not cut short to fit."""
    sign = f"[+{_MINUS}]?"
    signs = rf"{sign}{space}(?:\\?[$€£¥₹])?{space}{sign}{space}"
    thousands = rf"\d{{1,3}}(?!\d)(?:[{separators}]\d{{3}}(?!\d))*+"
    lakhs = r"\d{1,2}(?:,\d{2}(?!\d))++,\d{3}(?!\d)"
    return rf"{signs}(?:(?:{lakhs}|{thousands}|\d++)(?:\.\d*+)?+|\.\d++)"


# Spaces belong to a number only where it has to stand at one place: `20 - 18` ends with 18 and not with -18.
_NUMBER_AT_START = _number_regex("[ \t\u00a0]?", f"{_SEPARATORS} ")
_NUMBER = _number_regex("", _SEPARATORS)
_ANY_NUMBER = rf"(?:{_number_regex('', _SEPARATORS)})(?:[{_SEPARATORS}]\d++)*+"
# A completion that names several numbers must not be paid for having the right one among them.
_HEDGE = rf"[ \t]*(?:[-,\u2010-\u2015−~:;/*+\u00d7\u00f7=^&|]|\b(?:or|and|to)\b)[ \t]*{_NUMBER}"
_CHANGED = (
    r"[ \t-]*(?i:(?:hundred|thousand|[mb]illion|trillion|squared|cubed|times|plus|minus|divided|pi)\b"
    r"|and[ \t]+(?:a|one)[ \t]+(?:half|third|quarter|fourth)\b|√|\\(?:sqrt|frac|dfrac|pi|times|cdot)\b)"
)
_AT_START = re.compile(rf"[ \t]*(?:\*\*|__)?({_NUMBER_AT_START})(?![\w/^])(?!{_HEDGE})(?!{_CHANGED})")
# Digits in words, as in `m2` and `CO2`, are no numbers of their own.
_NUMBER_AFTER = re.compile(rf"(?<![\w.^{{]){_NUMBER}(?!\w)")
# Other forms of numbers are matched too, without a group, and so skipped as a whole: trying each of their
# digits as a beginning would take time quadratic in their length.
_DIGIT = re.compile(r"\d")
_HEDGING = re.compile(
    r"\b(?:or|maybe|perhaps|possibly|could|might|wrong|not|out|either)\b|[-=]>|[→⇒]", re.IGNORECASE
)
_NEW_CLAUSE = re.compile(r"\.\s|\b(?:as|because|since)\b", re.IGNORECASE)
_WORD = re.compile(r"(?!and\b)[A-Za-z]+")
FEW_WORDS = 2
"""A unit is a word; what has more words before its number is an explanation."""
_LONGEST_LINE = 1000
_EQUALS = re.compile(r"=[ \t]*\Z")
_ANYWHERE = re.compile(rf"(?<![\w./^])(?:({_NUMBER})(?![\w/^])|{_ANY_NUMBER})")
_NOT_WIDE = {0xFF01 + offset: 0x21 + offset for offset in range(94)}


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
        raise truth_error(f"gsm8k needs a number as ground truth, got {text[:40]!r}")
    return truth


def _in_ascii(text: str) -> str:
    return text if text.isascii() else text.translate(_NOT_WIDE)


def _strict(text: str) -> Decimal | None:
    _, mark, tail = _in_ascii(text).rpartition(MARK)
    match = _AT_START.match(tail) if mark else None
    if match is None:
        return None
    answer = _parse(match[1])
    return None if _is_hedged(answer, match, tail) else answer


def _is_hedged(answer: Decimal, match: re.Match[str], tail: str) -> bool:
    """Whether another number belongs to the answer: `18 19`, `18 feet 3 inches`, `18, but it could be 19`.

    An explanation may have numbers: `18, as there are 20`, `18. 20 are left`, `18 (9 + 9 = 18)`.
    """
    line, _, _ = tail[match.end() : match.end() + _LONGEST_LINE].partition("\n")
    if _DIGIT.search(line) is None:
        return False
    further = list(_NUMBER_AFTER.finditer(line))
    if not further or all(_parse(number[0]) == answer for number in further):
        return False
    last = further[-1]
    if _EQUALS.search(line, 0, last.start()) and _parse(last[0]) == answer:
        return False
    before = line[: further[0].start()]
    if _HEDGING.search(before):
        return True
    if match[1].endswith(".") or _NEW_CLAUSE.search(before):
        return False
    return len(_WORD.findall(before)) < FEW_WORDS


def _flexible(text: str) -> Decimal | None:
    numbers = [number for number in _ANYWHERE.findall(_in_ascii(text)) if number]
    return _parse(numbers[-1]) if numbers else None


def _parse(number: str) -> Decimal:
    """The number without signs of currency and grouping. Two minus signs count as one."""
    magnitude = Decimal(re.sub(r"[^\d.]", "", number))
    return -magnitude if re.search(f"[{_MINUS}]", number) else magnitude
