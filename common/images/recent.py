"""What was read or made of pictures, kept for a while within a number of bytes."""

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """The values that were used last, by the digests of their pictures. Threads may share it.

    Example: within 100 bytes, of the values "a", "b" and "c" of 40 bytes each, "a" is forgotten as "c" comes,
    or "b" where "a" was asked for meanwhile.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._values: OrderedDict[str, tuple[T, int]] = OrderedDict()
        """With its number of bytes, the least recently used first."""
        self._num_bytes = 0
        self._lock = Lock()

    def get(self, digest: str) -> T | None:
        """The value, which counts as used now; None where it is not kept."""
        with self._lock:
            if digest not in self._values:
                return None
            self._values.move_to_end(digest)
            value, _ = self._values[digest]
            return value

    def keep(self, digest: str, value: T, num_bytes: int) -> None:
        """Keep a value, the last one also where it alone is too large."""
        with self._lock:
            _, num_bytes_before = self._values.pop(digest, (None, 0))
            self._values[digest] = (value, num_bytes)
            self._num_bytes += num_bytes - num_bytes_before
            while self._num_bytes > self._max_bytes and len(self._values) > 1:
                _, (_, num_bytes_oldest) = self._values.popitem(last=False)
                self._num_bytes -= num_bytes_oldest
