"""`tidemill dead`: lists dead letters, shows one, puts messages back or drops them."""

import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from tidemill.common.config.run import StreamsConfig
from tidemill.common.errors import ConfigError
from tidemill.common.history import StreamName
from tidemill.common.process.programs import run_main
from tidemill.common.run.state import read_config
from tidemill.common.streams import scan
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import DeadLetter
from tidemill.services.console.dead.entries import DeadEntry, read_dead
from tidemill.services.console.dead.requeue import Requeuer, RequeueResult, TicketEnds
from tidemill.services.console.options import DeadChoice, DropOptions, ShowDeadOptions
from tidemill.services.console.run.folder import connected, find_run, folder_of_runs, log_nothing
from tidemill.services.console.run.history import open_history
from tidemill.services.console.text.formats import plural, sample_name
from tidemill.services.console.text.tree import Node, jsonable, note, part, print_tree, table, terminal

HEX_ROW_BYTES = 16
HEX_FIRST_BYTES = 512
"""Bytes of an undecodable field that are shown unless all are asked for."""
SCAN_BATCH = 16
"""Entries read at once: each may hold a message of the greatest size."""


def dead_table(entries: Sequence[DeadEntry]) -> Node:
    return table(
        {
            "id": Node("id", entry.entry_id, link=f"dead/{entry.entry_id}"),
            "when": Node("when", entry.died_at, "time"),
            "stream": entry.content.origin,
            "sample": sample_name(*entry.key),
            "attempts": entry.content.attempts,
            "worker": entry.content.worker,
            "error": entry.content.error,
        }
        for entry in entries
    )


def dead_tree(entry: DeadEntry, with_hex: bool = False) -> Node:
    """Everything that is known of an entry, then the message that died, or its bytes."""
    content, group = entry.content, "groups" if entry.lane == "train" else "eval-groups"
    sample = f"{group}/{entry.key[0]}" if entry.key[0] >= 0 else ""
    parts = [
        Node("died", entry.died_at, "time"),
        Node("stream", content.origin),
        Node("entry", content.entry_id or "(made by the trainer)"),
        Node("sample", sample_name(*entry.key), link=sample),
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


def dead_json(entry: DeadEntry, with_content: bool = False) -> dict[str, Any]:
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
    """Print the entries that the filter takes, the newest `limit` of them; or all of the one that is named.

    Raises:
        ConfigError: there is no such entry.
    """
    if len(options.ids) > 1:
        raise ConfigError("one letter is shown at a time; without an ID all are listed.")
    entries = run_main(_look(options))
    if options.ids:
        _show_one(options, _chosen(options, entries)[0])
        return
    shown = entries[-options.limit :] if options.limit else entries
    if options.as_json:
        print(json.dumps([dead_json(entry) for entry in shown], indent=2))
        return
    if not entries:
        print("no dead letters" + (" that fit" if options.is_narrow else ""))
        return
    counts = Counter(entry.content.origin[:40] for entry in entries)
    left_out = len(entries) - len(shown)
    older = [note(f"... and {left_out:,} older ones; --limit 0 shows all", "dim")] if left_out else []
    total = note(", ".join(f"{count:,} from {origin}" for origin, count in sorted(counts.items())), "dim")
    print_tree(terminal(), part("", dead_table(shown), older, total))


def _show_one(options: ShowDeadOptions, entry: DeadEntry) -> None:
    if options.as_json:
        print(json.dumps(dead_json(entry, with_content=True), indent=2))
    else:
        print_tree(terminal(), dead_tree(entry, options.with_hex))


def requeue_entries(choice: DeadChoice) -> int:
    """Put messages back; returns 0, or 1 where one that was named could not be."""
    return _change(choice, "requeue", "put back", Requeuer.put_back)


def drop_entries(choice: DropOptions) -> int:
    """Remove entries for good, after asking; returns 0, or 1 where one that was named could not be.

    Raises:
        ConfigError: nobody can be asked, and `is_sure` was not said.
    """
    return _change(choice, "drop", "dropped", Requeuer.drop, None if choice.is_sure else _ask)


def _change(
    choice: DeadChoice,
    verb: str,
    done: str,
    act: Callable[[Requeuer, DeadEntry], Awaitable[RequeueResult]],
    confirm: Callable[[Sequence[DeadEntry]], None] | None = None,
) -> int:
    """Do something to the chosen entries, and print what came of each; returns the exit code.

    Raises:
        ConfigError: neither ids nor --all were given, or both, or an id is not there.
    """
    if bool(choice.ids) == choice.has_all:
        raise ConfigError(
            f"tidemill dead {verb} takes the ids of dead letters, or --all; `tidemill dead show` has them."
        )
    if choice.ids and choice.is_narrow:
        raise ConfigError("filters choose among --all dead letters; leave them out, or the ids.")

    async def change() -> list[RequeueResult]:
        log_nothing()
        folder = find_run(choice.run_id, folder_of_runs(choice.runs_dir))
        async with connected(folder) as broker:
            keys = Keys(folder.run_id)
            config = await read_config(broker, keys)
            found = scan(broker, keys.dead, DeadLetter, batch=SCAN_BATCH)
            entries = _chosen(choice, await read_dead(found, choice, config.streams.max_message_mb << 20))
            if entries and confirm is not None:
                confirm(entries)
            # Read after the question: the trainer may have replaced a group while nobody answered.
            requeuer = Requeuer(broker, keys, config, await TicketEnds.read(broker, keys, folder.path))
            return [await act(requeuer, entry) for entry in entries]

    results = run_main(change())
    num_done = sum(result.is_done for result in results)
    total = note(f"{num_done} of {len(results)} {done}")
    print_tree(terminal(), part("", (_result_note(result, done) for result in results), total))
    return 1 if choice.ids and num_done < len(results) else 0


def _result_note(result: RequeueResult, done: str) -> Node:
    entry = result.entry
    name = f"{entry.entry_id}  {entry.content.origin} {sample_name(*entry.key)}"
    outcome = done if result.is_done else f"not {done}"
    words = f"  {result.words}" if result.words else ""
    return note(f"{name}  {outcome}{words}", "green" if result.is_done else "yellow")


async def _look(choice: DeadChoice) -> list[DeadEntry]:
    """The entries wherever they are now: a run that is over has them in its folder or its archive."""
    async with open_history(choice.run_id, choice.runs_dir) as access:
        limit_mb = (access.config.streams if access.config else StreamsConfig()).max_message_mb
        return await read_dead(access.history.scan(StreamName.DEAD), choice, limit_mb << 20)


def _chosen(choice: DeadChoice, entries: Sequence[DeadEntry]) -> list[DeadEntry]:
    """The entries that were named, in that order, or all."""
    if not choice.ids:
        return list(entries)
    by_id = {entry.entry_id: entry for entry in entries}
    if unknown := [name for name in choice.ids if name not in by_id]:
        raise ConfigError(
            f"there is no dead letter {unknown[0]!r}; `tidemill dead show` has the ids of the {len(entries)} "
            "there are."
        )
    return [by_id[name] for name in dict.fromkeys(choice.ids)]


def _ask(entries: Sequence[DeadEntry]) -> None:
    """Let the user confirm that entries are removed for good."""
    count = plural(len(entries), "dead letter")
    if not sys.stdin.isatty():
        raise ConfigError(f"dropping {count} cannot be undone; say --yes where nobody can be asked.")
    answer = input(f"Drop {count} for good, with their bytes? [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was dropped.")
