"""How many groups a worker holds where `max_groups_in_flight` is `auto`: what the engine's KV cache bears.

Sessions grow while they are played, so a number that fits at first may not fit later. Then the engine
preempts requests and computes them again, which costs more than to have waited with them.

Guarantees: each report of the engine is acted on once; no cut is made before the last one has taken effect;
one group is always held; an engine that reports nothing keeps `START`.
"""

import math
from dataclasses import dataclass

from tidemill.services.rollout.engines.engine import EngineReport

START = 64
FULL, TOO_FULL = 0.8, 0.9
"""Shares of the KV cache: above one no ticket is taken, above the other the youngest group goes back."""
GROWTH = 0.2
"""Of the slots, in the time in which all groups are replaced, with an empty cache; none at `FULL`."""
UNSETTLED_REPORTS = 3
"""The engine still makes so many of before it has heard of an abort."""


@dataclass(slots=True)
class Slots:
    """One lane's. `held` is always the number of groups that it holds now."""

    limit: float = START
    usage: float = -1.0
    """Of the last report; negative before the first."""
    _queue: float = math.inf
    """The shortest since the last group ended: one that comes and goes with a batch of prompts is none."""
    _num_ignored: int = 0

    def num_free(self, held: int) -> int:
        if held and self.usage > FULL:
            return 0
        return max(1, int(self.limit)) - held

    def report(self, report: EngineReport, held: int) -> bool:
        """Take a report in; returns whether the youngest group is to be handed back."""
        self.usage = report.kv_usage
        self._queue = min(self._queue, report.num_waiting)
        if report.num_preempted:
            self._halve(held)
        if self._num_ignored:
            self._num_ignored -= 1
            return False
        if self.usage <= TOO_FULL or held < 2:
            return False
        self._num_ignored, self.limit = UNSETTLED_REPORTS, min(self.limit, held - 1)
        return True

    def end(self, held: int) -> None:
        """A group has ended, and `held` others are left."""
        if self.usage < 0:
            return
        if 0 < self._queue < math.inf:
            self._halve(held)
        # Only where the slots are what limits: else they would grow while the trainer issues no tickets.
        elif held + 1 >= int(self.limit):
            # After as many ends as there are slots this is the share of a turnover.
            self.limit += GROWTH * max(0.0, 1.0 - self.usage / FULL)
        self._queue = math.inf

    def _halve(self, held: int) -> None:
        if held <= self.limit:  # else the last cut has not taken effect
            self.limit = max(1.0, held / 2)
