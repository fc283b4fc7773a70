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

    resumable = True

    def __init__(self, address: str) -> None:
        self._address = address
        self._session = ""

    def reset(self, row: dict[str, Any]) -> None:
        self.restore({"prompt": str(row["prompt"]), "answer": str(row["ground_truth"]), "tries": 0})

    def mark(self) -> dict[str, Any]:
        """All that the server has to know."""
        return self._mark

    def restore(self, mark: dict[str, Any]) -> None:
        """Another session on the server, which is as far."""
        session = self._ask("", **mark)
        self._mark = dict(mark)
        self._session = session

    def step(self, text: str) -> tuple[str, float, bool]:
        """What the server says to it; in the middle of that this may be killed."""
        time.sleep(STEP_S)
        if random.random() < FAULTS:
            raise ConnectionError("this environment fails now and then")
        observation, reward, is_done = self._ask(f"/{self._session}", text=text)
        self._mark["tries"] += 1
        return observation, reward, is_done

    def _ask(self, path: str, **message: Any) -> Any:
        url = f"{self._address}/sessions{path}"
        with urllib.request.urlopen(url, json.dumps(message).encode(), TIMEOUT_S) as answer:
            return json.load(answer)
