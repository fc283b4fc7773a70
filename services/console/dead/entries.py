"""Dead letters as the operator sees them: read, decoded where they can be, and chosen by filters.

Nothing here trusts an entry: it holds what some process could not process, and may hold anything.
"""

from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.common.errors import CodecError
from tidemill.common.history import StreamName
from tidemill.common.streams import dead_letter
from tidemill.common.streams.entries import Entry, Garbled
from tidemill.common.wire import codec
from tidemill.common.wire.codec import PAYLOAD_FIELD
from tidemill.common.wire.messages import DeadLetter, Lane, Message
from tidemill.services.console.options import DeadFilter


@dataclass(frozen=True, slots=True)
class DeadEntry:
    """One entry of the dead-letter stream."""

    entry_id: str
    content: DeadLetter
    message: Message | None = None
    """The original message, where this release can decode it."""
    problem: str = ""
    """Why it cannot."""
    claims: Mapping[str, Any] = field(default_factory=dict)
    """The payload's plain values where it is msgpack at all; nobody has validated them."""
    is_readable: bool = True
    """Whether the entry itself could be decoded."""

    @property
    def stream(self) -> str:
        """The stream it came from, without the lane."""
        return self.content.origin.partition(":")[0]

    @property
    def lane(self) -> Lane:
        return Lane.EVAL if self.content.origin.endswith(":eval") else Lane.TRAIN

    @property
    def died_at(self) -> float:
        """When it was dead-lettered, in seconds since 1970."""
        return self.content.died_at if self.is_readable else int(self.entry_id.partition("-")[0]) / 1000

    @property
    def fields(self) -> dict[bytes, bytes]:
        return {name.encode(): value for name, value in self.content.fields.items()}

    @property
    def num_bytes(self) -> int:
        """Size of the original entry."""
        return sum(len(name) + len(value) for name, value in self.fields.items())

    @property
    def key(self) -> tuple[int, int]:
        """`(ticket, index)` of what died, -1 where it is not known; from a valid message only."""
        source = self.content if self.message is None or self.content.ticket >= 0 else self.message
        return int(getattr(source, "ticket", -1)), int(getattr(source, "index", -1))

    def fits(self, wanted: DeadFilter) -> bool:
        """Whether the filter takes it."""
        return (
            wanted.stream in ("", self.content.origin)
            and wanted.ticket in (None, self.key[0])
            and wanted.error.lower() in self.content.error.lower()
            and wanted.worker in self.content.worker
        )


async def read_dead(
    entries: AsyncIterable[Entry[Any] | Garbled], wanted: DeadFilter, max_bytes: int, limit: int = 0
) -> list[DeadEntry]:
    """The entries that the filter takes, in their order; at most `limit`, 0: all."""
    found: list[DeadEntry] = []
    async for entry in entries:
        dead = decode_dead(entry, max_bytes)
        if dead.fits(wanted):
            found.append(dead)
        if limit and len(found) >= limit:
            break
    return found


def decode_dead(entry: Entry[DeadLetter] | Garbled, max_bytes: int) -> DeadEntry:
    """An entry with its original message, as far as both can be decoded."""
    if isinstance(entry, Garbled):
        content = dead_letter("dead", entry.entry_id, entry.fields, entry.error, attempts=0)
        problem = "the dead letter itself cannot be decoded"
        return DeadEntry(entry.entry_id, content, problem=problem, is_readable=False)
    content = entry.message
    fields = {name.encode(): value for name, value in content.fields.items()}
    try:
        kind = StreamName(content.origin).message_type
    except ValueError:
        return DeadEntry(entry.entry_id, content, problem=f"{content.origin!r} is no stream of this release")
    try:
        return DeadEntry(entry.entry_id, content, codec.decode(fields, kind, max_bytes))
    except CodecError as error:
        return DeadEntry(entry.entry_id, content, problem=str(error), claims=_claims(fields, max_bytes))


def _claims(fields: Mapping[bytes, bytes], max_bytes: int) -> Mapping[str, Any]:
    payload = fields.get(PAYLOAD_FIELD, b"")
    if len(payload) > max_bytes:
        return {}
    try:
        tree = codec.unpack(payload)
    except CodecError:
        return {}
    return {str(name): value for name, value in tree.items()} if isinstance(tree, dict) else {}
