"""How fast the engine usually is, and whether it was slow for one session.

Where a program runs out of its time though the engine was as fast as ever, the policy is the cause: the model
has said too much, or has called what never ends. Where the engine was slow or hung, it says nothing of it.
"""

from collections import deque
from statistics import median

NUM_TURNS = 256
"""Turns of all sessions of a worker whose median is the usual pace."""
SLOW_FACTOR = 3.0
SLOW_S = 5.0
"""Seconds beyond the usual that are never slow: a weight update, or a queue of prefills."""


class EnginePace:
    """Seconds for each token of the turns of one worker."""

    def __init__(self) -> None:
        self._paces: deque[float] = deque(maxlen=NUM_TURNS)

    def note(self, num_tokens: int, engine_s: float) -> None:
        """Note a turn that has ended."""
        self._paces.append(engine_s / max(1, num_tokens))

    def is_slow(self, num_tokens: int, engine_s: float) -> bool:
        """Whether so much time is far more than such a number of tokens usually takes."""
        usual_s = num_tokens * median(self._paces) if self._paces else 0.0
        return engine_s > SLOW_FACTOR * usual_s + SLOW_S
