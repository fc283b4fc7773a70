"""The tables of answers: one JSON map a line.

    {"name": "integers, one digit off", "kind": "wrong", "reward": {"function": "math"}, "prompt": "6 * 7?",
     "completion": "\\boxed{43}", "ground_truth": "42", "extra": {}, "expected": 0}

`reward` is the config of one reward, `extra` holds the further columns of the row, and `expected` is a
number, or "failed" where no score may be given. A judge's `servers` is `echo`: its answer is the text that
its template makes.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TABLES = ("code_forms.jsonl", "answers.jsonl")
KINDS = ("right", "wrong", "hostile")
FAILED = "failed"
Expected = float | str


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion, and the score that it must earn."""

    name: str
    kind: str
    reward: dict[str, Any]
    prompt: str
    completion: str
    ground_truth: Any
    extra: dict[str, Any]
    expected: Expected

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.name}: kind is {self.kind!r}; expected one of {', '.join(KINDS)}")
        if self.expected != FAILED and not isinstance(self.expected, int | float):
            raise ValueError(f"{self.name}: expected is {self.expected!r}; give a number or {FAILED!r}")


def read_tables(names: Iterable[str] = TABLES) -> dict[str, list[Answer]]:
    """The answers of each table that exists, by its name without the ending."""
    tables: dict[str, list[Answer]] = {}
    for name in names:
        path = FOLDER / name
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines()
            tables[path.stem] = [Answer(**json.loads(line)) for line in lines if line.strip()]
    return tables
