"""What a run has written to its streams, wherever it is now: in Redis, in the archive, or in both."""

from tidemill.common.history.groups import GroupCursor as GroupCursor
from tidemill.common.history.groups import MissingRecordsError as MissingRecordsError
from tidemill.common.history.history import History as History
from tidemill.common.history.history import Record as Record
from tidemill.common.history.history import StreamSummary as StreamSummary
from tidemill.common.streams.recorded_group import RecordedGroup as RecordedGroup
from tidemill.common.streams.selection import ALL as ALL
from tidemill.common.streams.selection import Selection as Selection
from tidemill.common.streams.selection import StreamName as StreamName
from tidemill.common.streams.selection import time_of as time_of
