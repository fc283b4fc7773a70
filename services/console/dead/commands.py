"""Dead letters on a terminal and as JSON. Whatever they hold is shown, and nothing of it takes effect.

Text from a letter was written by whoever wrote the message: markup is not interpreted, and characters that a
terminal would act on, or that change the order of reading, are shown as escapes.
"""

import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.common.config import RunConfig
from tidemill.common.config.run import StreamsConfig
from tidemill.common.errors import ConfigError
from tidemill.common.history import StreamName
from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import read_config
from tidemill.common.streams import remove_entries, scan
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import DeadLetter
from tidemill.services.console.dead.dead_letters import Letter, read_letters
from tidemill.services.console.dead.requeue import LetterResult, Requeuer, TicketEnds
from tidemill.services.console.options import LetterChoice
from tidemill.services.console.records.tables import print_values
from tidemill.services.console.run.folder import connected, find_run, folder_of_runs, log_nothing
from tidemill.services.console.run.history import open_history
from tidemill.services.console.text.formats import printable, sample_name, when
from tidemill.services.console.text.tables import jsonable, listing, name_table, plain_fields, terminal

ERROR_CHARACTERS = 60
HEX_ROW_BYTES = 16
SCAN_BATCH = 16
"""Letters read at once: each may hold a message of the greatest size."""
HEX_FIRST_BYTES = 512
"""Bytes of an undecodable field that are shown unless all are asked for."""


def list_table(letters: Sequence[Letter]) -> Table:
    """One line for each letter."""
    titles = ("id", "when", "stream", "sample", "error", "attempts", "worker")
    table = listing(titles, folds=("error", "worker"))
    for letter in letters:
        content = letter.content
        cells = (
            letter.letter_id,
            when(letter.died_at),
            printable(content.origin, 40),
            sample_name(*letter.key),
            printable(content.error, ERROR_CHARACTERS),
            str(content.attempts),
            printable(content.worker, 40),
        )
        table.add_row(*map(Text, cells))
    return table


def print_letter(console: Console, letter: Letter, with_hex: bool) -> None:
    """Every field of a letter, then the message that died, or its bytes."""
    content = letter.content
    table = name_table("bold", indent=0)
    rows = [
        ("letter", letter.letter_id),
        ("died", when(letter.died_at)),
        ("stream", content.origin),
        ("entry", content.entry_id or "(made by the trainer)"),
        ("sample", sample_name(*letter.key)),
        ("error", content.error),
        ("attempts", str(content.attempts)),
        ("worker", content.worker),
        ("size", f"{letter.num_bytes:,} bytes"),
    ]
    for name, value in rows:
        table.add_row(name, Text(printable(value)))
    console.print(table)
    if letter.message is not None:
        print_values(console, f"{letter.message.kind}, decoded", plain_fields(letter.message))
    else:
        console.print(Text(f"\ncannot be decoded: {printable(letter.problem)}", "yellow"))
        if letter.claims:
            print_values(console, "what its bytes say, not validated", letter.claims)
    if with_hex or letter.message is None:
        for name, data in content.fields.items():
            _print_hex(console, name, data, None if with_hex else HEX_FIRST_BYTES)


def as_tree(letter: Letter, with_content: bool = False) -> dict[str, Any]:
    """A letter for programs; `with_content` adds the bytes and the decoded message."""
    content = letter.content
    ticket, index = letter.key
    tree: dict[str, Any] = {
        "id": letter.letter_id,
        "died_at": letter.died_at,
        "stream": content.origin,
        "entry_id": content.entry_id,
        "ticket": ticket,
        "index": index,
        "error": content.error,
        "attempts": content.attempts,
        "worker": content.worker,
        "num_bytes": letter.num_bytes,
    }
    if with_content:
        tree["fields_hex"] = {name: value.hex() for name, value in content.fields.items()}
        tree["message"] = jsonable(plain_fields(letter.message)) if letter.message is not None else None
        tree["problem"] = letter.problem
        tree["unvalidated"] = jsonable(letter.claims)
    return tree


def _print_hex(console: Console, name: str, value: bytes, limit: int | None) -> None:
    shown = value[:limit] if limit else value
    console.print(Text(f"\nfield {printable(name, 40)}, {len(value):,} bytes", "bold"))
    for start in range(0, len(shown), HEX_ROW_BYTES):
        row = shown[start : start + HEX_ROW_BYTES]
        characters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        text = f"  {start:08x}  {row.hex(' '):<{3 * HEX_ROW_BYTES}} {characters}"
        console.print(Text(text), soft_wrap=True)
    if len(shown) < len(value):
        console.print(Text(f"  ... {len(value) - len(shown):,} more bytes; --hex shows all", "dim"))


T = TypeVar("T")


def _check(choice: LetterChoice, verb: str) -> None:
    """Either ids or --all; filters go with --all.

    Raises:
        ConfigError: neither or both were given.
    """
    if bool(choice.ids) == choice.has_all:
        raise ConfigError(
            f"tidemill dead {verb} takes the ids of letters, or --all; `tidemill dead show` has them."
        )
    if choice.ids and choice.is_narrow:
        raise ConfigError("filters choose among --all letters; leave them out, or the ids.")


def show_list(choice: LetterChoice, as_json: bool, limit: int) -> None:
    """Print the letters that the filter takes, the newest `limit` of them."""
    letters = run_main(_look(choice))
    shown = letters[-limit:] if limit else letters
    if as_json:
        print(json.dumps([as_tree(letter) for letter in shown], indent=2))
        return
    console = terminal()
    if not letters:
        console.print("no dead letters" + (" that fit" if choice.is_narrow else ""))
        return
    console.print(list_table(shown))
    if len(shown) < len(letters):
        console.print(f"... and {len(letters) - len(shown):,} older ones; --limit 0 shows all", style="dim")
    counts = Counter(printable(letter.content.origin, 40) for letter in letters)
    console.print(
        Text(", ".join(f"{count:,} from {origin}" for origin, count in sorted(counts.items())), "dim")
    )


def show_one(choice: LetterChoice, as_json: bool, with_hex: bool) -> None:
    """Print everything that is known of one letter.

    Raises:
        ConfigError: there is no such letter.
    """
    (letter,) = _chosen(choice, run_main(_look(choice)))
    if as_json:
        print(json.dumps(as_tree(letter, with_content=True), indent=2))
    else:
        print_letter(Console(highlight=False), letter, with_hex)


def requeue_letters(choice: LetterChoice) -> int:
    """Put letters back; returns 0, or 1 where a letter that was named could not be."""
    _check(choice, "requeue")

    async def put_back(run: "_Run") -> list[LetterResult]:
        letters = _chosen(choice, await _read(run))
        requeuer = await run.requeuer()
        return [await requeuer.put_back(letter) for letter in letters]

    return _report(choice, run_main(_with_run(choice, put_back)), "put back")


def drop_letters(choice: LetterChoice, is_sure: bool) -> int:
    """Remove letters for good, after asking; returns 0, or 1 where a letter that was named could not be.

    Raises:
        ConfigError: nobody can be asked, and `is_sure` was not said.
    """
    _check(choice, "drop")
    letters = _chosen(choice, run_main(_with_run(choice, _read)))
    if letters and not is_sure:
        _ask(letters)

    async def drop(run: "_Run") -> list[LetterResult]:
        requeuer = await run.requeuer()
        results = []
        for letter in letters:
            reason = await requeuer.reason_to_keep(letter)
            if not reason and not await remove_entries(run.broker, run.keys.dead, [letter.letter_id]):
                reason = "it is gone already"
            results.append(LetterResult(letter, not reason, reason))
        return results

    return _report(choice, run_main(_with_run(choice, drop)), "dropped")


@dataclass(frozen=True, slots=True)
class _Run:
    broker: Broker
    keys: Keys
    run_dir: Path
    config: RunConfig
    wanted: LetterChoice

    async def requeuer(self) -> Requeuer:
        ends = await TicketEnds.read(self.broker, self.keys, self.run_dir)
        return Requeuer(self.broker, self.keys, self.config, ends)


async def _with_run(choice: LetterChoice, work: Callable[[_Run], Awaitable[T]]) -> T:
    async with _open(choice) as run:
        return await work(run)


@asynccontextmanager
async def _open(choice: LetterChoice) -> AsyncIterator[_Run]:
    log_nothing()
    folder = find_run(choice.run_id, folder_of_runs(choice.runs_dir))
    async with connected(folder) as broker:
        keys = Keys(folder.run_id)
        yield _Run(broker, keys, folder.path, await read_config(broker, keys), choice)


async def _read(run: _Run) -> list[Letter]:
    entries = scan(run.broker, run.keys.dead, DeadLetter, batch=SCAN_BATCH)
    return await read_letters(entries, run.wanted, run.config.streams.max_message_mb << 20)


async def _look(choice: LetterChoice) -> list[Letter]:
    """The letters wherever they are now: a run that is over has them in its folder or its archive."""
    async with open_history(choice.run_id, choice.runs_dir) as access:
        config = access.config
        limit_mb = config.streams.max_message_mb if config else StreamsConfig().max_message_mb
        return await read_letters(access.history.scan(StreamName.DEAD), choice, limit_mb << 20)


def _chosen(choice: LetterChoice, letters: Sequence[Letter]) -> list[Letter]:
    """The letters that were named, in that order, or all."""
    if not choice.ids:
        return list(letters)
    by_id = {letter.letter_id: letter for letter in letters}
    if unknown := [name for name in choice.ids if name not in by_id]:
        raise ConfigError(
            f"there is no dead letter {unknown[0]!r}; `tidemill dead show` has the ids of the {len(letters)} "
            "there are."
        )
    return [by_id[name] for name in dict.fromkeys(choice.ids)]


def _ask(letters: Sequence[Letter]) -> None:
    """Let the user confirm that letters are removed for good."""
    count = f"{len(letters)} dead letter{'s' if len(letters) != 1 else ''}"
    if not sys.stdin.isatty():
        raise ConfigError(f"dropping {count} cannot be undone; say --yes where nobody can be asked.")
    answer = input(f"Drop {count} for good, with their bytes? [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was dropped.")


def _report(choice: LetterChoice, results: Sequence[LetterResult], verb: str) -> int:
    console = Console(highlight=False)
    for result in results:
        style = "green" if result.is_done else "yellow"
        name = f"{result.letter.letter_id}  {result.letter.content.origin} {sample_name(*result.letter.key)}"
        words = f"  {result.words}" if result.words else ""
        console.print(
            Text.assemble(
                printable(name), "  ", (verb if result.is_done else f"not {verb}", style), printable(words)
            ),
            soft_wrap=True,
        )
    num_done = sum(result.is_done for result in results)
    console.print(f"{num_done} of {len(results)} {verb}")
    return 1 if choice.ids and num_done < len(results) else 0
