"""`tidemill status`: look at a run from outside, without touching it."""

import asyncio
import contextlib
import json
import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tidemill.common.errors import BrokerError, ConfigError, TidemillError
from tidemill.common.process.programs import run_main
from tidemill.services.console.options import StatusOptions
from tidemill.services.console.run.folder import RunFolder, connected, find_run, log_nothing
from tidemill.services.console.status.render import dashboard
from tidemill.services.console.status.report import print_report, read_report, show_report
from tidemill.services.console.status.snapshot import RunSnapshot, SnapshotReader, read_folder

REFRESH_S = 1.0
HINT = "Ctrl-C ends the watching; the run goes on"


def show_status(options: StatusOptions) -> int:
    """Print how the run is doing; where its Redis is gone, its summary or what its folder tells.

    Raises:
        TidemillError: neither Redis nor the run's folder can be had.
    """
    if options.watch and (options.report or options.as_json):
        raise ConfigError("--watch goes with neither --report nor --json.")
    if options.fails_on_warning and not options.report:
        raise ConfigError("--fail-on-warning goes with --report.")
    folder, as_json = find_run(options.run_id, options.runs_dir), options.as_json
    if options.report:
        return show_report(folder, as_json, options.fails_on_warning)
    log_nothing()
    if options.watch:
        _watch_folder(folder)
        return 0
    report = read_report(folder)
    try:
        snapshot = run_main(look(folder))
    except TidemillError as error:
        if report is not None:
            _print_finished(folder, report, as_json)
        elif folder.config() is None:
            raise
        else:
            _print_folder(folder, as_json, error)
        return 0
    if as_json:
        print(json.dumps(snapshot.as_dict(), indent=2))
    elif report is not None and snapshot.status == "finished":
        _print_finished(folder, report, as_json)
    else:
        Console(highlight=False).print(dashboard(snapshot))
    return 0


def _watch_folder(folder: RunFolder) -> None:
    """Show the live view until Ctrl-C, or until the run has finished."""
    console = Console(highlight=False)
    if not console.is_terminal:
        raise ConfigError("--watch needs a terminal; leave it out, or take --json for programs.")
    with contextlib.suppress(KeyboardInterrupt):
        try:
            run_main(_watch(folder, console))
        except (BrokerError, ConfigError) as error:
            if folder.config() is None:
                raise
            _print_folder(folder, False, error)  # nothing moves there: it is shown once


async def look(folder: RunFolder) -> RunSnapshot:
    """One snapshot of a run, from its Redis.

    Raises:
        TidemillError: its Redis cannot be had.
    """
    async with connected(folder) as broker:
        return await (await SnapshotReader.attach(broker, folder.run_id)).read()


async def _watch(folder: RunFolder, console: Console) -> None:
    async with connected(folder) as broker:
        reader = await SnapshotReader.attach(broker, folder.run_id)
        snapshot = await reader.read()
        with Live(console=console, screen=True, auto_refresh=False) as live:
            pending: asyncio.Task[RunSnapshot] | None = None
            while True:
                # Redis may be away: then the last picture stays, and says how old it is.
                pending = pending or asyncio.create_task(reader.read())
                done, _ = await asyncio.wait({pending}, timeout=REFRESH_S)
                if done:
                    snapshot, pending = pending.result(), None
                picture = dashboard(snapshot, hint=HINT, silent_s=time.time() - snapshot.at)
                live.update(picture, refresh=True)
                await asyncio.sleep(REFRESH_S if done else 0.0)


def _print_folder(folder: RunFolder, as_json: bool, error: TidemillError) -> None:
    """A run that stopped, from its folder; why Redis was not asked comes last."""
    snapshot, words = read_folder(folder)
    if as_json:
        print(json.dumps(snapshot.as_dict() | {"source": str(folder.path), "note": words}, indent=2))
        return
    console = Console(highlight=False)
    console.print(dashboard(snapshot))
    console.print(Text(words, "yellow"), soft_wrap=True)
    console.print(Text(str(error), "dim"), soft_wrap=True)


def _print_finished(folder: RunFolder, report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_report(Console(highlight=False), folder, report)
