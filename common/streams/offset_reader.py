"""Reads a stream by offset, and repairs its position after a loss of Redis.

A server that takes over may lack the newest entries, and give new ones ids by a clock that is behind: then
there are unread entries below a reader's position. So hashes of some entries that were read are kept, and the
reader goes back to the newest of these that is unchanged. That is valid among entries of one server's history
only. So its owner says up to where no other server had taken over (`trust`), and what is kept for later
leaves out the entries above (`sure`).
"""

from typing import Generic, TypeVar

import xxhash

from tidemill.common.redis.broker import Broker
from tidemill.common.streams.entries import START, Entry, Garbled, id_order
from tidemill.common.streams.log import ReadSize, block_for, entries_of
from tidemill.common.wire.messages import Message

MAX_RUNGS = 256
"""If there are more, every second one is removed: they stay spread over all that was read."""
LOOKED_AT_ONCE = 16

Rung = tuple[str, str]
"""Id of an entry, and a hash over its values."""

M = TypeVar("M", bound=Message)


class Trail:
    """Rungs in the order of reading, spread evenly."""

    def __init__(self, rungs: list[Rung] | None = None) -> None:
        # A checkpoint's JSON has lists in place of tuples.
        self.rungs: list[Rung] = [(entry_id, digest) for entry_id, digest in rungs or []]
        self._sure_to = self.rungs[-1][0] if self.rungs else START
        """Up to this id, entries are known to be of one server's history."""
        self._stride = 1
        """Every so many entries, one becomes a rung."""
        self._num_passed = 0

    @property
    def sure(self) -> list[Rung]:
        """The rungs that are known to be of one history."""
        return [rung for rung in self.rungs if id_order(rung[0]) <= id_order(self._sure_to)]

    def follow(self, entry_id: str, raw: list[bytes]) -> None:
        """Note an entry that was read; `raw` is its fields as Redis lists them."""
        self._num_passed += 1
        if self._num_passed % self._stride:
            return
        self.rungs.append((entry_id, _hash(raw)))
        if len(self.rungs) > MAX_RUNGS:
            del self.rungs[::2]
            self._stride *= 2

    def trust(self, entry_id: str) -> None:
        """Note that no other server had taken over when the reader reached this entry."""
        self._sure_to = max(self._sure_to, entry_id, key=id_order)

    async def last_standing(self, broker: Broker, key: str) -> str:
        """Id of the newest rung that the stream holds unchanged; what is above it is forgotten.

        `START` where there is none: all were trimmed, lost or changed.
        """
        while self.rungs:
            newest = self.rungs[-LOOKED_AT_ONCE:]
            replies = await broker.pipeline([("XRANGE", key, entry_id, entry_id) for entry_id, _ in newest])
            for (entry_id, digest), entries in zip(reversed(newest), reversed(replies), strict=True):
                if entries and not isinstance(entries, Exception) and _hash(entries[0][1]) == digest:
                    self._sure_to = entry_id
                    return entry_id
                self.rungs.pop()
        self._sure_to = START
        return START


def _hash(raw: list[bytes]) -> str:
    return xxhash.xxh3_64_hexdigest(b"\0".join(raw))


class OffsetReader(Generic[M]):
    """Reads without a consumer group: the position is the reader's own to keep."""

    def __init__(
        self,
        broker: Broker,
        key: str,
        message_type: type[M],
        position: str = START,
        trail: Trail | None = None,
    ) -> None:
        """With a `trail` of earlier reads, `position` is checked against the stream before the first read."""
        self.broker = broker
        self.key = key
        self.message_type = message_type
        self.position = position
        self.trail = Trail() if trail is None else trail
        self._is_position_checked = trail is None
        self._size = ReadSize(broker.max_bytes)

    @property
    def safe_position(self) -> str:
        """A position with no unread entries below it."""
        return self.position if self._is_position_checked else START

    async def read(self, count: int = 256, block_s: float = 0.0) -> list[Entry[M] | Garbled]:
        """The next entries after the position, which moves on; waits up to `block_s` for the first."""
        if not self._is_position_checked:
            standing = await self.trail.last_standing(self.broker, self.key)
            # Only backwards: entries after the rung are read again; callers drop those that they have.
            self.position = min(self.position, standing, key=id_order)
            # After the check: if that is cancelled, the next read checks again.
            self._is_position_checked = True
        most = self._size.limit(count)
        command = ("XREAD", "COUNT", most, *block_for(block_s), "STREAMS", self.key, self.position)
        reply = await self.broker.execute(*command)
        if not reply:
            return []
        self._size.saw(raw for _, raw in reply[0][1])
        entries = await entries_of(self.broker, reply[0][1], self.message_type)
        # Moved only once the caller gets the entries: a cancelled read is repeated from the old position.
        for entry_id, raw in reply[0][1]:
            self.trail.follow(entry_id.decode(), raw)
        self.position = entries[-1].entry_id
        return entries

    def reread(self, position: str) -> "OffsetReader[M]":
        """A reader that goes back to `position`, or further where the stream has lost its tail since."""
        # A trail of its own: this reader may still get an answer of the server that is gone.
        return OffsetReader(self.broker, self.key, self.message_type, position, Trail(self.trail.sure))
