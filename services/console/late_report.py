"""`tidemill report`: what a run came to that no `tidemill up` has seen to its end, such as one of many nodes.

It is computed from the commits, like the report of `tidemill up`, and can be computed again at any time.
"""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from common.config import RunConfig
from common.errors import ConfigError
from common.files import StorageError
from common.keys import Keys
from common.main_task import run_main
from common.run_state import has_finished, read_config, read_state
from services.console.console_log import log_nothing
from services.console.report import print_report, write_report
from services.console.run_connection import connect
from services.console.run_folder import RunFolder, find_run, folder_of_runs
from services.console.summary import RunSummary, failures, summarise, summary_tree


def show_report(run_id: str | None, as_json: bool, runs_dir: Path | None) -> int:
    """Print the report of a finished run, and keep it in the run's folder; returns the exit code.

    Raises:
        TidemillError: Redis cannot be reached or does not know the run, or the run has not finished.
    """
    log_nothing()
    folder = find_run(run_id, folder_of_runs(runs_dir))
    summary, config = run_main(_summarise(folder))
    problems = failures(summary, config)
    tree = summary_tree(summary, problems)
    console = Console(highlight=False)
    note = _keep(folder, tree)
    if as_json:
        print(json.dumps(tree, indent=2))
    else:
        print_report(console, folder, tree)
        console.print(note, style="dim", soft_wrap=True)
    return 1 if problems else 0


async def _summarise(folder: RunFolder) -> tuple[RunSummary, RunConfig]:
    broker, keys = await connect(folder), Keys(folder.run_id)
    try:
        config = await read_config(broker, keys)
        state = await read_state(broker, keys)
        if not await has_finished(broker, keys, config.trainer.steps):
            raise ConfigError(
                f"run {folder.run_id} has not finished ({state.get('version', 0)} of {config.trainer.steps} "
                "steps, then the last evaluation). `tidemill status` says how it is doing."
            )
        ran_s = float(state.get("ran_s", 0.0))
        return await summarise(broker, keys, config, folder.path, wall_s=ran_s, rollout_idle=None), config
    finally:
        await broker.close()


def _keep(folder: RunFolder, tree: dict[str, Any]) -> str:
    """Write the report where the run's folder is seen from here; returns what to say if it is not."""
    if not folder.path.is_dir():
        return f"not kept: {folder.path} is not on this machine"
    try:
        write_report(folder, tree)
    except StorageError as error:
        return f"not kept: {error}"
    return ""
