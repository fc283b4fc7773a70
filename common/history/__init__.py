"""What a run has written to its streams, wherever it is now: in Redis, in the archive, or in both."""

from common.history.history import History, Record
from common.history.selection import ALL, Selection, StreamName

__all__ = ["ALL", "History", "Record", "Selection", "StreamName"]
