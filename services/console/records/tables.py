"""What people look for first in each kind of message: a row of a table, and the whole entry."""

from collections.abc import Callable, Iterable
from typing import Any, cast

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
from tidemill.services.console.records.session import session_parts
from tidemill.services.console.text.formats import number, plural, sample_name
from tidemill.services.console.text.tree import Node, jsonable, note, part, table

TEXTS = ("prompt_text", "text")
"""Fields that are shown after the others, with their line breaks."""
UNITS = {"issued": "time", "finished": "time", "scored": "time", "announced": "time", "died": "time"} | {
    "took": "s", "latency": "s", "written": "s", "size": "bytes"
}  # fmt: skip

Row = dict[str, Any]


def record_json(stream: StreamName, record: Record) -> dict[str, Any]:
    """An entry of a stream for programs: all of it."""
    tree: dict[str, Any] = {"stream": stream.value, "id": record.entry_id}
    if isinstance(record, Garbled):
        fields = {name.decode(errors="replace"): value.hex() for name, value in record.fields.items()}
        return tree | {"error": record.error, "fields_hex": fields}
    return tree | {"kind": record.message.kind, "message": jsonable(record.message)}


def record_tree(stream: StreamName, record: Record) -> Node:
    """An entry for people: every field, then its session and its texts."""
    name = f"{stream} {record.entry_id}"
    if isinstance(record, Garbled):
        fields = (Node(name.decode(errors="replace"), value) for name, value in record.fields.items())
        problem = note(f"{name} cannot be decoded: {record.error}", "yellow")
        return part("", problem, part("its bytes", fields))
    message = record.message
    values = message.model_dump()
    session = session_parts(message) if isinstance(message, Trajectory) and values.pop("session") else ()
    texts = [(name, values.pop(name)) for name in TEXTS if values.get(name)]
    shown = (part(name.replace("_", " "), Node("", text, "text")) for name, text in texts)
    return part(name, (Node(name, value) for name, value in values.items()), session, shown)


def records_table(records: Iterable[Record]) -> Node:
    """A row for each entry of one stream."""
    return table(map(_row, records), UNITS)


def _row(record: Record) -> Row:
    if isinstance(record, Garbled):
        error = Node("error", f"cannot be decoded: {record.error}", style="yellow")
        return {"id": record.entry_id, "error": error}
    return {"id": record.entry_id} | _ROWS[type(record.message)](record.message)


def versions_of(trajectory: Trajectory) -> str:
    """The versions that produced its tokens: `12`, or `12 → 13`; those of forks after `|`."""
    rows = [" → ".join(str(version) for version, _ in segment.spans) for segment in trajectory.segments]
    return " | ".join(dict.fromkeys(rows))


def sample_of(message: Message) -> str:
    """`TICKET.INDEX`, `TICKET`, or a dash."""
    return sample_name(getattr(message, "ticket", -1), getattr(message, "index", -1))


def _ticket_row(message: Ticket) -> Row:
    return {
        "ticket": message.ticket,
        "step": message.step,
        "needs version": message.min_version,
        "samples": message.group_size,
        "replaces": message.replaces if message.replaces >= 0 else None,
        "issued": message.issued_at,
        "prompt": message.prompt_text,
    }


def _trajectory_row(message: Trajectory) -> Row:
    facts, num_tokens = session_facts(message), sum(num_completion_tokens(message))
    return {
        "sample": sample_of(message),
        "step": message.step,
        "versions": versions_of(message),
        "tokens": f"{num_tokens}, {plural(len(facts.turns), 'turn')}" if facts else num_tokens,
        "end": message.session.end if message.session else message.finish,
        "worker": message.worker,
        "finished": message.finished_at,
        "took": message.finished_at - message.started_at,
        "completion": message.text,
    }


def _score_row(message: Score) -> Row:
    components = "  ".join(f"{name} {number(value)}" for name, value in message.components.items())
    return {
        "sample": sample_of(message),
        "status": message.status.value,
        "value": message.value,
        "attempts": message.attempts,
        "latency": message.latency_s,
        "worker": message.worker,
        "scored": message.scored_at,
        "components, error": message.error or components,
    }


def _manifest_row(message: WeightManifest) -> Row:
    return {
        "version": message.version,
        "announced": message.announced_at,
        "kind": f"delta to {message.parent}" if message.is_delta else "full",
        "files": len(message.files),
        "size": message.num_bytes,
        "changed": f"{message.share_changed:.2%}" if message.share_changed >= 0.0 else None,
        "written": message.encode_s,
        "digest": message.digest,
    }


def _commit_row(message: Commit) -> Row:
    return {
        "step": message.step,
        "groups": len(message.groups),
        "dropped": len(message.dropped),
        "reward": message.metrics.get("reward"),
        "loss": message.metrics.get("loss"),
        "took": message.finished_at - message.started_at,
        "finished": message.finished_at,
        "digest": message.digest,
    }


def _dead_row(message: DeadLetter) -> Row:
    return {
        "from": message.origin,
        "sample": sample_of(message),
        "attempts": message.attempts,
        "worker": message.worker,
        "died": message.died_at,
        "error": message.error,
    }


_ROWS = cast(
    dict[type[Message], Callable[[Any], Row]],
    {
        Ticket: _ticket_row,
        Trajectory: _trajectory_row,
        Score: _score_row,
        WeightManifest: _manifest_row,
        Commit: _commit_row,
        DeadLetter: _dead_row,
    },
)
