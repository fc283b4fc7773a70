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
