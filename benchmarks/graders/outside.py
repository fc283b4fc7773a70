"""Graders of other projects, each in the interpreter of its own virtual environment.

`outside_side.py` runs there, with the standard library alone; answers go in and scores come back as JSON.
"""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.graders.table import Answer

SIDE = Path(__file__).with_name("outside_side.py")
NOT_INSTALLED = "not installed"
TIMEOUT_S = 900.0


class OutsideGrader:
    """One grader by its name; `python` is None where it is not installed."""

    def __init__(self, name: str, python: Path | None) -> None:
        self.name, self._python = name, python

    def score(self, answers: Sequence[Answer]) -> list[float | str]:
        """The score of each answer, or a word in its place: it cannot read it, or it is not installed."""
        if self._python is None:
            return [NOT_INSTALLED] * len(answers)
        request = json.dumps([asdict(answer) for answer in answers])
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
