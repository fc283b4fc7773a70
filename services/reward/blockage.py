"""Async functions that block in place of awaiting: said in words, in the log and in the heartbeat."""

import time
from typing import Any

import structlog

log = structlog.get_logger(__name__)

SHOWN_S = 60.0
"""How long the heartbeat tells of it."""


class Blockage:
    """What the scoring processes of one function report of their event loops."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._where, self._seen_at, self._num_seen = "", float("-inf"), 0
        self._longest_s = 0.0

    def note(self, beat: dict[str, Any]) -> None:
        """A loop stands still; told the 1st time, the 2nd, the 4th, and so on."""
        if time.monotonic() - self._seen_at > SHOWN_S:
            self._longest_s = 0.0
        self._where, self._seen_at = beat["where"], time.monotonic()
        self._longest_s = max(self._longest_s, beat["blocked_s"])
        self._num_seen += 1
        if self._num_seen & (self._num_seen - 1) == 0:
            log.warning(
                "an async reward function blocks its event loop: it scores one sample at a time",
                reward=self._name,
                blocked_s=round(beat["blocked_s"], 1),
                where=self._where,
                remedy="await what takes time, or declare it with plain `def`: then it runs in threads",
            )

    @property
    def note_text(self) -> str:
        """What there is to say now; empty where all is well."""
        if time.monotonic() - self._seen_at > SHOWN_S:
            return ""
        return f"{self._name} blocks its event loop, up to {self._longest_s:.1f} s: {self._where}"
