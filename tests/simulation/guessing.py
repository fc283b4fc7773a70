"""The environment of simulated sessions: a few turns, on the worker's loop, and a fault now and then."""

import asyncio
import random
from typing import Any

FAULT_SHARE = 0.05
"""Share of all calls that fail."""


class Guessing:
    """Answers each turn with a word, and ends after two or three."""

    async def reset(self, **row: Any) -> None:
        self.num_turns = 0

    async def step(self, text: str) -> dict[str, Any]:
        await asyncio.sleep(0.2 * random.random())
        if random.random() < FAULT_SHARE:
            raise ConnectionError("the environment's server is gone")
        self.num_turns += 1
        return {"observation": f"w{self.num_turns}", "done": self.num_turns >= 2 + len(text) % 2}


class RestoredGuessing(Guessing):
    """Resumable: another worker goes on with its state. It never fails."""

    resumable = True

    async def step(self, text: str) -> dict[str, Any]:
        await asyncio.sleep(0.2 * random.random())
        self.num_turns += 1
        return {"observation": f"w{self.num_turns}", "done": self.num_turns >= 2 + len(text) % 2}

    def mark(self) -> dict[str, int]:
        """The whole state."""
        return {"turns": self.num_turns}

    async def restore(self, mark: dict[str, int]) -> None:
        """Called in place of `reset`."""
        self.num_turns = mark["turns"]


class RepeatedGuessing(Guessing):
    """Repeatable: another worker plays its turns again, sometimes with another first answer."""

    repeatable = True

    async def reset(self, **row: Any) -> None:
        await super().reset(**row)
        self._first = "w0" if random.random() < 0.25 else "w1"

    async def step(self, text: str) -> dict[str, Any]:
        answer = await super().step(text)
        return answer | {"observation": self._first} if self.num_turns == 1 else answer
