"""What a reader by offset has passed: tells how far its position can be relied on after a loss of Redis.

A server that takes over may lack the newest entries, and number new ones with a clock that is behind: below
the position of a reader there are entries then that it has never seen. So some of the entries that were read
are kept with a hash, and the reader goes back to the newest of them that stands. That is sound among entries
of one history only: what was read since it was last known that no other server has taken over is left out.
"""

import xxhash

from tidemill.common.redis.broker import Broker
from tidemill.common.streams.entries import START, id_order

MAX_RUNGS = 256
"""When there are more, every second one goes: they stay spread over all that was read."""
LOOKED_AT_ONCE = 16

Rung = tuple[str, str]
"""Id of an entry, and a hash over its values."""


class Trail:
    """Rungs in the order of reading, spread evenly."""

    def __init__(self, rungs: list[Rung] | None = None) -> None:
        self.rungs: list[Rung] = [(entry_id, mark) for entry_id, mark in rungs or []]
        self._sure_to = self.rungs[-1][0] if self.rungs else START
        self._stride, self._num_passed = 1, 0

    @property
    def sure(self) -> list[Rung]:
        """The rungs that are known to be of one history."""
        return [rung for rung in self.rungs if id_order(rung[0]) <= id_order(self._sure_to)]

    def follow(self, entry_id: str, raw: list[bytes]) -> None:
        """The reader has passed an entry."""
        self._num_passed += 1
        if self._num_passed % self._stride:
            return
        self.rungs.append((entry_id, _mark(raw)))
        if len(self.rungs) > MAX_RUNGS:
            del self.rungs[::2]
            self._stride *= 2

    def trust(self, entry_id: str) -> None:
        """No other server has taken over before the reader had come to this entry."""
        self._sure_to = max(self._sure_to, entry_id, key=id_order)

    async def last_standing(self, broker: Broker, key: str) -> str:
        """Id of the newest rung that the stream holds unchanged; what is above it is forgotten.

        `START` where there is none: what stands is trimmed, or nothing does.
        """
        self._sure_to = await self._find_standing(broker, key)
        return self._sure_to

    async def _find_standing(self, broker: Broker, key: str) -> str:
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
