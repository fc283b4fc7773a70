"""`tidemill dead`: shows messages that could not be processed, puts them back, or drops them for good.

No entry is trusted: it holds what some process could not handle, and may hold anything. What putting back
means depends on the stream of the message:

* a ticket (`prompts`) or a trajectory is still in its stream, under its own id. Its entry becomes pending
  again in its consumer group, and the next worker takes it. Nothing is appended: a ticket's number is its
  entry id, and the log of trajectories must not hold one twice.
* a score is appended to its log again; the trainer takes the first one of a key.
* commits, weights, and trajectories that are too old for their step are never put back.

In training, the trainer replaces the group of a dead ticket or trajectory by a fresh one. From then on the
old one can no longer matter, and is refused. So this is for a run whose trainer does not run, for
evaluations in progress, and for messages that only a newer release can read.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tidemill.common.config import RunConfig
from tidemill.common.config.run import StreamsConfig
from tidemill.common.errors import CodecError, ConfigError
from tidemill.common.history import History, StreamName
from tidemill.common.history.groups import TicketOutcomes
from tidemill.common.process.programs import run_main
from tidemill.common.redis import lease_scripts
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.lease_scripts import RequeueReply
from tidemill.common.run.state import FINISHED, read_config, read_state
from tidemill.common.streams import (
    dead_letter,
    group_status,
    has_entry,
    scan,
)
from tidemill.common.streams.entries import Entry, Garbled, entry_id_of
from tidemill.common.streams.requeueing import remove_entries, requeue
from tidemill.common.wire import codec
from tidemill.common.wire.codec import PAYLOAD_FIELD
from tidemill.common.wire.keys import EVAL, Keys
from tidemill.common.wire.messages import DeadLetter, Lane, Message, Ticket, Trajectory
from tidemill.services.console.commands import (
    DeadChoice,
    DeadFilter,
    DropOptions,
    ShowDeadOptions,
    hint_of_run,
)
from tidemill.services.console.run.folder import RunFolder, connected, find_run, log_nothing
from tidemill.services.console.run.history import RunAccess, read_run
from tidemill.services.console.text.formats import plural, sample_name
from tidemill.services.console.text.tree import Node, note, part, print_tree, show, table, terminal

HEX_ROW_BYTES = 16
HEX_FIRST_BYTES = 512
"""Bytes of an undecodable field that are shown unless all are asked for."""
SCAN_BATCH = 16
"""Entries read at once: each may hold a message of the greatest size."""
GONE = "the dead letter is gone: somebody has put it back or dropped it meanwhile"


@dataclass(frozen=True, slots=True)
class DeadEntry:
    """An entry of the stream of dead letters, read as far as it can be.

    Example: `entry_id` "1727000000000-0", `content` with the origin "trajectories" and the error, and the
    `message` itself: `key` is (12, 3). Of bytes that nobody can decode, `message` is None and `problem` says
    why.
    """

    entry_id: str
    content: DeadLetter
    message: Message | None = None
    """The original message, where this release can decode it."""
    problem: str = ""
    """Why it cannot."""
    claims: Mapping[str, Any] = field(default_factory=dict)
    """The payload's plain values, not validated; empty where it is no msgpack map."""
    is_readable: bool = True

    @property
    def stream(self) -> str:
        """The stream it came from, without the lane."""
        return self.content.origin.partition(":")[0]

    @property
    def lane(self) -> Lane:
        return Lane.EVAL if self.content.origin.endswith(EVAL) else Lane.TRAIN

    @property
    def died_at(self) -> float:
        """When it was dead-lettered, in seconds since 1970."""
        return self.content.died_at if self.is_readable else int(self.entry_id.partition("-")[0]) / 1000

    @property
    def fields(self) -> dict[bytes, bytes]:
        return {name.encode(): value for name, value in self.content.fields.items()}

    @property
    def num_bytes(self) -> int:
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
    dead_entries: list[DeadEntry] = []
    async for entry in entries:
        dead = decode_dead(entry, max_bytes)
        if (
            wanted.stream in ("", dead.content.origin)
            and wanted.ticket in (None, dead.key[0])
            and wanted.error.lower() in dead.content.error.lower()
            and wanted.worker in dead.content.worker
        ):
            dead_entries.append(dead)
        if limit and len(dead_entries) >= limit:
            break
    return dead_entries


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
        problem = str(error)
        claims = None
        payload = dead.fields.get(PAYLOAD_FIELD, b"")
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
    content = entry.content
    group = "groups" if entry.lane == "train" else "eval-groups"
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
    head = data[:limit]
    for start in range(0, len(head), HEX_ROW_BYTES):
        row = head[start : start + HEX_ROW_BYTES]
        characters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        yield note(f"  {start:08x}  {row.hex(' '):<{3 * HEX_ROW_BYTES}} {characters}")
    if len(head) < len(data):
        yield note(f"  ... {len(data) - len(head):,} more bytes; --hex shows all", "dim")


def _dead_json(entry: DeadEntry, with_content: bool = False) -> dict[str, Any]:
    """An entry for programs; `with_content` adds the bytes and the decoded message."""
    ticket, index = entry.key
    record = {
        "id": entry.entry_id,
        "died_at": entry.died_at,
        "stream": entry.content.origin,
        "ticket": ticket,
        "index": index,
        "num_bytes": entry.num_bytes,
        **entry.content.model_dump(include={"entry_id", "error", "attempts", "worker"}),
    }
    if with_content:
        record["fields_hex"] = {name: value.hex() for name, value in entry.content.fields.items()}
        record |= {"message": entry.message, "problem": entry.problem, "unvalidated": entry.claims}
    return record


def show_dead(options: ShowDeadOptions) -> None:
    """The entry that was named, else a list of the newest `limit` that the filter takes."""
    if len(options.ids) > 1:
        raise ConfigError("one letter is shown at a time; without an ID all are listed.")

    async def read(access: RunAccess) -> list[DeadEntry]:
        return await read_dead(access.history.scan(StreamName.DEAD), options, access.config)

    folder = find_run(options.run_id, options.runs_dir)
    entries = chosen(options, read_run(options, read), folder)
    if options.ids:
        (entry,) = entries
        record = _dead_json(entry, with_content=True)
        tree = dead_tree(entry, options.with_hex)
        show(record, tree, options.as_json, json_indent=2)
        return
    newest = entries[-options.limit :] if options.limit else entries
    counts = Counter(entry.content.origin[:40] for entry in entries)
    left_out = len(entries) - len(newest)
    older = [note(f"... and {left_out:,} older ones; --limit 0 shows all", "dim")] if left_out else []
    total = ", ".join(f"{count:,} from {origin}" for origin, count in sorted(counts.items()))
    tree = part("", dead_table(newest), older, note(total, "dim"))
    if not entries:
        tree = part("", note("no dead letters" + (" that fit" if options.is_narrow else "")))
    show([_dead_json(entry) for entry in newest], tree, options.as_json, json_indent=2)


def chosen(choice: DeadChoice, entries: Sequence[DeadEntry], folder: RunFolder) -> list[DeadEntry]:
    """The entries that were named, in that order, or all. `folder` is that of the run.

    Raises:
        ConfigError: there is none of that id.
    """
    by_id = {entry.entry_id: entry for entry in entries}
    unknown = [name for name in choice.ids if name not in by_id]
    if unknown:
        raise ConfigError(
            f"there is no dead letter {unknown[0]!r} in run {folder.run_id}; "
            f"`{folder.command('dead', 'show')}` has the ids of the {len(entries)} there are."
            f"{hint_of_run(unknown[0], folder.runs)}"
        )
    return [by_id[name] for name in dict.fromkeys(choice.ids)] if choice.ids else list(entries)


class RequeueResult(NamedTuple):
    is_done: bool
    words: str


@dataclass(frozen=True, slots=True)
class Requeuer:
    broker: Broker
    keys: Keys
    config: RunConfig
    outcomes: TicketOutcomes
    evaluated: frozenset[int]
    """Versions whose evaluation is on record."""
    is_finished: bool

    @classmethod
    async def open(
        cls, broker: Broker, keys: Keys, config: RunConfig, run_dir: Path | None = None
    ) -> "Requeuer":
        """Read a run's commits, tickets and state first."""
        state = await read_state(broker, keys)
        evaluated = frozenset(item.get("version", -1) for item in state.get("evaluations") or [])
        outcomes = await TicketOutcomes.read(History(keys.run_id, run_dir, broker))
        return cls(broker, keys, config, outcomes, evaluated, state.get("status") == FINISHED)

    async def put_back(self, entry: DeadEntry) -> RequeueResult:
        reason = await self._refusal(entry)
        if reason:
            return RequeueResult(False, reason)
        if entry.stream == "scores":
            key = self.keys.scores(entry.lane)
            is_done = await lease_scripts.reappend(
                self.broker,
                dead=self.keys.dead,
                log=key,
                dead_id=entry.entry_id,
                fields=list(entry.fields.items()),
            )
            return RequeueResult(is_done, "appended to the scores again" if is_done else GONE)
        return await self._hand_out_again(entry)

    async def drop(self, entry: DeadEntry) -> RequeueResult:
        """Remove an entry for good, unless the trainer has yet to act on it."""
        reason = await self.reason_to_keep(entry)
        if not reason and not await remove_entries(self.broker, self.keys.dead, [entry.entry_id]):
            reason = "it is gone already"
        return RequeueResult(not reason, reason)

    async def reason_to_keep(self, entry: DeadEntry) -> str:
        """Why it must not be dropped yet: the trainer learns from it that a group is dead."""
        ticket = entry.content.ticket
        is_of_group = entry.stream in ("prompts", "trajectories") and entry.content.entry_id and ticket >= 0
        if not is_of_group or entry.lane is Lane.EVAL or self._end_of(ticket, entry.lane):
            return ""
        if await self._is_trimmed(ticket, entry.lane):
            return ""
        return f"ticket {ticket} is not replaced yet: the trainer does so when it reads this dead letter"

    async def _refusal(self, entry: DeadEntry) -> str:
        """Why it cannot be put back, or would be of no use; empty where it can."""
        if not entry.is_readable:
            return "the dead letter itself cannot be decoded; drop it"
        if entry.stream not in ("prompts", "trajectories", "scores"):
            return (
                f"the stream {entry.content.origin!r} is written by the trainer alone, which writes it again "
                "itself where it is needed"
            )
        if entry.message is None:
            return f"it still cannot be decoded ({entry.problem}) and would only die again"
        if entry.stream == "trajectories" and not entry.content.entry_id:
            return "it is too old for its step and may never be trained on; its group was replaced"
        ticket, _ = entry.key
        # The step that a ticket of an evaluation was issued for is the version that it evaluates.
        version = entry.message.step if isinstance(entry.message, Ticket | Trajectory) else None
        end = self._end_of(ticket, entry.lane, version)
        if end:
            return f"{end}; there is nothing left that it could be used for"
        if await self._is_trimmed(ticket, entry.lane):
            return f"ticket {ticket} has been trimmed: nothing needs it any more"
        return ""

    def _end_of(self, ticket: int, lane: Lane, version: int | None = None) -> str:
        """Why nothing waits for a ticket any more, in words; empty where something still does."""
        outcomes = self.outcomes
        if lane is Lane.EVAL:
            if version is not None and version in self.evaluated:
                return f"the evaluation of version {version} is on record, without this sample"
        elif ticket in outcomes.trained:
            return f"ticket {ticket} was trained at step {outcomes.trained[ticket]}, which is committed"
        elif ticket in outcomes.replaced_by:
            return f"ticket {ticket} was replaced by ticket {outcomes.replaced_by[ticket]}"
        elif ticket in outcomes.dropped:
            return f"ticket {ticket} was replaced; the commit of step {outcomes.dropped[ticket]} tells of it"
        return "the run is finished" if self.is_finished else ""

    async def _is_trimmed(self, ticket: int, lane: Lane) -> bool:
        """Whether the ticket itself was trimmed, as happens when nothing needs it any more."""
        return not await has_entry(self.broker, self.keys.prompts(lane), entry_id_of(ticket))

    async def _hand_out_again(self, entry: DeadEntry) -> RequeueResult:
        """Make a ticket or a trajectory pending again, for the next worker that reclaims."""
        lane = entry.lane
        ticket, _ = entry.key
        lease_s = self.config.streams.lease_s
        name = StreamName(entry.content.origin)
        published = dict[int, int]()
        key = name.key(self.keys)
        group = name.group
        if entry.stream == "prompts":  # what was published before it died must not be generated a second time
            published = await self._published(ticket, lane)
        if await group_status(self.broker, key, group) is None:
            return RequeueResult(False, f"no {group} worker has ever joined; start one first")
        answer = await requeue(
            self.broker,
            self.keys.dead,
            entry.entry_id,
            key,
            group,
            entry.content.entry_id,
            lease_s=lease_s,
            progress_key=self.keys.progress(ticket, lane),
            published=sorted(published),
            started_version=min(published.values(), default=None),
        )
        if answer is RequeueReply.DONE:
            return RequeueResult(True, f"the next {group} worker takes it, within {lease_s:g} s")
        trimmed = "its stream does not hold it any more: it was trimmed, so nothing needs it"
        return RequeueResult(False, GONE if answer is RequeueReply.DEAD_LETTER_GONE else trimmed)

    async def _published(self, ticket: int, lane: Lane) -> dict[int, int]:
        """The least version in each published sample of a ticket, by index."""
        published: dict[int, int] = {}
        async for entry in scan(self.broker, self.keys.trajectories(lane), Trajectory):
            if isinstance(entry, Entry) and entry.message.ticket == ticket:
                published.setdefault(entry.message.index, entry.message.min_version)
        return published


def change_entries(choice: DeadChoice) -> int:
    """Puts the chosen messages back, or drops them; returns 1 where one that was named could not be."""
    drops = isinstance(choice, DropOptions)
    verb = "drop" if drops else "requeue"
    done = "dropped" if drops else "put back"
    if bool(choice.ids) == choice.has_all:
        folder = find_run(choice.run_id, choice.runs_dir)
        raise ConfigError(
            f"`{folder.command('dead', verb)}` takes the ids of dead letters, or --all; "
            f"`{folder.command('dead', 'show')}` has them."
        )
    if choice.ids and choice.is_narrow:
        raise ConfigError("filters choose among --all dead letters; leave them out, or the ids.")

    async def change() -> list[tuple[DeadEntry, RequeueResult]]:
        log_nothing()
        folder = find_run(choice.run_id, choice.runs_dir)
        async with connected(folder) as broker:
            keys = Keys(folder.run_id)
            config = await read_config(broker, keys)
            letters = scan(broker, keys.dead, DeadLetter, batch=SCAN_BATCH)
            entries = chosen(choice, await read_dead(letters, choice, config), folder)
            if isinstance(choice, DropOptions) and entries and not choice.is_sure:
                _ask(entries)
            # Read after the question: the trainer may have replaced a group before it was answered.
            requeuer = await Requeuer.open(broker, keys, config, folder.path)
            act = requeuer.drop if isinstance(choice, DropOptions) else requeuer.put_back
            return [(entry, await act(entry)) for entry in entries]

    results = run_main(change())
    num_done = sum(result.is_done for _, result in results)
    notes = []
    for entry, result in results:
        outcome = done if result.is_done else f"not {done}"
        words = f"  {result.words}" if result.words else ""
        text = f"{entry.entry_id}  {entry.content.origin} {entry.name}  {outcome}{words}"
        notes.append(note(text, "green" if result.is_done else "yellow"))
    print_tree(terminal(), part("", notes, note(f"{num_done} of {len(results)} {done}")))
    return 1 if choice.ids and num_done < len(results) else 0


def _ask(entries: Sequence[DeadEntry]) -> None:
    count = plural(len(entries), "dead letter")
    if not sys.stdin.isatty():
        raise ConfigError(f"dropping {count} cannot be undone; say --yes where nobody can be asked.")
    answer = input(f"Drop {count} for good, with their bytes? [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was dropped.")
