"""`tidemill dead show`: dead letters, read, decoded where they can be, and chosen by filters.

Nothing here trusts an entry: it holds what some process could not process, and may hold anything.
"""

import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.config.run import StreamsConfig
from tidemill.common.errors import CodecError, ConfigError
from tidemill.common.history import StreamName
from tidemill.common.process.programs import run_main
from tidemill.common.streams import dead_letter
from tidemill.common.streams.entries import Entry, Garbled
from tidemill.common.wire import codec
from tidemill.common.wire.codec import PAYLOAD_FIELD
from tidemill.common.wire.messages import DeadLetter, Lane, Message
from tidemill.services.console.options import DeadChoice, DeadFilter, ShowDeadOptions
from tidemill.services.console.run.history import open_history
from tidemill.services.console.text.formats import sample_name
from tidemill.services.console.text.tree import Node, jsonable, note, part, print_tree, table, terminal

HEX_ROW_BYTES = 16
HEX_FIRST_BYTES = 512
"""Bytes of an undecodable field that are shown unless all are asked for."""


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

    @property
    def name(self) -> str:
        return sample_name(*self.key)


async def read_dead(
    entries: AsyncIterable[Entry[Any] | Garbled], wanted: DeadFilter, config: RunConfig | None, limit: int = 0
) -> list[DeadEntry]:
    """The entries that the filter takes, in their order; at most `limit`, 0: all."""
    max_bytes = (config.streams if config else StreamsConfig()).max_message_mb << 20
    found: list[DeadEntry] = []
    async for entry in entries:
        dead = decode_dead(entry, max_bytes)
        if (
            wanted.stream in ("", dead.content.origin)
            and wanted.ticket in (None, dead.key[0])
            and wanted.error.lower() in dead.content.error.lower()
            and wanted.worker in dead.content.worker
        ):
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
    dead = DeadEntry(entry.entry_id, entry.message)
    try:
        kind = StreamName(dead.content.origin).message_type
    except ValueError:
        return replace(dead, problem=f"{dead.content.origin!r} is no stream of this release")
    try:
        return replace(dead, message=codec.decode(dead.fields, kind, max_bytes))
    except CodecError as error:
        problem, claims, payload = str(error), None, dead.fields.get(PAYLOAD_FIELD, b"")
    with contextlib.suppress(CodecError):
        claims = codec.unpack(payload) if len(payload) <= max_bytes else None
    plain = {str(name): value for name, value in claims.items()} if isinstance(claims, dict) else {}
    return replace(dead, problem=problem, claims=plain)


def dead_table(entries: Sequence[DeadEntry]) -> Node:
    return table(
        {
            "id": Node("id", entry.entry_id, link=f"dead/{entry.entry_id}"),
            "when": Node("when", entry.died_at, "time"),
            "stream": entry.content.origin,
            "sample": entry.name,
            "attempts": entry.content.attempts,
            "worker": entry.content.worker,
            "error": entry.content.error,
        }
        for entry in entries
    )


def dead_tree(entry: DeadEntry, with_hex: bool = False) -> Node:
    """Everything that is known of an entry, then the message that died, or its bytes."""
    content, group = entry.content, "groups" if entry.lane == "train" else "eval-groups"
    parts = [
        Node("died", entry.died_at, "time"),
        Node("stream", content.origin),
        Node("entry", content.entry_id or "(made by the trainer)"),
        Node("sample", entry.name, link=f"{group}/{entry.key[0]}" if entry.key[0] >= 0 else ""),
        Node("error", content.error, "text"),
        Node("attempts", content.attempts),
        Node("worker", content.worker),
        Node("size", entry.num_bytes, "bytes"),
    ]
    if entry.message is not None:
        values = entry.message.model_dump().items()
        parts.append(part(f"{entry.message.kind}, decoded", (Node(*value) for value in values)))
    else:
        parts.append(note(f"cannot be decoded: {entry.problem}", "yellow"))
        if entry.claims:
            claims = (Node(*claim) for claim in entry.claims.items())
            parts.append(part("what its bytes say, not validated", claims))
    if with_hex or entry.message is None:
        limit = None if with_hex else HEX_FIRST_BYTES
        parts += (part(f"field {name[:40]}", _hex(data, limit)) for name, data in content.fields.items())
    return part(f"dead letter {entry.entry_id}", parts)


def _hex(data: bytes, limit: int | None) -> Iterator[Node]:
    shown = data[:limit]
    for start in range(0, len(shown), HEX_ROW_BYTES):
        row = shown[start : start + HEX_ROW_BYTES]
        characters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        yield note(f"  {start:08x}  {row.hex(' '):<{3 * HEX_ROW_BYTES}} {characters}")
    if len(shown) < len(data):
        yield note(f"  ... {len(data) - len(shown):,} more bytes; --hex shows all", "dim")


def _dead_json(entry: DeadEntry, with_content: bool = False) -> dict[str, Any]:
    """An entry for programs; `with_content` adds the bytes and the decoded message."""
    ticket, index = entry.key
    found = {
        "id": entry.entry_id,
        "died_at": entry.died_at,
        "stream": entry.content.origin,
        "ticket": ticket,
        "index": index,
        "num_bytes": entry.num_bytes,
        **entry.content.model_dump(include={"entry_id", "error", "attempts", "worker"}),
    }
    if with_content:
        found["fields_hex"] = {name: value.hex() for name, value in entry.content.fields.items()}
        found |= {"message": entry.message, "problem": entry.problem, "unvalidated": entry.claims}
    return jsonable(found)  # type: ignore[no-any-return]


def show_dead(options: ShowDeadOptions) -> None:
    """Print everything that is known of the entry that was named, else a list of those that the filter takes,
    the newest `limit` of them.

    Raises:
        ConfigError: there is no such entry, or several are named.
    """
    if len(options.ids) > 1:
        raise ConfigError("one letter is shown at a time; without an ID all are listed.")

    async def look() -> list[DeadEntry]:
        # Wherever they are now: a run that is over has them in its folder or its archive.
        async with open_history(options.run_id, options.runs_dir) as access:
            return await read_dead(access.history.scan(StreamName.DEAD), options, access.config)

    entries = chosen(options, run_main(look()))
    if options.ids:
        (entry,) = entries
        if options.as_json:
            print(json.dumps(_dead_json(entry, with_content=True), indent=2))
        else:
            print_tree(terminal(), dead_tree(entry, options.with_hex))
        return
    shown = entries[-options.limit :] if options.limit else entries
    if options.as_json:
        print(json.dumps([_dead_json(entry) for entry in shown], indent=2))
    elif not entries:
        print("no dead letters" + (" that fit" if options.is_narrow else ""))
    else:
        counts = Counter(entry.content.origin[:40] for entry in entries)
        left_out = len(entries) - len(shown)
        older = [note(f"... and {left_out:,} older ones; --limit 0 shows all", "dim")] if left_out else []
        total = ", ".join(f"{count:,} from {origin}" for origin, count in sorted(counts.items()))
        print_tree(terminal(), part("", dead_table(shown), older, note(total, "dim")))


def chosen(choice: DeadChoice, entries: Sequence[DeadEntry]) -> list[DeadEntry]:
    """The entries that were named, in that order, or all.

    Raises:
        ConfigError: one that was named is not there.
    """
    by_id = {entry.entry_id: entry for entry in entries}
    if unknown := [name for name in choice.ids if name not in by_id]:
        raise ConfigError(
            f"there is no dead letter {unknown[0]!r}; `tidemill dead show` has the ids of the {len(entries)} "
            "there are."
        )
    return [by_id[name] for name in dict.fromkeys(choice.ids)] if choice.ids else list(entries)
