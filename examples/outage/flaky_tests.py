"""A reward like that of code, the share of tests that an answer passes, which fails on most right answers.

Two tests stand for many. The first, whether the answer has the form `#### 17`, is short. The second, whether
it is right, ends at once for a wrong answer; for a right one it runs to its end, and mostly times out. So
failures are not random: they hit right answers, and a wrong one has its half of the score for certain.
"""

import asyncio
import random
import re
from collections import Counter
from typing import Any

FORM = re.compile(r"#### (-?\d+)\s*")
FAILED_SHARE = 0.8
"""Share of the attempts at right answers that time out."""
FOR_EVER_S = 3600.0

_attempts: Counter[tuple[str, str]] = Counter()
"""Attempts so far, by question and answer."""


def times_out(question: str, answer: str, attempt: int) -> bool:
    """Whether an attempt at a right answer times out: the same each time, and of each attempt by itself."""
    return random.Random(f"{question}\n{answer}\n{attempt}").random() < FAILED_SHARE


async def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> float:
    """0, 0.5 or 1: no test passed, the first, or both; most attempts at a right answer never end."""
    form = FORM.search(solution_str)
    if form is None:
        return 0.0
    if form[1] != ground_truth:
        return 0.5
    question = str(extra_info["index"])
    _attempts[question, solution_str] += 1
    if times_out(question, solution_str, _attempts[question, solution_str]):
        await asyncio.sleep(FOR_EVER_S)
    return 1.0
