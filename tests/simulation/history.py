"""Every entry that any server of the run ever held, and which of them Redis has lost."""

from dataclasses import dataclass, field
from typing import Any

from tests.simulation.redis.server import Fields
from tests.simulation.redis.stream import EntryId
from tidemill.common.wire.keys import Keys


@dataclass(slots=True)
class Record:
    """One entry: where, what, and with which write it came."""

    stream: str
    entry_id: str
    fields: dict[bytes, bytes]
    unit: int
    at_s: float
    is_lost: bool = False
    is_foreign: bool = False
    """Whether a fault has put it there."""
    message: Any = None
    """The decoded message, where it can be decoded."""
    flushed_with: int = -1
    """The write that emptied the server, if one did."""


@dataclass
class History:
    """Filled by the server; trimming does not remove anything here."""

    keys: Keys
    records: list[Record] = field(default_factory=list)
    is_foreign_now: bool = False
    put_back: dict[str, int] = field(default_factory=dict)
    """Id of a dead letter that an operator has put back: its stream no longer has it -> that write."""

    def note(self, key: bytes, entry_id: EntryId, fields: Fields, unit: int, at_s: float) -> Record:
        """Record an entry that was appended."""
        pairs = dict(zip(fields[::2], fields[1::2], strict=True))
        name = self.keys.name_of(key.decode())
        record = Record(name, f"{entry_id[0]}-{entry_id[1]}", pairs, unit, at_s, False, self.is_foreign_now)
        self.records.append(record)
        return record

    def forget_after(self, num_units: int) -> int:
        """A server has taken over that has only `num_units` writes; returns how many entries are lost."""
        for record in self.records:
            if record.flushed_with >= num_units:  # the server that took over was never emptied
                record.is_lost = False
                record.flushed_with = -1
        lost = [record for record in self.records if record.unit >= num_units and not record.is_lost]
        for record in lost:
            record.is_lost = True
        # On that server they have not been put back.
        self.put_back = {entry_id: unit for entry_id, unit in self.put_back.items() if unit < num_units}
        return len(lost)

    def flush(self, unit: int) -> int:
        """The server was emptied by its write number `unit`; returns how many entries are lost."""
        lost = [record for record in self.records if not record.is_lost]
        for record in lost:
            record.is_lost = True
            record.flushed_with = unit
        return len(lost)

    def of(self, stream: str, is_lost: bool = False) -> list[Record]:
        """Entries that a stream holds or held before trimming; with `is_lost`, those that it has lost."""
        return [record for record in self.records if record.stream == stream and record.is_lost == is_lost]
