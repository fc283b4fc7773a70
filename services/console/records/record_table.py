"""Entries of a stream as lines of a table: for each kind of message, what people look for first."""

from collections.abc import Callable, Iterable
from typing import Any, cast

from rich import box
from rich.table import Table
from rich.text import Text

from common.history import Record, StreamName
from common.streams.entries import Garbled
from common.wire.messages import Commit, DeadLetter, Message, Score, Ticket, Trajectory, WeightManifest
from services.console.text.untrusted import NOTHING, printable, took, when

TEXT_CHARACTERS = 60
NAME_CHARACTERS = 24
RIGHT = ("step", "tokens", "took", "value", "attempts", "latency", "groups", "dropped", "reward", "size")

Cells = dict[str, str]


def record_table(stream: StreamName, records: Iterable[Record], is_full: bool = False) -> Table:
    """A line for each entry. `is_full` shows texts to their ends."""
    rows = [(record, _cells(record, is_full)) for record in records]
    titles = next((list(cells) for record, cells in rows if not isinstance(record, Garbled)), ["id", "error"])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for title in titles:
        is_last = title == titles[-1]
        table.add_column(
            title,
            justify="right" if title in RIGHT else "left",
            no_wrap=not is_last,
            overflow="fold" if is_last else "ellipsis",
        )
    for record, cells in rows:
        if isinstance(record, Garbled):
            words = f"cannot be decoded: {printable(record.error, 0 if is_full else TEXT_CHARACTERS)}"
            table.add_row(record.entry_id, *[""] * (len(titles) - 2), Text(words, "yellow"))
        else:
            table.add_row(*(Text(cells.get(title, "")) for title in titles))
    return table


def versions_of(trajectory: Trajectory) -> str:
    """The versions that produced its tokens: `12`, or `12 → 13`."""
    return " → ".join(str(version) for version, _ in trajectory.spans)


def sample_of(message: Message) -> str:
    """`TICKET.INDEX`, `TICKET`, or a dash."""
    ticket, index = getattr(message, "ticket", -1), getattr(message, "index", -1)
    if ticket < 0:
        return NOTHING
    return f"{ticket}.{index}" if index >= 0 else str(ticket)


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
        "tokens": str(message.num_tokens),
        "end": message.finish,
        "worker": printable(message.worker, NAME_CHARACTERS),
        "finished": when(message.finished_at),
        "took": took(message.finished_at - message.started_at),
        "completion": printable(message.text, limit),
    }


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
        "files": str(len(message.files)),
        "size": f"{sum(file.num_bytes for file in message.files) / 1e6:,.1f} MB",
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


def number(value: float | None) -> str:
    """A number with few digits; a dash where there is none."""
    return NOTHING if value is None else f"{value:.4g}"


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
