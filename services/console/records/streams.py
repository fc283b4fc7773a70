"""`tidemill streams`: look at what a run has written, in Redis or in the archive alike."""

import asyncio
import contextlib
import json
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.common.errors import ConfigError
from tidemill.common.history import History, Record, Selection, StreamName, StreamSummary
from tidemill.common.history.windows import near_tickets
from tidemill.common.process.programs import run_main
from tidemill.common.streams import group_status, last_id
from tidemill.common.streams.entries import Entry, Garbled, entry_id_of, id_after
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP
from tidemill.common.wire.messages import Commit, Message, Ticket, Trajectory, WeightManifest
from tidemill.services.console.options import SelectionOptions, ViewOptions
from tidemill.services.console.records.search import selected_records
from tidemill.services.console.records.selection import check_fits, parse_sample, parse_stream, selection_of
from tidemill.services.console.records.session import print_session
from tidemill.services.console.records.tables import print_values, record_table, record_tree
from tidemill.services.console.run.history import RunAccess, open_history
from tidemill.services.console.text.formats import NOTHING, printable, printable_block, took, when
from tidemill.services.console.text.tables import jsonable, listing, plain_fields, terminal

GROUPS = {Ticket: ROLLOUT_GROUP, Trajectory: REWARD_GROUP}
"""Consumer groups by what they consume."""


@dataclass(frozen=True, slots=True)
class Extent:
    """One stream of a run, with its consumer group where it has one."""

    summary: StreamSummary
    group: str = ""
    pending: int | None = None
    """Entries that a consumer holds."""
    lag: int | None = None
    """Entries that no consumer has been given; None where that is not known."""

    @property
    def age_s(self) -> float | None:
        """Since the newest message was made."""
        return time.time() - self.summary.last_time if self.summary.last_time else None

    def as_tree(self) -> dict[str, Any]:
        summary = asdict(self.summary)
        readers = {"group": self.group, "pending": self.pending, "lag": self.lag}
        return {"stream": summary.pop("name").value, **summary, "age_s": self.age_s, **readers}


async def extents(history: History) -> list[Extent]:
    """All streams, in the order in which messages flow."""
    return [await _with_readers(history, summary) for summary in await history.summary()]


def extents_table(found: list[Extent]) -> Table:
    titles = ("stream", "entries", "in Redis", "archived", "first", "last", "newest", "age", "readers")
    table = listing(titles, ("entries", "in Redis", "archived", "age"), ("readers",))
    for extent in found:
        summary = extent.summary
        table.add_row(
            summary.name.value,
            f"{summary.entries:,}",
            _amount(summary.redis_entries, summary.redis_bytes),
            _amount(summary.archived_entries, summary.archived_bytes),
            summary.first_id or NOTHING,
            summary.last_id or NOTHING,
            when(summary.last_time or 0.0),
            took(extent.age_s),
            Text(_readers(extent)),
        )
    return table


def _amount(entries: int, num_bytes: int) -> str:
    return f"{entries:,} ({num_bytes / 1e6:,.1f} MB)" if entries else NOTHING


def _readers(extent: Extent) -> str:
    if not extent.group:
        return ""
    lag = "not known how many" if extent.lag is None else f"{extent.lag:,}"
    return f"{extent.group}: {extent.pending:,} held, {lag} to come"


async def _with_readers(history: History, summary: StreamSummary) -> Extent:
    key, group = summary.name.key(history.keys), GROUPS.get(summary.name.message_type, "")
    status = await group_status(history.broker, key, group) if history.broker and group else None
    if status is None or history.broker is None:
        return Extent(summary)
    # A group that has read to the end lags behind by nothing, also where the server cannot count.
    lag = 0 if status.last_delivered == await last_id(history.broker, key) else status.lag
    return Extent(summary, group, status.pending, lag)


POLL_S = 0.5
TEXT_CHARACTERS = 4000
"""Of a completion that is shown by itself, unless all of it is asked for."""
TEXTS = ("prompt_text", "text")
NUMBERED: dict[type[Message], str] = {Ticket: "ticket", Commit: "step", WeightManifest: "version"}
"""Messages whose entry ids are their numbers."""


def show_list(view: ViewOptions) -> None:
    """Every stream of the run: how much there is and where, and how far its readers are."""

    async def look() -> None:
        async with open_history(view.run_id, view.runs_dir) as access:
            found = await extents(access.history)
            if view.as_json:
                print(json.dumps([jsonable(extent.as_tree()) for extent in found], indent=2))
                return
            console = terminal()
            console.print(extents_table(found))
            console.print(Text(f"run {access.run_id}, read from {access.source}", "dim"), soft_wrap=True)

    run_main(look())


def show_tail(view: ViewOptions, stream: str, options: SelectionOptions, limit: int, follows: bool) -> None:
    """The newest entries that are selected, oldest of them first; then those that come, until Ctrl-C."""
    name = parse_stream(stream, options.lane)
    check_fits(options, name)

    async def look() -> None:
        async with open_history(view.run_id, view.runs_dir) as access:
            if follows and access.is_over:
                raise ConfigError(f"run {access.run_id} is over: nothing will come. Leave out --follow.")
            selection = selection_of(options)
            records: list[Record] = []
            async for record in selected_records(access.history, name, selection, newest_first=True):
                records.append(record)
                if len(records) == limit:
                    break
            records.reverse()
            _print_records(view, name, records)
            if follows:
                await _follow(view, access, name, selection, records)

    with contextlib.suppress(KeyboardInterrupt):
        run_main(look())


def show_entries(view: ViewOptions, stream: str, what: str, lane: str) -> None:
    """One entry in full, by its id, its number, or its sample."""
    name = parse_stream(stream, lane)
    selection = _wanted(name, what)

    async def look() -> None:
        async with open_history(view.run_id, view.runs_dir) as access:
            near = selection
            if selection.tickets is not None:
                first, last = (int(end or 0) for end in selection.tickets)
                near = replace(await near_tickets(access.history, name, first, last), index=selection.index)
            records = [record async for record in access.history.scan(name, near)]
            if not records and near != selection:
                records = [record async for record in access.history.scan(name, selection)]
            if not records:
                raise ConfigError(
                    f"run {access.run_id} has no entry {what} in {name} (read from {access.source}). "
                    "`tidemill streams show` says from where to where each stream goes."
                )
            for record in records:
                if view.as_json:
                    print(json.dumps(record_tree(name, record)))
                else:
                    _print_whole(terminal(), name, record, view.is_full)

    run_main(look())


def _wanted(stream: StreamName, what: str) -> Selection:
    """The selection behind an id, a number or a sample.

    Raises:
        ConfigError: it is none that the stream has.
    """
    first, dash, rest = what.partition("-")
    if dash and first.isdecimal() and rest.isdecimal():
        return Selection(first_id=what, last_id=what)
    if stream.message_type in NUMBERED and what.isdecimal():
        entry_id = entry_id_of(int(what))
        return Selection(first_id=entry_id, last_id=entry_id)
    if stream.message_type in NUMBERED:
        number = NUMBERED[stream.message_type]
        raise ConfigError(
            f"{what!r} is no entry of {stream}: give an id such as 13-0, or a {number} such as 12."
        )
    ticket, index = parse_sample(what)
    return Selection(tickets=(ticket, ticket), index=index)


async def _follow(
    view: ViewOptions, access: RunAccess, stream: StreamName, selection: Selection, shown: list[Record]
) -> None:
    """Whatever is appended from now on, as it comes."""
    last = shown[-1].entry_id if shown else "0-0"
    if not shown:  # what the selection left out is not looked at again and again
        async for record in access.history.scan(stream, newest_first=True):
            last = record.entry_id
            break
    while True:
        await asyncio.sleep(POLL_S)
        new = [record async for record in access.history.scan(stream, Selection(id_after(last)))]
        if not new:
            continue
        last = new[-1].entry_id
        wanted = replace(selection, first_id=new[0].entry_id)
        _print_records(view, stream, [r async for r in selected_records(access.history, stream, wanted)])


def _print_records(view: ViewOptions, stream: StreamName, records: list[Record]) -> None:
    if view.as_json:
        for record in records:
            print(json.dumps(record_tree(stream, record)), flush=True)
    elif records:
        terminal().print(record_table(stream, records, view.is_full))
    else:
        terminal().print(Text(f"nothing of {stream} is selected", "dim"))


def _print_whole(console: Console, stream: StreamName, record: Record, is_full: bool) -> None:
    """Every field of an entry; texts at the end, with their line breaks."""
    if isinstance(record, Garbled):
        console.print(
            Text(f"{stream} {record.entry_id} cannot be decoded: {printable(record.error)}", "yellow")
        )
        fields = {name.decode(errors="replace"): value for name, value in record.fields.items()}
        print_values(console, "its bytes", fields, is_full)
        return
    assert isinstance(record, Entry)
    values = plain_fields(record.message)
    is_session = isinstance(record.message, Trajectory) and values.pop("session") is not None
    texts = {name: values.pop(name) for name in TEXTS if values.get(name)}
    print_values(console, f"{stream} {record.entry_id}", values, is_full)
    if is_session and isinstance(record.message, Trajectory):
        print_session(console, record.message, is_full)
    for name, text in texts.items():
        console.print(Text(f"\n{name.replace('_', ' ')}", "bold"))
        console.print(Text(printable_block(text, 0 if is_full else TEXT_CHARACTERS)), soft_wrap=True)
