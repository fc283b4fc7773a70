"""The environment of `make chaos ARGS="--sessions"`: a sum, and one more try where the first answer is wrong.

A server knows the sums (`sums_server.py`). Where it is away, or was restarted and knows nothing of the
session, a call raises; now and then it does so by itself. That is a fault, and must end in another play of
the session, never in a reward.
"""

import json
import random
import time
import urllib.request
from typing import Any

FAULTS = 0.01
"""Share of calls that raise."""
STEP_S = 0.005
TIMEOUT_S = 10.0


class Sums:
    """Passes on what the model says, once or twice."""

    def __init__(self, address: str) -> None:
        self._address, self._session = address, ""

    def reset(self, row: dict[str, Any]) -> None:
        """Begin a session on the server."""
        self._session = self._ask("", prompt=str(row["prompt"]), answer=str(row["ground_truth"]))

    def step(self, text: str) -> tuple[str, float, bool]:
        """What the server says to it; in the middle of that this may be killed."""
        time.sleep(STEP_S)
        if random.random() < FAULTS:
            raise ConnectionError("this environment fails now and then")
        observation, reward, is_done = self._ask(f"/{self._session}", text=text)
        return observation, reward, is_done

    def _ask(self, path: str, **message: str) -> Any:
        url = f"{self._address}/sessions{path}"
        with urllib.request.urlopen(url, json.dumps(message).encode(), TIMEOUT_S) as answer:
            return json.load(answer)
