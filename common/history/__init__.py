"""What a run has written to its streams, wherever it is now: in Redis, in the archive, or in both."""

from tidemill.common.history.groups import GroupCursor, MissingRecordsError, RecordedGroup
from tidemill.common.history.history import History, Record, StreamSummary
from tidemill.common.streams.selection import ALL, Selection, StreamName, texts_of, time_of

__all__ = [
    "ALL",
    "GroupCursor",
    "History",
    "MissingRecordsError",
    "Record",
    "RecordedGroup",
    "Selection",
    "StreamName",
    "StreamSummary",
    "texts_of",
    "time_of",
]
