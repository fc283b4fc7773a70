"""Dead letters as the operator sees them: read, decoded where they can be, and chosen by filters.

Nothing here trusts a letter: it holds what some process could not process, and may hold anything.
"""

from collections.abc import AsyncIterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.common.errors import CodecError
from tidemill.common.history import StreamName
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import dead_letter, has_entry
from tidemill.common.streams.entries import Entry, Garbled, entry_id_of
from tidemill.common.wire import codec
from tidemill.common.wire.codec import PAYLOAD_FIELD
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import DeadLetter, Lane, Message
from tidemill.services.console.options import LetterFilter


@dataclass(frozen=True, slots=True)
class Letter:
    """One entry of the dead-letter stream."""

    letter_id: str
    content: DeadLetter
    message: Message | None = None
    """The original message, where this release can decode it."""
    problem: str = ""
    """Why it cannot."""
    claims: Mapping[str, Any] = field(default_factory=dict)
    """The payload's plain values where it is msgpack at all; nobody has validated them."""
    is_readable: bool = True
    """Whether the letter itself could be decoded."""

    @property
    def stream(self) -> str:
        """The stream it came from, without the lane."""
        return self.content.origin.partition(":")[0]

    @property
    def lane(self) -> Lane:
        """The lane it belongs to."""
        return Lane.EVAL if self.content.origin.endswith(":eval") else Lane.TRAIN

    @property
    def died_at(self) -> float:
        """When it was buried, in seconds since 1970."""
        return self.content.died_at if self.is_readable else int(self.letter_id.partition("-")[0]) / 1000

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


def is_wanted(letter: Letter, wanted: LetterFilter) -> bool:
    """Whether the filter takes the letter."""
    return (
        wanted.stream in ("", letter.content.origin)
        and wanted.ticket in (None, letter.key[0])
        and wanted.error.lower() in letter.content.error.lower()
        and wanted.worker in letter.content.worker
    )


async def read_letters(
    entries: AsyncIterable[Entry[Any] | Garbled], wanted: LetterFilter, max_bytes: int
) -> list[Letter]:
    """The letters among entries of the stream that the filter takes, in their order."""
    letters = []
    async for entry in entries:
        if isinstance(entry, Garbled):
            letter = unreadable_letter(entry)
        else:
            letter = decode_letter(entry.entry_id, entry.message, max_bytes)
        if is_wanted(letter, wanted):
            letters.append(letter)
    return letters


def decode_letter(letter_id: str, content: DeadLetter, max_bytes: int) -> Letter:
    """A letter with its original message, as far as it can be decoded."""
    fields = {name.encode(): value for name, value in content.fields.items()}
    try:
        kind = StreamName(content.origin).message_type
    except ValueError:
        return Letter(letter_id, content, problem=f"{content.origin!r} is no stream of this release")
    try:
        return Letter(letter_id, content, codec.decode(fields, kind, max_bytes))
    except CodecError as error:
        return Letter(letter_id, content, problem=str(error), claims=_claims(fields, max_bytes))


def _claims(fields: Mapping[bytes, bytes], max_bytes: int) -> Mapping[str, Any]:
    payload = fields.get(PAYLOAD_FIELD, b"")
    if len(payload) > max_bytes:
        return {}
    try:
        tree = codec.unpack(payload)
    except CodecError:
        return {}
    return {str(name): value for name, value in tree.items()} if isinstance(tree, dict) else {}


def unreadable_letter(entry: Garbled) -> Letter:
    """A letter that cannot be decoded itself."""
    content = dead_letter("dead", entry.entry_id, entry.fields, entry.error, attempts=0)
    return Letter(entry.entry_id, content, problem="the letter itself cannot be decoded", is_readable=False)


async def is_trimmed(broker: Broker, keys: Keys, ticket: int, lane: Lane) -> bool:
    """Whether the ticket itself has been let go of, as happens when nothing needs it any more."""
    return not await has_entry(broker, keys.prompts(lane), entry_id_of(ticket))
