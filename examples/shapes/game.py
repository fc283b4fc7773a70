"""A game of two turns with pictures: after its answer to the row's picture the model is shown another one.

Each right answer gets half a point. What the second picture shows follows from the row, so all samples of a
group see the same.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import draw

POINTS = 0.5
ROUNDS = 2


class Gallery:
    """One game. The rollout worker makes one for each session."""

    repeatable = True

    def reset(self, row: dict[str, Any]) -> None:
        """The row brings the first picture, its question and the answer."""
        self.answer = str(row["ground_truth"])
        self.randomness = random.Random(row["seed"])
        self.num_answers = 0

    def step(self, text: str) -> tuple[Any, float, bool]:
        """What the model is shown next, the reward of its answer, and whether the game is over."""
        reward = POINTS if text.strip() == self.answer else 0.0
        self.num_answers += 1
        if self.num_answers == ROUNDS:
            return None, reward, True
        question = draw.ask(self.randomness)
        self.answer = question.answer
        blocks = [
            {"type": "text", "text": question.text},
            {"type": "image", "image": draw.draw(question.cells)},
        ]
        return blocks, reward, False
