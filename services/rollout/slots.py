"""How many groups a worker holds where `max_groups_in_flight` is `auto`: what the engine's KV cache bears.

Sessions grow while they are played, so a number that fits at first may not fit later. Then histories fall
out of the engine's cache between two turns and are computed again, or requests wait. The engine preempts next
to none: it begins no request with which its cache would be nearly full, and those of the oldest ticket first.

Guarantees: one group is always held; without reports of the engine the limit stays as it is.
"""

import math
from dataclasses import dataclass

from tidemill.services.rollout.engines.engine import EngineReport

START, UNREPORTED = 16, 64
"""Where the engine reports, at least, and where it does not."""
FULL = 0.8
"""Share of the KV cache above which the slots do not grow."""
SMALL = 0.4
"""Share of the KV cache under which requests are so few that more of them gain more than histories cost."""
LOST = 0.2
"""Share of what the cache held of histories that may be gone at their next turns."""


@dataclass(slots=True)
class Slots:
    """One lane's. `held` is always the number of groups that it holds now."""

    limit: float
    group_tokens: int = 0
    """Most tokens that a group can come to; 0: not known."""
    _usage: float | None = None
    """Of the KV cache, in the last report."""
    _queue: float = math.inf
    """The shortest since the last group ended: one that comes and goes with a batch of prompts is none."""
    _had: int = 0
    """Tokens that the cache once held of histories, of the turns since the last group ended."""
    _lost: int = 0
    """Of these, in the cache no more."""

    def num_free(self, held: int) -> int:
        return max(1, int(self.limit)) - held

    def report(self, report: EngineReport) -> None:
        if self._usage is None and self.group_tokens:
            # While sessions grow they hold half of what they will, so as many as this fit at any time.
            self.limit = max(self.limit, min(UNREPORTED, 2 * report.num_tokens // self.group_tokens))
        self._usage, self._queue = report.kv_usage, min(self._queue, report.num_waiting)

    def turn(self, num_had: int, num_cached: int) -> None:
        """A turn found `num_cached` tokens in the cache; `num_had` of its history were there before."""
        self._had += num_had
        self._lost += max(0, num_had - num_cached)

    def end(self, held: int) -> None:
        """A group has ended, and `held` others are left."""
        usage = self._usage or 0.0
        lost = usage > SMALL and self._lost > LOST * self._had
        if lost or 0 < self._queue < math.inf:
            self.limit = held  # what has ended is not replaced
        # Only where nearly all are in use (some that ended may not be replaced yet): else they would grow
        # while the trainer issues no tickets.
        elif self._queue == 0 and held + 1 >= FULL * self.limit:
            # So they double in a turnover of all groups, while the cache is empty.
            self.limit += max(0.0, 1.0 - usage / FULL) ** 2
        self._queue, self._had, self._lost = math.inf, 0, 0
