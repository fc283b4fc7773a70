"""How many groups a worker holds with `max_groups_in_flight: auto`: as many as fit the engine's KV cache.

Sessions grow while they are played, so a number that fits at first may not fit later. Then histories are
evicted from the engine's cache between two turns and computed again, or requests wait. The engine hardly ever
preempts: it starts no request that would nearly fill its cache, and starts those of the oldest ticket first.

Guarantees: at least one group may be held; without reports of the engine the limit stays as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tidemill.services.rollout.engines.engine import EngineReport

START = 16
UNREPORTED = 64
"""First limits: of an engine that reports its cache (or more), and of one that does not."""
FULL = 0.8
"""Share of the KV cache above which the slots do not grow."""
SMALL = 0.4
"""Share of the KV cache below which evicted histories do not matter: more requests gain more."""
LOST = 0.2
"""Share of the cached tokens of histories that may be evicted before their next turns."""


@dataclass(slots=True)
class Slots:
    """The slots of one lane. `held` is always the number of groups that it holds now."""

    limit: float
    group_tokens: int = 0
    """Most tokens that a group can have; 0: not known."""
    _usage: float | None = None
    """Share of the KV cache in use, in the last report."""
    _queue: float = math.inf
    """The engine's shortest queue since the last group ended: short peaks after new prompts do not count."""
    _had: int = 0
    """Tokens of histories that the cache had held, summed over the turns since the last group ended."""
    _lost: int = 0
    """Tokens of these that the cache no longer held."""

    def num_free(self, held: int) -> int:
        return max(1, int(self.limit)) - held

    def report(self, report: EngineReport) -> None:
        if self._usage is None and self.group_tokens:
            # Growing sessions have half of their final tokens on average, so this many fit at any time.
            self.limit = max(self.limit, min(UNREPORTED, 2 * report.num_tokens // self.group_tokens))
        self._usage = report.kv_usage
        self._queue = min(self._queue, report.num_waiting)

    def turn(self, num_had: int, num_cached: int) -> None:
        """Record a turn: `num_had` tokens of its history were once cached, and `num_cached` still are."""
        self._had += num_had
        self._lost += max(0, num_had - num_cached)

    def end(self, held: int) -> None:
        """Record the end of a group; `held` others are left."""
        usage = self._usage or 0.0
        lost = usage > SMALL and self._lost > LOST * self._had
        if lost or 0 < self._queue < math.inf:
            self.limit = held  # what has ended is not replaced
        # Only if nearly all are in use (some that ended may not be replaced yet): else the limit would grow
        # while the trainer issues no tickets.
        elif self._queue == 0 and held + 1 >= FULL * self.limit:
            # While the cache is empty, the limit doubles with one turnover of all groups.
            self.limit += max(0.0, 1.0 - usage / FULL) ** 2
        self._queue = math.inf
        self._had = 0
        self._lost = 0


class CachedHistory:
    """How much of one sample's history the engine has cached, from turn to turn.

    Example: of a turn's prompt 96 tokens come from the cache. The next turn's prompt begins with the same
    tokens, and 32 come from the cache: 64 are lost.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._prompt_ids: Sequence[int] = ()
        self._version = -1
        self._num_sleeps = 0
        self._most_cached = 0
        """Most tokens of this history that were cached in any turn so far."""

    def add_turn(self, prompt_ids: Sequence[int], version: int, num_cached: int, num_sleeps: int = 0) -> None:
        """Record a turn, in which `num_cached` tokens of its prompt came from the cache; `version` is that of
        its first token, and `num_sleeps` counts those of the engine up to its end."""
        is_same_cache = version == self._version and num_sleeps == self._num_sleeps
        goes_on = is_same_cache and prompt_ids[: len(self._prompt_ids)] == self._prompt_ids
        # Tokens of an older version, of another history, or that a sleep has dropped, do not count as lost.
        if not goes_on:
            self._most_cached = 0
        elif self._most_cached:
            self._slots.turn(self._most_cached, num_cached)
        self._prompt_ids = prompt_ids
        self._version = version
        self._num_sleeps = num_sleeps
        self._most_cached = max(self._most_cached, num_cached)
