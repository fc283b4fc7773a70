"""`tidemill streams`: look at what a run has written, and search it, in Redis or in the archive alike.

Results come as they are found. A prompt is searched once for each ticket, though each sample carries it.
"""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from tidemill.common.errors import ConfigError
from tidemill.common.history import History, Record, Selection, StreamName, StreamSummary
from tidemill.common.streams import group_status, last_id
from tidemill.common.streams.entries import Entry, Garbled, entry_id_of, id_after
from tidemill.common.streams.selection import said_in, texts_in
from tidemill.common.wire.messages import (
    Commit,
    DeadLetter,
    Lane,
    Message,
    Score,
    Ticket,
    Trajectory,
    WeightManifest,
    is_demonstration,
)
from tidemill.services.console.commands import (
    EntryOptions,
    GrepOptions,
    TailOptions,
    ViewOptions,
    hint_of_run,
)
from tidemill.services.console.look.joins import near_tickets
from tidemill.services.console.look.selection import parse_sample, parse_stream, selection_of
from tidemill.services.console.look.sessions import generation_s, num_completion_tokens, session_facts
from tidemill.services.console.look.trace import session_parts
from tidemill.services.console.run.folder import find_run, folder_of_runs
from tidemill.services.console.run.history import RunAccess, read_run
from tidemill.services.console.text.formats import NOTHING, number, plural, printable, sample_name, size
from tidemill.services.console.text.tree import Node, jsonable, note, part, print_tree, show, table, terminal

NUMBERED: dict[type[Message], str] = {Ticket: "ticket", Commit: "step", WeightManifest: "version"}
"""Messages whose entry ids are their numbers."""
POLL_S = 0.5
WHOLE_TICKET = -1
"""The index that stands for all samples of a ticket."""


def _show_list(view: ViewOptions) -> None:
    """Every stream of the run: how much there is and where, and how far its readers are."""

    async def read(access: RunAccess) -> tuple[list[dict[str, Any]], Node]:
        extents = [await _extent(access.history, summary) for summary in await access.history.summary()]
        source = note(f"run {access.run_id}, read from {access.source}", "dim")
        return extents, part("", table(map(_extent_row, extents)), source)

    show(*read_run(view, read), view.as_json, json_indent=2)


async def _extent(history: History, summary: StreamSummary) -> dict[str, Any]:
    """One stream with its consumer group: `pending` are entries that a consumer holds, `lag` those that no
    consumer has been given, None where that is not known."""
    key = summary.name.key(history.keys)
    group = summary.name.group
    status = await group_status(history.broker, key, group) if history.broker and group else None
    pending = None
    lag = None
    if status is None or history.broker is None:
        group = ""
    else:
        # A group that has read to the end lags behind by nothing, also where the server cannot count.
        is_at_end = status.last_delivered == await last_id(history.broker, key)
        pending = status.pending
        lag = 0 if is_at_end else status.lag
    numbers = asdict(summary)
    age_s = time.time() - summary.last_time if summary.last_time else None
    readers = {"group": group, "pending": pending, "lag": lag}
    return {"stream": numbers.pop("name").value, **numbers, "age_s": age_s, **readers}


def _extent_row(extent: dict[str, Any]) -> dict[str, Any]:
    amounts = {}
    for title, where in (("in Redis", "redis"), ("archived", "archived")):
        entries = extent[f"{where}_entries"]
        num_bytes = extent[f"{where}_bytes"]
        amounts[title] = f"{entries:,} ({size(num_bytes)})" if entries else ""
    lag = "not known how many" if extent["lag"] is None else f"{extent['lag']:,}"
    return {
        "stream": extent["stream"],
        "entries": extent["entries"],
        **amounts,
        "first": extent["first_id"],
        "last": extent["last_id"],
        "newest": Node("newest", extent["last_time"], "time"),
        "age": Node("age", extent["age_s"], "s"),
        "readers": f"{extent['group']}: {extent['pending']:,} held, {lag} to come" if extent["group"] else "",
    }


def _stream_named(text: str, options: EntryOptions | TailOptions | GrepOptions) -> StreamName:
    hint = hint_of_run(text, folder_of_runs(options.runs_dir))
    return parse_stream(text, options.lane, hint)


def show_tail(options: TailOptions) -> None:
    """The newest entries that are selected, oldest of them first; then those that come, until Ctrl-C."""
    name = _stream_named(options.stream, options)
    selection = selection_of(options, name)

    async def look(access: RunAccess) -> None:
        if options.follow and access.is_over:
            raise ConfigError(f"run {access.run_id} is over: nothing will come. Leave out --follow.")
        newest = selected_records(access.history, name, selection, newest_first=True)
        records = await _taken(newest, options.limit)
        _print_records(options, name, records[::-1])
        if options.follow and not records:  # what the selection left out is not looked at again and again
            records = await _taken(access.history.scan(name, newest_first=True), 1)
        last = records[0].entry_id if records else "0-0"
        while options.follow:
            await asyncio.sleep(POLL_S)
            new = [r async for r in access.history.scan(name, Selection(id_after(last)))]
            if new:
                # Read again with the selection, which may ask other streams; `last` moves on in any case.
                last = new[-1].entry_id
                wanted = replace(selection, first_id=new[0].entry_id)
                selected = selected_records(access.history, name, wanted)
                _print_records(options, name, [record async for record in selected])

    with contextlib.suppress(KeyboardInterrupt):
        read_run(options, look)


async def _taken(records: AsyncIterator[Record], limit: int) -> list[Record]:
    first_records: list[Record] = []
    async for record in records:
        first_records.append(record)
        if len(first_records) == limit:
            break
    return first_records


def _print_records(view: ViewOptions, stream: StreamName, records: list[Record]) -> None:
    if view.as_json:
        for record in records:
            print(json.dumps(_record_json(stream, record)), flush=True)
    else:
        rows = table(map(row_of, records), UNITS)
        body = rows if records else note(f"nothing of {stream} is selected", "dim")
        print_tree(terminal(), part("", body), view.is_full)


def show_entries(options: EntryOptions) -> None:
    if not options.stream:
        _show_list(options)
        return
    name = _stream_named(options.stream, options)
    if not options.entry:
        folder = find_run(options.run_id, options.runs_dir)
        raise ConfigError(
            f"which entry of {options.stream}? Give its ID; "
            f"`{folder.command('streams', 'tail', options.stream)}` shows the newest."
        )
    entry = options.entry
    selection = _wanted(name, entry)

    async def read(access: RunAccess) -> list[Record]:
        near = selection
        if selection.tickets is not None:
            first, last = selection.tickets
            near = await near_tickets(access.history, int(first or 0), int(last or 0), name.lane)
            near = replace(near, index=selection.index)
        records = [record async for record in access.history.scan(name, near)]
        if not records and near != selection:
            records = [record async for record in access.history.scan(name, selection)]
        if not records:
            raise ConfigError(
                f"run {access.run_id} has no entry {entry} in {name} (read from {access.source}). "
                f"`{access.folder.command('streams', 'show')}` says from where to where each stream goes."
            )
        return records

    for record in read_run(options, read):
        if options.as_json:
            print(json.dumps(_record_json(name, record)))
        else:
            print_tree(terminal(), _record_tree(name, record), options.is_full)


def _wanted(stream: StreamName, entry: str) -> Selection:
    """The selection behind an id, a number or a sample."""
    first, dash, sequence = entry.partition("-")
    entry_id = entry if dash and first.isdecimal() and sequence.isdecimal() else ""
    if not entry_id and (name := NUMBERED.get(stream.message_type)):
        if not entry.isdecimal():
            raise ConfigError(
                f"{entry!r} is no entry of {stream}: give an id such as 13-0, or a {name} such as 12."
            )
        entry_id = entry_id_of(int(entry))
    if entry_id:
        return Selection(first_id=entry_id, last_id=entry_id)
    ticket, index = parse_sample(entry)
    return Selection(tickets=(ticket, ticket), index=index)


async def selected_records(
    history: History, stream: StreamName, selection: Selection, newest_first: bool = False
) -> AsyncIterator[Record]:
    """The selected records, as they are found; conditions on fields of another stream are looked up first."""
    lane = stream.lane
    kind = stream.message_type
    near = Selection(tickets=selection.tickets, steps=selection.steps)
    own_selection = selection
    other_stream = None
    if kind is Trajectory and selection.rewards:
        own_selection = replace(selection, rewards=None)
        other_stream = StreamName.SCORES.of(lane)
        near = replace(near, rewards=selection.rewards)
    elif kind is Score and selection.versions:
        own_selection = replace(selection, versions=None)
        other_stream = StreamName.TRAJECTORIES.of(lane)
        near = replace(near, versions=selection.versions)
    elif kind is Score and selection.steps:
        # A step's tickets are no range: those that replaced others have later numbers.
        other_stream = StreamName.PROMPTS.of(lane)
    allowed: set[tuple[int, int]] = set()
    if other_stream is not None:
        allowed = {_key(r.message) async for r in history.scan(other_stream, near) if isinstance(r, Entry)}
        if not allowed:
            return
        first: float = min(allowed)[0]
        last: float = max(allowed)[0]
        if own_selection.tickets is not None:
            low, high = own_selection.tickets
            first = first if low is None else max(first, low)
            last = last if high is None else min(last, high)
        own_selection = replace(own_selection, tickets=(first, last))
    async for record in history.scan(stream, own_selection, newest_first):
        if other_stream is None:
            yield record
        elif isinstance(record, Entry):
            ticket, index = _key(record.message)
            if not allowed.isdisjoint(((ticket, index), (ticket, WHOLE_TICKET))):
                yield record


def _key(message: Message) -> tuple[int, int]:
    """The ticket and the index of a message, where it is of one sample only."""
    return getattr(message, "ticket", -1), getattr(message, "index", WHOLE_TICKET)


AROUND = 40
"""Characters shown on each side of what was found."""
MOST_SHOWN = 3
"""Places shown of one text; the others are counted."""


@dataclass(frozen=True, slots=True)
class Hit:
    stream: StreamName
    entry: Entry[Message]
    field: str
    text: str
    places: list[tuple[int, int]]


def show_hits(options: GrepOptions) -> int:
    """Prints what is found, as it is found; returns 1 where there is nothing."""
    try:
        pattern = re.compile(options.pattern, re.IGNORECASE if options.ignore_case else 0)
    except re.error as error:
        raise ConfigError(
            f"{options.pattern!r} is no regular expression: {error}. Write a backslash before each of "
            ". * + ? ( ) [ ] { } | ^ $ \\ to find the character itself."
        ) from None
    names = [_stream_named(name, options) for name in options.streams or ("trajectories", "scores")]
    selection = selection_of(options, *names)

    async def look(access: RunAccess) -> int:
        num_found = 0
        async for hit in _hits(access.history, names, selection, pattern):
            _print_hit(options, hit)
            num_found += 1
            if num_found == options.limit:
                break
        if not num_found and not options.as_json:
            Console(stderr=True).print(f"nothing was found in {' and '.join(names)}", style="dim")
        return 0 if num_found else 1

    try:
        return read_run(options, look)
    except KeyboardInterrupt:
        return 1


async def _hits(
    history: History, streams: list[StreamName], selection: Selection, pattern: re.Pattern[str]
) -> AsyncIterator[Hit]:
    prompts_seen: set[tuple[Lane, int]] = set()
    for stream in streams:
        async for record in selected_records(history, stream, selection):
            if isinstance(record, Entry):
                for name, text in _texts(record.message, stream.lane, pattern, prompts_seen):
                    places = [match.span() for match in pattern.finditer(text)]
                    if places:
                        yield Hit(stream, record, name, text, places)


def _texts(
    message: Message, lane: Lane, pattern: re.Pattern[str], prompts_seen: set[tuple[Lane, int]]
) -> Iterator[tuple[str, str]]:
    if isinstance(message, Trajectory | Ticket) and (lane, message.ticket) not in prompts_seen:
        prompts_seen.add((lane, message.ticket))
        yield "prompt", message.prompt_text
    if isinstance(message, Trajectory):
        said = list(said_in(message.session.messages)) if message.session else []
        yield from said
        # A session's text is its messages again, as the model's tokens.
        if not any(pattern.search(text) for _, text in said):
            yield "thought", message.thought or ""
            yield "completion", message.text
    elif isinstance(message, Score | DeadLetter):
        yield "error", message.error
        if isinstance(message, Score):
            yield from texts_in("detail", message.detail)
    elif isinstance(message, Commit):
        yield from (("dropped", f"{ticket}.{index} {why}") for ticket, index, why in message.dropped)


def _print_hit(view: ViewOptions, hit: Hit) -> None:
    message = hit.entry.message
    text = hit.text
    if view.as_json:
        record = {
            "stream": hit.stream.value,
            "id": hit.entry.entry_id,
            "ticket": getattr(message, "ticket", None),
            "index": getattr(message, "index", None),
            "field": hit.field,
            "matches": [{"start": a, "end": b, "text": text[a:b]} for a, b in hit.places],
            "text": text,
        }
        print(json.dumps(record), flush=True)
        return
    notes = ""
    if isinstance(message, Trajectory):
        version = f"version {_versions(message) or NOTHING}"
        notes = f"  step {message.step}  {version}  {printable(message.worker, 24)}"
    elif isinstance(message, Score):
        notes = f"  {message.status.value}  {number(message.value)}  {printable(message.worker, 24)}"
    elif isinstance(message, Ticket | Commit):
        notes = f"  step {message.step}"
    console = terminal()
    name = _sample(message) if hasattr(message, "ticket") else hit.entry.entry_id
    head = Text.assemble((hit.stream.value, "dim"), "  ", (name, "bold"), "  ", (hit.field, "cyan"))
    console.print(head.append(notes, "dim"), soft_wrap=True)
    places = hit.places if view.is_full else hit.places[:MOST_SHOWN]
    for span in places:
        console.print(_snippet(text, *span), soft_wrap=True)
    if len(places) < len(hit.places):
        console.print(Text(f"    and {len(hit.places) - len(places):,} more; --full shows all", "dim"))


def _snippet(text: str, first: int, last: int) -> Text:
    matched = text[first:last]
    if len(matched) > 4 * AROUND:
        matched = matched[: 2 * AROUND] + "…" + matched[-2 * AROUND :]
    return Text.assemble(
        "    ",
        "…" if first > AROUND else "",
        printable(text[max(0, first - AROUND) : first]),
        (printable(matched) or "·", "bold red"),
        printable(text[last : last + AROUND]),
        "…" if last + AROUND < len(text) else "",
    )


TEXTS = ("prompt_text", "thought", "text")
"""Fields that are shown after the others, with their line breaks."""
UNITS = dict.fromkeys(("issued", "finished", "scored", "announced", "died"), "time") | {
    "took": "s", "latency": "s", "written": "s", "size": "bytes"
}  # fmt: skip


def _record_json(stream: StreamName, record: Record) -> dict[str, Any]:
    tree: dict[str, Any] = {"stream": stream.value, "id": record.entry_id}
    if isinstance(record, Garbled):
        fields = {name.decode(errors="replace"): value.hex() for name, value in record.fields.items()}
        return tree | {"error": record.error, "fields_hex": fields}
    return tree | {"kind": record.message.kind, "message": jsonable(record.message)}


def _record_tree(stream: StreamName, record: Record) -> Node:
    name = f"{stream} {record.entry_id}"
    if isinstance(record, Garbled):
        fields = (Node(name.decode(errors="replace"), value) for name, value in record.fields.items())
        problem = note(f"{name} cannot be decoded: {record.error}", "yellow")
        return part("", problem, part("its bytes", fields))
    message = record.message
    values = message.model_dump()
    session = session_parts(message) if isinstance(message, Trajectory) and values.pop("session") else ()
    if isinstance(message, Trajectory) and not message.thought:
        del values["thought"]
    texts = [(name, values.pop(name)) for name in TEXTS if values.get(name)]
    sections = (part(name.replace("_", " "), Node("", text, "text")) for name, text in texts)
    return part(name, (Node(name, value) for name, value in values.items()), session, sections)


def row_of(record: Record) -> dict[str, Any]:
    """An entry as a line of a table: titles and values."""
    if isinstance(record, Garbled):
        error = Node("error", f"cannot be decoded: {record.error}", style="yellow")
        return {"id": record.entry_id, "error": error}
    return {"id": record.entry_id} | _ROWS[type(record.message)](record.message)


def _versions(trajectory: Trajectory) -> str:
    """The versions that produced its tokens: `12`, or `12 → 13`; those of forks after `|`. Empty for a
    demonstration, whose version is a placeholder."""
    if is_demonstration(trajectory.ticket):
        return ""
    rows = []
    for segment in trajectory.segments:
        versions = [str(version) for version, _ in segment.spans]
        rows.append(" → ".join(versions))
    return " | ".join(dict.fromkeys(rows))


def _sample(message: Message) -> str:
    return sample_name(*_key(message))


def _trajectory_row(trajectory: Trajectory) -> dict[str, Any]:
    facts = session_facts(trajectory)
    num_tokens = sum(num_completion_tokens(trajectory))
    return {
        "sample": _sample(trajectory),
        "step": trajectory.step,
        "versions": _versions(trajectory),
        "tokens": f"{num_tokens}, {plural(len(facts.turns), 'turn')}" if facts else num_tokens,
        "end": facts.end if facts else trajectory.finish,
        "worker": trajectory.worker,
        "finished": trajectory.finished_at,
        "took": generation_s(trajectory),
        "completion": trajectory.text,
    }


_ROWS: dict[type[Message], Callable[[Any], dict[str, Any]]] = {
    Ticket: lambda ticket: {
        "ticket": ticket.ticket,
        "step": ticket.step,
        "needs version": ticket.min_version,
        "samples": ticket.group_size,
        "replaces": ticket.replaces if ticket.replaces >= 0 else None,
        "issued": ticket.issued_at,
        "prompt": ticket.prompt_text,
    },
    Trajectory: _trajectory_row,
    Score: lambda score: {
        "sample": _sample(score),
        "status": score.status.value,
        "value": score.value,
        "attempts": score.attempts,
        "latency": score.latency_s,
        "worker": score.worker,
        "scored": score.scored_at,
        "components, error": score.error
        or "  ".join(f"{name} {number(value)}" for name, value in score.components.items()),
    },
    WeightManifest: lambda manifest: {
        "version": manifest.version,
        "announced": manifest.announced_at,
        "kind": f"delta to {manifest.parent}" if manifest.is_delta else "full",
        "files": len(manifest.files),
        "size": manifest.num_bytes,
        "changed": f"{manifest.share_changed:.2%}" if manifest.share_changed >= 0.0 else None,
        "written": manifest.encode_s,
        "digest": manifest.digest,
    },
    Commit: lambda commit: {
        "step": commit.step,
        "groups": len(commit.groups),
        "dropped": len(commit.dropped),
        "reward": commit.metrics.get("reward"),
        "loss": commit.metrics.get("loss"),
        "took": commit.finished_at - commit.started_at,
        "finished": commit.finished_at,
        "digest": commit.digest,
    },
    DeadLetter: lambda dead: {
        "from": dead.origin,
        "sample": _sample(dead),
        "attempts": dead.attempts,
        "worker": dead.worker,
        "died": dead.died_at,
        "error": dead.error,
    },
}
"""What people look for first in each kind of message: its row in a table."""
