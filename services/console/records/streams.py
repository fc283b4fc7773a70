"""`tidemill streams`: look at what a run has written, in Redis or in the archive alike."""

import asyncio
import contextlib
import json
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from tidemill.common.errors import ConfigError
from tidemill.common.history import History, Record, Selection, StreamName, StreamSummary
from tidemill.common.history.windows import near_tickets
from tidemill.common.process.programs import run_main
from tidemill.common.streams import group_status, last_id
from tidemill.common.streams.entries import entry_id_of, id_after
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP
from tidemill.common.wire.messages import Commit, Message, Ticket, Trajectory, WeightManifest
from tidemill.services.console.options import EntryOptions, TailOptions, ViewOptions
from tidemill.services.console.records.search import selected_records
from tidemill.services.console.records.selection import check_fits, parse_sample, parse_stream, selection_of
from tidemill.services.console.records.tables import record_json, record_tree, records_table
from tidemill.services.console.run.history import RunAccess, open_history
from tidemill.services.console.text.formats import size
from tidemill.services.console.text.tree import Node, jsonable, note, part, print_tree, table, terminal

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


def _extent_row(extent: Extent) -> dict[str, Any]:
    summary, readers = extent.summary, None
    if extent.group:
        lag = "not known how many" if extent.lag is None else f"{extent.lag:,}"
        readers = f"{extent.group}: {extent.pending:,} held, {lag} to come"
    return {
        "stream": summary.name.value,
        "entries": summary.entries,
        "in Redis": _amount(summary.redis_entries, summary.redis_bytes),
        "archived": _amount(summary.archived_entries, summary.archived_bytes),
        "first": summary.first_id,
        "last": summary.last_id,
        "newest": Node("newest", summary.last_time, "time"),
        "age": Node("age", extent.age_s, "s"),
        "readers": readers,
    }


def _amount(entries: int, num_bytes: int) -> str:
    return f"{entries:,} ({size(num_bytes)})" if entries else ""


async def _with_readers(history: History, summary: StreamSummary) -> Extent:
    key, group = summary.name.key(history.keys), GROUPS.get(summary.name.message_type, "")
    status = await group_status(history.broker, key, group) if history.broker and group else None
    if status is None or history.broker is None:
        return Extent(summary)
    # A group that has read to the end lags behind by nothing, also where the server cannot count.
    lag = 0 if status.last_delivered == await last_id(history.broker, key) else status.lag
    return Extent(summary, group, status.pending, lag)


POLL_S = 0.5
NUMBERED: dict[type[Message], str] = {Ticket: "ticket", Commit: "step", WeightManifest: "version"}
"""Messages whose entry ids are their numbers."""


def _show_list(view: EntryOptions) -> None:
    """Every stream of the run: how much there is and where, and how far its readers are."""

    async def look() -> None:
        async with open_history(view.run_id, view.runs_dir) as access:
            found = [await _with_readers(access.history, one) for one in await access.history.summary()]
            if view.as_json:
                print(json.dumps([jsonable(extent.as_tree()) for extent in found], indent=2))
                return
            source = note(f"run {access.run_id}, read from {access.source}", "dim")
            print_tree(terminal(), part("", table(map(_extent_row, found)), source))

    run_main(look())


def show_tail(options: TailOptions) -> None:
    """The newest entries that are selected, oldest of them first; then those that come, until Ctrl-C."""
    name = parse_stream(options.stream, options.lane)
    check_fits(options, name)

    async def look() -> None:
        async with open_history(options.run_id, options.runs_dir) as access:
            if options.follow and access.is_over:
                raise ConfigError(f"run {access.run_id} is over: nothing will come. Leave out --follow.")
            selection = selection_of(options)
            records: list[Record] = []
            async for record in selected_records(access.history, name, selection, newest_first=True):
                records.append(record)
                if len(records) == options.limit:
                    break
            records.reverse()
            _print_records(options, name, records)
            if options.follow:
                await _follow(options, access, name, selection, records)

    with contextlib.suppress(KeyboardInterrupt):
        run_main(look())


def show_entries(view: EntryOptions) -> None:
    """One entry in full, by its id, its number, or its sample; without one, the list of streams."""
    if not view.stream:
        _show_list(view)
        return
    if not view.entry:
        raise ConfigError(
            f"which entry of {view.stream}? Give its ID; "
            f"`tidemill streams tail {view.stream}` shows the newest."
        )
    name = parse_stream(view.stream, view.lane)
    selection = _wanted(name, view.entry)

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
                    f"run {access.run_id} has no entry {view.entry} in {name} (read from {access.source}). "
                    "`tidemill streams show` says from where to where each stream goes."
                )
            for record in records:
                if view.as_json:
                    print(json.dumps(record_json(name, record)))
                else:
                    print_tree(terminal(), record_tree(name, record), view.is_full)

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
            print(json.dumps(record_json(stream, record)), flush=True)
    else:
        found = records_table(records) if records else note(f"nothing of {stream} is selected", "dim")
        print_tree(terminal(), part("", found), view.is_full)
