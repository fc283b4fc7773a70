"""The game that the demo's model learns to play: find a number, told only whether it is higher or lower."""

from typing import Any

NUMBERS = range(1, 8)
GUESSES = 3
"""Enough for whoever halves what is left each time, and for nobody else every time."""


class Guess:
    """One game. The rollout worker makes one for each session."""

    def reset(self, row: dict[str, Any]) -> None:
        """The row brings the number to be found."""
        self.number = int(row["ground_truth"])
        self.num_guesses = 0

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """What the model hears, the reward of its guess, and whether the game is over."""
        self.num_guesses += 1
        guess = int(text) if text.strip().isdigit() else None
        if guess == self.number:
            return None, 1.0, True
        if self.num_guesses >= GUESSES:
            return None, 0.0, True
        if guess is None:
            return " number? ", 0.0, False
        return (" higher " if guess < self.number else " lower "), 0.0, False
