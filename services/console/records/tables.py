"""Records as values, tables and JSON: what people look for first in each kind of message."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.common.history import Record, StreamName
from tidemill.common.history.sessions import num_completion_tokens, session_facts
from tidemill.common.streams.entries import Garbled
from tidemill.common.wire.messages import (
    Commit,
    DeadLetter,
    Message,
    Score,
    Ticket,
    Trajectory,
    WeightManifest,
)
from tidemill.services.console.text.formats import (
    NOTHING,
    number,
    plural,
    printable,
    printable_block,
    sample_name,
    took,
    when,
)
from tidemill.services.console.text.tables import jsonable, listing, name_table, plain_fields


def record_tree(stream: StreamName, record: Record) -> dict[str, Any]:
    """An entry of a stream for programs: all of it."""
    tree: dict[str, Any] = {"stream": stream.value, "id": record.entry_id}
    if isinstance(record, Garbled):
        fields = {name.decode(errors="replace"): value.hex() for name, value in record.fields.items()}
        return tree | {"error": record.error, "fields_hex": fields}
    return tree | {"kind": record.message.kind, "message": jsonable(plain_fields(record.message))}


MAX_SHOWN_ITEMS = 24
"""Elements of an array that are shown; JSON has all."""
MAX_SHOWN_CHARACTERS = 600


def print_values(console: Console, title: str, values: Mapping[str, Any], is_full: bool = False) -> None:
    """A title, and the values under it."""
    console.print(Text(f"\n{title}", "bold"))
    table = name_table(max_width=24)
    for name, value in values.items():
        table.add_row(Text(printable(name, 24)), Text(brief(value, is_full)))
    console.print(table)


def brief(value: Any, is_full: bool = False) -> str:
    """A value as text; unless it shall be full, with its first elements only."""
    if isinstance(value, np.ndarray):
        return _items(value.tolist(), len(value) if is_full else MAX_SHOWN_ITEMS)
    if isinstance(value, bytes | bytearray):
        head = bytes(value if is_full else value[:MAX_SHOWN_ITEMS])
        return f"{len(value):,} bytes: {head.hex(' ')}{' ...' if len(head) < len(value) else ''}"
    if is_full:
        return printable_block(value if isinstance(value, str) else repr(value))
    return printable(value if isinstance(value, str) else repr(value), MAX_SHOWN_CHARACTERS)


def _items(values: list[Any], limit: int) -> str:
    items = [f"{item:.5g}" if isinstance(item, float) else str(item) for item in values[:limit]]
    more = [f"... {len(values):,} in all"] if len(values) > limit else []
    return f"[{', '.join([*items, *more])}]"


TEXT_CHARACTERS = 60
NAME_CHARACTERS = 24
RIGHT = ("step", "tokens", "took", "value", "attempts", "latency", "groups", "dropped", "reward", "size")

Cells = dict[str, str]


def record_table(stream: StreamName, records: Iterable[Record], is_full: bool = False) -> Table:
    """A line for each entry. `is_full` shows texts to their ends."""
    rows = [(record, _cells(record, is_full)) for record in records]
    titles = next((list(cells) for record, cells in rows if not isinstance(record, Garbled)), ["id", "error"])
    table = listing(titles, RIGHT, titles[-1:])
    for record, cells in rows:
        if isinstance(record, Garbled):
            words = f"cannot be decoded: {printable(record.error, 0 if is_full else TEXT_CHARACTERS)}"
            table.add_row(record.entry_id, *[""] * (len(titles) - 2), Text(words, "yellow"))
        else:
            table.add_row(*(Text(cells.get(title, "")) for title in titles))
    return table


def versions_of(trajectory: Trajectory) -> str:
    """The versions that produced its tokens: `12`, or `12 → 13`; those of forks after `|`."""
    rows = [" → ".join(str(version) for version, _ in segment.spans) for segment in trajectory.segments]
    return " | ".join(dict.fromkeys(rows))


def sample_of(message: Message) -> str:
    """`TICKET.INDEX`, `TICKET`, or a dash."""
    return sample_name(getattr(message, "ticket", -1), getattr(message, "index", -1))


def _cells(record: Record, is_full: bool) -> Cells:
    if isinstance(record, Garbled):
        return {"id": record.entry_id, "error": record.error}
    limit = 0 if is_full else TEXT_CHARACTERS
    cells = _CELLS[type(record.message)](record.message, limit)
    return {"id": record.entry_id} | cells


def _ticket_cells(message: Ticket, limit: int) -> Cells:
    return {
        "ticket": str(message.ticket),
        "step": str(message.step),
        "needs version": str(message.min_version),
        "samples": str(message.group_size),
        "replaces": str(message.replaces) if message.replaces >= 0 else NOTHING,
        "issued": when(message.issued_at),
        "prompt": printable(message.prompt_text, limit),
    }


def _trajectory_cells(message: Trajectory, limit: int) -> Cells:
    return {
        "sample": sample_of(message),
        "step": str(message.step),
        "versions": versions_of(message),
        "tokens": _tokens_of(message),
        "end": message.session.end if message.session else message.finish,
        "worker": printable(message.worker, NAME_CHARACTERS),
        "finished": when(message.finished_at),
        "took": took(message.finished_at - message.started_at),
        "completion": printable(message.text, limit),
    }


def _tokens_of(message: Trajectory) -> str:
    """Its tokens; of a session, in how many turns."""
    facts, num_tokens = session_facts(message), sum(num_completion_tokens(message))
    return f"{num_tokens}, {plural(len(facts.turns), 'turn')}" if facts else str(num_tokens)


def _score_cells(message: Score, limit: int) -> Cells:
    components = "  ".join(f"{name} {number(value)}" for name, value in message.components.items())
    return {
        "sample": sample_of(message),
        "status": message.status.value,
        "value": number(message.value),
        "attempts": str(message.attempts),
        "latency": took(message.latency_s),
        "worker": printable(message.worker, NAME_CHARACTERS),
        "scored": when(message.scored_at),
        "components, error": printable(message.error or components, limit),
    }


def _manifest_cells(message: WeightManifest, _: int) -> Cells:
    return {
        "version": str(message.version),
        "announced": when(message.announced_at),
        "kind": f"delta to {message.parent}" if message.is_delta else "full",
        "files": str(len(message.files)),
        "size": f"{message.num_bytes / 1e6:,.1f} MB",
        "changed": f"{message.share_changed:.2%}" if message.share_changed >= 0.0 else NOTHING,
        "written": took(message.encode_s),
        "digest": message.digest,
    }


def _commit_cells(message: Commit, _: int) -> Cells:
    metrics = message.metrics
    return {
        "step": str(message.step),
        "groups": str(len(message.groups)),
        "dropped": str(len(message.dropped)),
        "reward": number(metrics.get("reward")),
        "loss": number(metrics.get("loss")),
        "took": took(message.finished_at - message.started_at),
        "finished": when(message.finished_at),
        "digest": message.digest,
    }


def _letter_cells(message: DeadLetter, limit: int) -> Cells:
    return {
        "from": printable(message.origin, NAME_CHARACTERS),
        "sample": sample_of(message),
        "attempts": str(message.attempts),
        "worker": printable(message.worker, NAME_CHARACTERS),
        "died": when(message.died_at),
        "error": printable(message.error, limit),
    }


_CELLS = cast(
    dict[type[Message], Callable[[Any, int], Cells]],
    {
        Ticket: _ticket_cells,
        Trajectory: _trajectory_cells,
        Score: _score_cells,
        WeightManifest: _manifest_cells,
        Commit: _commit_cells,
        DeadLetter: _letter_cells,
    },
)
