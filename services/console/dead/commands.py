"""`tidemill dead list | show | requeue | drop`: the messages that nobody could process."""

import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from common.config import RunConfig
from common.errors import ConfigError
from common.process.programs import run_main
from common.redis.broker import Broker
from common.run.state import read_config
from common.streams import remove_entries
from common.wire.keys import Keys
from services.console.dead.dead_letters import Letter, read_letters
from services.console.dead.requeue import LetterResult, Requeuer, TicketEnds
from services.console.dead.view import as_tree, list_table, print_letter
from services.console.options import LetterChoice
from services.console.run.connection import connected, log_nothing
from services.console.run.folder import find_run, folder_of_runs
from services.console.text.formats import sample_name
from services.console.text.untrusted import printable

T = TypeVar("T")


def _check(choice: LetterChoice, verb: str) -> None:
    """Either ids or --all; filters go with --all.

    Raises:
        ConfigError: neither or both were given.
    """
    if bool(choice.ids) == choice.has_all:
        raise ConfigError(
            f"tidemill dead {verb} takes the ids of letters, or --all; `tidemill dead list` has them."
        )
    if choice.ids and choice.is_narrow:
        raise ConfigError("filters choose among --all letters; leave them out, or the ids.")


def show_list(choice: LetterChoice, as_json: bool, limit: int) -> None:
    """Print the letters that the filter takes, the newest `limit` of them."""
    letters = run_main(_with_run(choice, _read))
    shown = letters[-limit:] if limit else letters
    if as_json:
        print(json.dumps([as_tree(letter) for letter in shown], indent=2))
        return
    console = Console(highlight=False)
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
    (letter,) = _chosen(choice, run_main(_with_run(choice, _read)))
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
    config: RunConfig
    wanted: LetterChoice

    async def requeuer(self) -> Requeuer:
        return Requeuer(self.broker, self.keys, self.config, await TicketEnds.read(self.broker, self.keys))


async def _with_run(choice: LetterChoice, work: Callable[[_Run], Awaitable[T]]) -> T:
    async with _open(choice) as run:
        return await work(run)


@asynccontextmanager
async def _open(choice: LetterChoice) -> AsyncIterator[_Run]:
    log_nothing()
    folder = find_run(choice.run_id, folder_of_runs(choice.runs_dir))
    async with connected(folder) as broker:
        keys = Keys(folder.run_id)
        yield _Run(broker, keys, await read_config(broker, keys), choice)


async def _read(run: _Run) -> list[Letter]:
    return await read_letters(run.broker, run.keys, run.wanted, run.config.streams.max_message_mb << 20)


def _chosen(choice: LetterChoice, letters: Sequence[Letter]) -> list[Letter]:
    """The letters that were named, in that order, or all."""
    if not choice.ids:
        return list(letters)
    by_id = {letter.letter_id: letter for letter in letters}
    if unknown := [name for name in choice.ids if name not in by_id]:
        raise ConfigError(
            f"there is no dead letter {unknown[0]!r}; `tidemill dead list` has the ids of the {len(letters)} "
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
