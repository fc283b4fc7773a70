"""How many entries to ask for at once.

Redis closes the connection of who asks for more than its output limit in one answer (1 GiB, see redis.conf),
and would do so again whenever the same is asked again.
"""

from collections.abc import Collection, Iterable

READ_BYTES = 64 << 20
"""What an answer should have at most, unless it is one entry."""
UNSEEN_SHARE = 8
"""Before anything was seen, entries count as this part of the largest that there may be."""


class ReadSize:
    """The largest entries of the last answers decide: what was seen counts half with each that follows."""

    def __init__(self, max_bytes: int | None) -> None:
        """With `max_bytes` of a message; None where that is not known: then the first answer has all."""
        self._entry_bytes = (max_bytes or 0) // UNSEEN_SHARE

    def limit(self, count: int) -> int:
        return max(min(1, count), min(count, READ_BYTES // max(1, self._entry_bytes)))

    def saw(self, replies: Iterable[Collection[bytes] | None]) -> None:
        """Fields and values of each entry of an answer."""
        sizes = [sum(map(len, raw)) for raw in replies if raw]
        self._entry_bytes = max([self._entry_bytes // 2, *sizes])
