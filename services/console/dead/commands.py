"""`tidemill dead list | show | requeue | drop`: the messages that nobody could process."""

import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
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
from services.console.dead.dead_letters import EVERY_LETTER, Fates, Letter, LetterFilter, read_letters
from services.console.dead.requeue import Requeuer, Verdict
from services.console.dead.view import as_tree, list_table, print_letter, sample_name
from services.console.launch.views import log_nothing
from services.console.run.connection import connect
from services.console.run.folder import find_run, folder_of_runs
from services.console.text.untrusted import printable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DeadOptions:
    """Which run, and which of its letters."""

    run_id: str | None
    runs_dir: Path | None
    wanted: LetterFilter = EVERY_LETTER
    ids: tuple[str, ...] = ()
    has_all: bool = False

    def check(self, verb: str) -> None:
        """Either ids or --all; filters go with --all.

        Raises:
            ConfigError: neither or both were given.
        """
        if bool(self.ids) == self.has_all:
            raise ConfigError(
                f"tidemill dead {verb} takes the ids of letters, or --all; `tidemill dead list` has them."
            )
        if self.ids and self.wanted != EVERY_LETTER:
            raise ConfigError("filters choose among --all letters; leave them out, or the ids.")


def show_list(options: DeadOptions, as_json: bool, limit: int) -> None:
    """Print the letters that the filter takes, the newest `limit` of them."""
    letters = run_main(_with_run(options, _read))
    shown = letters[-limit:] if limit else letters
    if as_json:
        print(json.dumps([as_tree(letter) for letter in shown], indent=2))
        return
    console = Console(highlight=False)
    if not letters:
        console.print("no dead letters" + (" that fit" if options.wanted != EVERY_LETTER else ""))
        return
    console.print(list_table(shown))
    if len(shown) < len(letters):
        console.print(f"... and {len(letters) - len(shown):,} older ones; --limit 0 shows all", style="dim")
    counts = Counter(printable(letter.content.origin, 40) for letter in letters)
    console.print(
        Text(", ".join(f"{count:,} from {origin}" for origin, count in sorted(counts.items())), "dim")
    )


def show_one(options: DeadOptions, as_json: bool, with_hex: bool) -> None:
    """Print everything that is known of one letter.

    Raises:
        ConfigError: there is no such letter.
    """
    (letter,) = _chosen(options, run_main(_with_run(options, _read)))
    if as_json:
        print(json.dumps(as_tree(letter, with_content=True), indent=2))
    else:
        print_letter(Console(highlight=False), letter, with_hex)


def requeue_letters(options: DeadOptions) -> int:
    """Put letters back; returns 0, or 1 where a letter that was named could not be."""
    options.check("requeue")

    async def put_back(run: "_Run") -> list[Verdict]:
        letters = _chosen(options, await _read(run))
        requeuer = await run.requeuer()
        return [await requeuer.put_back(letter) for letter in letters]

    return _report(options, run_main(_with_run(options, put_back)), "put back")


def drop_letters(options: DeadOptions, is_sure: bool) -> int:
    """Remove letters for good, after asking; returns 0, or 1 where a letter that was named could not be.

    Raises:
        ConfigError: nobody can be asked, and `is_sure` was not said.
    """
    options.check("drop")
    letters = _chosen(options, run_main(_with_run(options, _read)))
    if letters and not is_sure:
        _ask(letters)

    async def drop(run: "_Run") -> list[Verdict]:
        requeuer = await run.requeuer()
        verdicts = []
        for letter in letters:
            reason = await requeuer.reason_to_keep(letter)
            if not reason and not await remove_entries(run.broker, run.keys.dead, [letter.letter_id]):
                reason = "it is gone already"
            verdicts.append(Verdict(letter, not reason, reason))
        return verdicts

    return _report(options, run_main(_with_run(options, drop)), "dropped")


@dataclass(frozen=True, slots=True)
class _Run:
    broker: Broker
    keys: Keys
    config: RunConfig
    wanted: LetterFilter

    async def requeuer(self) -> Requeuer:
        return Requeuer(self.broker, self.keys, self.config, await Fates.read(self.broker, self.keys))


async def _with_run(options: DeadOptions, work: Callable[[_Run], Awaitable[T]]) -> T:
    async with _open(options) as run:
        return await work(run)


@asynccontextmanager
async def _open(options: DeadOptions) -> AsyncIterator[_Run]:
    log_nothing()
    folder = find_run(options.run_id, folder_of_runs(options.runs_dir))
    broker = await connect(folder)
    try:
        keys = Keys(folder.run_id)
        yield _Run(broker, keys, await read_config(broker, keys), options.wanted)
    finally:
        await broker.close()


async def _read(run: _Run) -> list[Letter]:
    return await read_letters(run.broker, run.keys, run.wanted, run.config.streams.max_message_mb << 20)


def _chosen(options: DeadOptions, letters: Sequence[Letter]) -> list[Letter]:
    """The letters that were named, in that order, or all."""
    if not options.ids:
        return list(letters)
    by_id = {letter.letter_id: letter for letter in letters}
    if unknown := [name for name in options.ids if name not in by_id]:
        raise ConfigError(
            f"there is no dead letter {unknown[0]!r}; `tidemill dead list` has the ids of the {len(letters)} "
            "there are."
        )
    return [by_id[name] for name in dict.fromkeys(options.ids)]


def _ask(letters: Sequence[Letter]) -> None:
    """Let the user confirm that letters are removed for good."""
    count = f"{len(letters)} dead letter{'s' if len(letters) != 1 else ''}"
    if not sys.stdin.isatty():
        raise ConfigError(f"dropping {count} cannot be undone; say --yes where nobody can be asked.")
    answer = input(f"Drop {count} for good, with their bytes? [y/N] ")
    if answer.strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was dropped.")


def _report(options: DeadOptions, verdicts: Sequence[Verdict], verb: str) -> int:
    console = Console(highlight=False)
    for verdict in verdicts:
        style = "green" if verdict.is_done else "yellow"
        name = f"{verdict.letter.letter_id}  {verdict.letter.content.origin} {sample_name(verdict.letter)}"
        words = f"  {verdict.words}" if verdict.words else ""
        console.print(
            Text.assemble(
                printable(name), "  ", (verb if verdict.is_done else f"not {verb}", style), printable(words)
            ),
            soft_wrap=True,
        )
    num_done = sum(verdict.is_done for verdict in verdicts)
    console.print(f"{num_done} of {len(verdicts)} {verb}")
    return 1 if options.ids and num_done < len(verdicts) else 0
