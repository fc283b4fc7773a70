"""A few of the entries that a reader has passed, so that it can tell how much of its stream is still there.

After Redis has lost its tail, a position beyond the end proves nothing: what is appended then may get smaller
ids than what was read before, because the clock of the server was set back or is that of another machine. A
reader that stayed where it was would skip it. What still stands is found by id and content.
"""

import xxhash

from common.broker import Broker
from common.entries import START

MAX_RUNGS = 256
"""When there are more, every second one goes: they stay spread over all that was read."""
LOOKED_AT_ONCE = 16

Rung = tuple[str, str]
"""Id of an entry, and a hash over its values."""


class Trail:
    """Rungs in the order of reading, spread evenly."""

    def __init__(self, rungs: list[Rung] | None = None) -> None:
        self.rungs: list[Rung] = [(entry_id, mark) for entry_id, mark in rungs or []]
        self._stride, self._num_passed = 1, 0

    def follow(self, entry_id: str, raw: list[bytes]) -> None:
        """The reader has passed an entry."""
        self._num_passed += 1
        if self._num_passed % self._stride:
            return
        self.rungs.append((entry_id, _mark(raw)))
        if len(self.rungs) > MAX_RUNGS:
            del self.rungs[::2]
            self._stride *= 2

    async def last_standing(self, broker: Broker, key: str) -> str:
        """Id of the newest rung that the stream holds unchanged; what is above it is forgotten.

        `START` where there is none: what stands is trimmed, or nothing does.
        """
        while self.rungs:
            newest = self.rungs[-LOOKED_AT_ONCE:]
            found = await broker.pipeline([("XRANGE", key, entry_id, entry_id) for entry_id, _ in newest])
            while newest:
                (entry_id, mark), entries = newest.pop(), found.pop()
                if entries and not isinstance(entries, Exception) and _mark(entries[0][1]) == mark:
                    return entry_id
                self.rungs.pop()
        return START


def _mark(raw: list[bytes]) -> str:
    return xxhash.xxh3_64_hexdigest(b"\0".join(raw))
