"""How many calls one scoring process runs at once: as many as keep a core busy, by what is measured.

A function that computes gets one call at a time, because Python runs one at a time anyway. One that waits for
something else gets more, up to `reward.threads`, while there is demand and the process is mostly idle.
"""

IDLE, BUSY, FULL = 0.35, 0.6, 0.95
"""Loads, as shares of a core: below the first the number doubles, below the second it grows by one, above the
last it shrinks by one."""


class Sizing:
    """The number for all processes of one pool, which run the same function."""

    def __init__(self, most: int) -> None:
        self._most, self.calls = most, 1

    def observe(self, load: float | None, is_wanted: bool) -> None:
        """A call has ended; `load` was measured, `is_wanted` says whether others wait for a place."""
        if load is None:
            return
        if load > FULL:
            self.calls = max(1, self.calls - 1)
        elif is_wanted and load < BUSY:
            self.calls = min(self._most, 2 * self.calls if load < IDLE else self.calls + 1)

    def pin(self) -> None:
        """The function works in main threads only: one call at a time from now on."""
        self._most = self.calls = 1
