"""`tidemill streams grep`: finds text in what models, judges and rewards have written.

Results come as they are found. A prompt is searched once for each ticket, though each sample carries it.
"""

import json
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from tidemill.common.errors import ConfigError
from tidemill.common.history import History, Record, Selection, StreamName
from tidemill.common.process.programs import run_main
from tidemill.common.streams.entries import Entry
from tidemill.common.streams.selection import Range, said_in, texts_in
from tidemill.common.wire.messages import Commit, DeadLetter, Lane, Message, Score, Ticket, Trajectory
from tidemill.services.console.options import GrepOptions, ViewOptions
from tidemill.services.console.records.selection import check_fits, parse_stream, selection_of
from tidemill.services.console.records.tables import sample_of, versions_of
from tidemill.services.console.run.history import open_history
from tidemill.services.console.text.formats import number, printable
from tidemill.services.console.text.tree import terminal

Keys = set[tuple[int, int]]
WHOLE_TICKET = -1
"""The index that stands for all samples of a ticket."""


async def selected_records(
    history: History, stream: StreamName, selection: Selection, newest_first: bool = False
) -> AsyncIterator[Record]:
    """What the selection selects, as it is found."""
    allowed: list[Keys] = []
    own = _own(stream, selection)
    for other, wanted in _others(stream, selection):
        keys = {key_of(r.message) async for r in history.scan(other, wanted) if isinstance(r, Entry)}
        if not keys:
            return
        allowed.append(keys)
        own = replace(own, tickets=_both(own.tickets, (min(keys)[0], max(keys)[0])))
    async for record in history.scan(stream, own, newest_first):
        if not allowed or (isinstance(record, Entry) and _is_in_all(record.message, allowed)):
            yield record


def key_of(message: Message) -> tuple[int, int]:
    """The ticket and the index of a message, where it is of one sample only."""
    return getattr(message, "ticket", -1), getattr(message, "index", WHOLE_TICKET)


def _both(one: Range | None, other: tuple[float, float]) -> Range:
    """What lies in both ranges."""
    low, high = one or (None, None)
    first, last = other
    return max(first, first if low is None else low), min(last, last if high is None else high)


def _is_in_all(message: Message, allowed: list[Keys]) -> bool:
    ticket, index = key_of(message)
    return all((ticket, index) in keys or (ticket, WHOLE_TICKET) in keys for keys in allowed)


def _others(stream: StreamName, selection: Selection) -> list[tuple[StreamName, Selection]]:
    """The other streams to ask, and what for."""
    lane = stream.lane
    near = Selection(tickets=selection.tickets, steps=selection.steps)
    found = []
    if stream.message_type is Trajectory and selection.rewards:
        found.append((StreamName.SCORES.of(lane), replace(near, rewards=selection.rewards)))
    if stream.message_type is Score and selection.versions:
        found.append((StreamName.TRAJECTORIES.of(lane), replace(near, versions=selection.versions)))
    elif stream.message_type is Score and selection.steps:
        # A step's tickets are no range: those that replaced others have later numbers.
        found.append((StreamName.PROMPTS.of(lane), near))
    return found


def _own(stream: StreamName, selection: Selection) -> Selection:
    """What the messages of the stream can be asked themselves."""
    if stream.message_type is Trajectory:
        return replace(selection, rewards=None)
    return replace(selection, versions=None) if stream.message_type is Score else selection


AROUND = 40
"""Characters shown on each side of what was found."""
_PLAIN = re.compile(r"[\w ,;:<>=!@#%&~'-]+")
"""Patterns that mean themselves, in JSON too."""
_ANY_TEXT = r"[^{}]"
"""Found in every text but that of a score without details, which is `{}`."""
MOST_SHOWN = 3
"""Places shown of one text; the others are counted."""


@dataclass(frozen=True, slots=True)
class Hit:
    """One text in which the pattern was found."""

    stream: StreamName
    entry_id: str
    message: Message
    field: str
    text: str
    places: list[tuple[int, int]]

    def as_tree(self) -> dict[str, Any]:
        return {
            "stream": self.stream.value,
            "id": self.entry_id,
            "ticket": getattr(self.message, "ticket", None),
            "index": getattr(self.message, "index", None),
            "field": self.field,
            "matches": [{"start": a, "end": b, "text": self.text[a:b]} for a, b in self.places],
            "text": self.text,
        }


@dataclass(slots=True)
class Search:
    """A pattern, and the prompts that it was held against already."""

    pattern: re.Pattern[str]
    seen: set[tuple[Lane, int]] = field(default_factory=set)

    def narrowed(self, stream: StreamName, selection: Selection) -> Selection:
        """The selection with a pattern of the history's own, which leaves out what cannot be a hit.

        It has the details of scores as one text of JSON: only words that JSON leaves as they are can be
        found there. For others, it leaves out the scores without any text.
        """
        expression = self.pattern.pattern
        if stream.message_type not in (Trajectory, Ticket, Score):
            return selection
        if stream.message_type is Score and not _PLAIN.fullmatch(expression):
            return replace(selection, pattern=_ANY_TEXT)
        return replace(selection, pattern=f"(?i){expression}" if self.ignores_case else expression)

    @property
    def ignores_case(self) -> bool:
        return bool(self.pattern.flags & re.IGNORECASE)

    def hits(self, stream: StreamName, entry_id: str, message: Message) -> Iterator[Hit]:
        """What is found in one message."""
        for name, text in self._texts(stream, message):
            places = [match.span() for match in self.pattern.finditer(text)]
            if places:
                yield Hit(stream, entry_id, message, name, text, places)

    def _texts(self, stream: StreamName, message: Message) -> Iterator[tuple[str, str]]:
        if isinstance(message, Trajectory | Ticket) and (stream.lane, message.ticket) not in self.seen:
            self.seen.add((stream.lane, message.ticket))
            yield "prompt", message.prompt_text
        if isinstance(message, Trajectory):
            said = list(said_in(message.session.messages)) if message.session else []
            yield from said
            # A session's text is its messages again, as the model's tokens.
            if not any(self.pattern.search(text) for _, text in said):
                yield "completion", message.text
        elif isinstance(message, Score):
            yield "error", message.error
            yield from texts_in("detail", message.detail)
        elif isinstance(message, DeadLetter):
            yield "error", message.error
        elif isinstance(message, Commit):
            yield from (("dropped", f"{ticket}.{index} {why}") for ticket, index, why in message.dropped)


def show_hits(options: GrepOptions) -> int:
    """Print what is found, as it is found; at most `limit` of it, 0 for all. Returns 1 where that is nothing.

    Raises:
        ConfigError: the pattern is none, or an option does not apply to a stream.
    """
    search = Search(_compiled(options.pattern, options.ignore_case))
    names = [parse_stream(name, options.lane) for name in options.streams or ("trajectories", "scores")]
    for name in names:
        check_fits(options, name)
    selection = selection_of(options)

    async def look() -> int:
        num_found = 0
        async with open_history(options.run_id, options.runs_dir) as access:
            async for hit in _find(access.history, names, selection, search):
                _print_hit(options, hit)
                num_found += 1
                if num_found == options.limit:
                    break
            if not num_found and not options.as_json:
                Console(stderr=True).print(f"nothing was found in {' and '.join(names)}", style="dim")
        return 0 if num_found else 1

    try:
        return run_main(look())
    except KeyboardInterrupt:
        return 1


async def _find(
    history: History, streams: list[StreamName], selection: Selection, search: Search
) -> AsyncIterator[Hit]:
    for stream in streams:
        async for record in selected_records(history, stream, search.narrowed(stream, selection)):
            if isinstance(record, Entry):
                for hit in search.hits(stream, record.entry_id, record.message):
                    yield hit


def _compiled(expression: str, ignores_case: bool) -> re.Pattern[str]:
    try:
        return re.compile(expression, re.IGNORECASE if ignores_case else 0)
    except re.error as error:
        raise ConfigError(
            f"{expression!r} is no regular expression: {error}. Write a backslash before each of "
            ". * + ? ( ) [ ] { } | ^ $ \\ to find the character itself."
        ) from None


def _print_hit(view: ViewOptions, hit: Hit) -> None:
    if view.as_json:
        print(json.dumps(hit.as_tree()), flush=True)
        return
    console = terminal()
    head = Text.assemble((hit.stream.value, "dim"), "  ", (_name(hit), "bold"), "  ", (hit.field, "cyan"))
    if notes := _notes(hit.message):
        head.append(f"  {notes}", "dim")
    console.print(head, soft_wrap=True)
    shown = hit.places if view.is_full else hit.places[:MOST_SHOWN]
    for place in shown:
        console.print(_snippet(hit.text, place), soft_wrap=True)
    if len(shown) < len(hit.places):
        console.print(Text(f"    and {len(hit.places) - len(shown):,} more; --full shows all", "dim"))


def _name(hit: Hit) -> str:
    return sample_of(hit.message) if hasattr(hit.message, "ticket") else hit.entry_id


def _notes(message: Message) -> str:
    if isinstance(message, Trajectory):
        return f"step {message.step}  version {versions_of(message)}  {printable(message.worker, 24)}"
    if isinstance(message, Score):
        return f"{message.status.value}  {number(message.value)}  {printable(message.worker, 24)}"
    return f"step {message.step}" if isinstance(message, Ticket | Commit) else ""


def _snippet(text: str, place: tuple[int, int]) -> Text:
    first, last = place
    before, after = text[max(0, first - AROUND) : first], text[last : last + AROUND]
    found = text[first:last]
    if len(found) > 4 * AROUND:
        found = found[: 2 * AROUND] + "…" + found[-2 * AROUND :]
    return Text.assemble(
        "    ",
        "…" if first > AROUND else "",
        printable(before),
        (printable(found) or "·", "bold red"),
        printable(after),
        "…" if last + AROUND < len(text) else "",
    )
