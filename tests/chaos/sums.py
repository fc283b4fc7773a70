"""The environment of `make chaos ARGS="--sessions"`: a sum, and one more try where the first answer is wrong.

No reward of it is 0, so a score of 0 can only come from somebody who made it up. Now and then a call raises:
that is a fault, and must end in another play of the session, never in a reward.
"""

import random
import re
import time
from typing import Any

FAULTS = 0.01
"""Share of calls that raise."""
RIGHT, WRONG = 1.0, 0.125
STEP_S = 0.005


class Sums:
    """Answers what the model says, once or twice."""

    def __init__(self) -> None:
        self._prompt = self._answer = ""
        self._num_steps = 0

    def reset(self, row: dict[str, Any]) -> None:
        """Note what is asked."""
        self._prompt, self._answer = str(row["prompt"]), str(row["ground_truth"])

    def step(self, text: str) -> tuple[str, float, bool]:
        """Right, wrong, or wrong for good; in the middle of it this may be killed."""
        time.sleep(STEP_S)
        if random.random() < FAULTS:
            raise ConnectionError("the server of this environment is away")
        self._num_steps += 1
        numbers = re.findall(r"-?\d+", text)
        if numbers[-1:] == [self._answer]:
            return "", RIGHT / self._num_steps, True
        return self._prompt, WRONG, self._num_steps > 1
