"""Graders of other projects, each in the interpreter of its own virtual environment.

`outside_side.py` runs there, with the standard library alone; answers go in and scores come back as JSON. The
graders of code get inputs and outputs in the one form that both read (`in_their_form`): what is compared is
how answers are graded, not which forms are read.
"""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.graders.table import Answer
from tidemill.services.reward.sandbox.errors import TestsError
from tidemill.services.reward.sandbox.forms import CallTest, OutputTest, read_tests

SIDE = Path(__file__).with_name("outside_side.py")
NOT_INSTALLED = "not installed"
TIMEOUT_S = 900.0


class OutsideGrader:
    """One grader by its name; `python` is None where it is not installed."""

    def __init__(self, name: str, python: Path | None) -> None:
        self.name = name
        self._python = python

    def score(self, answers: Sequence[Answer]) -> list[float | str]:
        """The score of each answer, or a word in its place: it cannot read it, or it is not installed."""
        if self._python is None:
            return [NOT_INSTALLED] * len(answers)
        request = json.dumps(
            [asdict(answer) | {"inputs_and_outputs": in_their_form(answer)} for answer in answers]
        )
        done = subprocess.run(
            [str(self._python), str(SIDE), self.name],
            input=request,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            raise RuntimeError(f"{self.name} cannot be used by {self._python}: {done.stderr.strip()[-1000:]}")
        scores: list[float | str] = json.loads(done.stdout.splitlines()[-1])
        return scores


def in_their_form(answer: Answer) -> dict[str, Any] | None:
    """`inputs`, `outputs` and `fn_name` of a ground truth of code, arguments and results as JSON; None where
    it has statements, or no tests."""
    if "sandbox" not in answer.reward:
        return None
    try:
        tests = read_tests(answer.ground_truth, answer.extra, packages=True)
    except TestsError:
        return None
    outputs = [test for test in tests if isinstance(test, OutputTest)]
    if len(outputs) == len(tests):
        return {"inputs": [test.stdin for test in outputs], "outputs": [test.expected for test in outputs]}
    calls = [test for test in tests if isinstance(test, CallTest)]
    if len(calls) != len(tests):
        return None
    return {
        "fn_name": calls[0].name,
        "inputs": ["\n".join(map(json.dumps, test.arguments)) for test in calls],
        # The last one is not wrapped into a list of its own.
        "outputs": [json.dumps(test.accepted[-1]) for test in calls],
    }
