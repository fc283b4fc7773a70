"""The environment of simulated sessions: a few turns, on the worker's loop, and a fault now and then."""

import asyncio
import random
from typing import Any

FAULT_SHARE = 0.05
"""Share of the calls that fail, whoever makes them."""


class Guessing:
    """Answers each turn with a word, and ends after two or three."""

    async def reset(self, **row: Any) -> None:
        """The session begins."""
        self.num_turns = 0

    async def step(self, text: str) -> dict[str, Any]:
        """What the model said."""
        await asyncio.sleep(0.2 * random.random())
        if random.random() < FAULT_SHARE:
            raise ConnectionError("the environment's server is gone")
        self.num_turns += 1
        return {"observation": f"w{self.num_turns}", "done": self.num_turns >= 2 + len(text) % 2}


class RestoredGuessing(Guessing):
    """Goes on with another worker, and never fails."""

    resumable = True

    async def step(self, text: str) -> dict[str, Any]:
        """What the model said."""
        await asyncio.sleep(0.2 * random.random())
        self.num_turns += 1
        return {"observation": f"w{self.num_turns}", "done": self.num_turns >= 2 + len(text) % 2}

    def mark(self) -> dict[str, int]:
        """All there is."""
        return {"turns": self.num_turns}

    async def restore(self, mark: dict[str, int]) -> None:
        """In place of `reset`."""
        self.num_turns = mark["turns"]


class RepeatedGuessing(Guessing):
    """Is played again by another worker, and has forgotten itself now and then."""

    repeatable = True

    async def reset(self, **row: Any) -> None:
        """The session begins."""
        await super().reset(**row)
        self._first = "w0" if random.random() < 0.25 else "w1"

    async def step(self, text: str) -> dict[str, Any]:
        """What the model said."""
        answer = await super().step(text)
        return answer | {"observation": self._first} if self.num_turns == 1 else answer
