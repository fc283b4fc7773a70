"""The end of a run: summary.json, the picture, and a table for people."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from tidemill.common.config import RunConfig
from tidemill.common.errors import BrokerError, ConfigError
from tidemill.common.files import StorageError, write_atomically
from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.run.plots import plot_learning_curve
from tidemill.common.run.state import METRICS_FILE, has_finished, read_config, read_records, read_state
from tidemill.common.wire.keys import Keys
from tidemill.services.console.run.folder import (
    PICTURE_FILE,
    SUMMARY_FILE,
    RunFolder,
    find_run,
    folder_of_runs,
    log_nothing,
    nearest,
)
from tidemill.services.console.run.history import MissingHistoryError, open_history
from tidemill.services.console.status.summary import (
    NOTHING_LEARNED,
    RunSummary,
    failures,
    summarise,
    summary_tree,
)
from tidemill.services.console.text.formats import NOTHING
from tidemill.services.console.text.tree import jsonable

FEW_STEPS = 5
"""With fewer, most of the time is that of the start."""
PERCENT, NUMBER, COUNT, SECONDS = "percent", "number", "count", "seconds"

ROWS = (
    ("steps", "steps", COUNT),
    ("eval_before", "evaluation before", NUMBER),
    ("eval_after", "evaluation after", NUMBER),
    ("reward_first", "reward, first step", NUMBER),
    ("reward_last", "reward, last step", NUMBER),
    ("max_staleness_seen", "greatest staleness", COUNT),
    ("tokens_per_s", "completion tokens per second", COUNT),
    ("trainer_idle_share", "trainer idle", PERCENT),
    ("rollout_idle_share", "rollout idle", PERCENT),
    ("trajectories_generated", "trajectories generated", COUNT),
    ("trajectories_trained", "trajectories trained", COUNT),
    ("lost", "lost", COUNT),
    ("duplicated_in_training", "trained twice", COUNT),
    ("wall_s", "wall time", SECONDS),
)


SESSION_ROWS = (
    ("mean_turns", "turns a session", NUMBER),
    ("environment_tokens_share", "tokens of the environment", PERCENT),
    ("environment_time_share", "time in the environment", PERCENT),
    ("truncated_share", "sessions truncated", PERCENT),
    ("faults", "faults of the environment", COUNT),
)


def write_report(folder: RunFolder, tree: Mapping[str, Any]) -> None:
    """Write summary.json and reward.png into the run's folder."""
    plain = json.dumps(jsonable(tree), indent=2, allow_nan=False) + "\n"
    write_atomically(folder.summary, plain)
    plot_learning_curve(read_records(folder.path / METRICS_FILE), folder.path / PICTURE_FILE)


def read_report(folder: RunFolder) -> dict[str, Any] | None:
    """The summary of a finished run, None where there is none."""
    try:
        tree = json.loads(folder.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None


def summary_table(tree: Mapping[str, Any]) -> RenderableType:
    """The summary as a table."""
    table = Table(title=f"run {tree.get('run_id', '')}", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, label, form in ROWS:
        table.add_row(label, _shown(tree.get(name), form))
    if sessions := tree.get("sessions"):
        for name, label, form in SESSION_ROWS:
            table.add_row(label, _shown(sessions.get(name), form))
    if best := tree.get("best"):
        table.add_row(f"best version, by {best['metric']}", f"{best['version']} ({best['value']:.3f})")
    for reason, count in (tree.get("dropped") or {}).items():
        table.add_row(f"left out: {reason.replace('_', ' ')}", f"{count:,}")
    return table


def print_report(console: Console, folder: RunFolder, tree: Mapping[str, Any]) -> None:
    """The table, where the files are, and the verdict."""
    console.print(summary_table(tree))
    for path in (folder.summary, folder.path / PICTURE_FILE):
        if path.exists():
            console.print(f"  {nearest(path)}", style="dim", soft_wrap=True)
    said: list[tuple[tuple[str, str], str]] = []
    if verdict := tree.get("bottleneck"):
        is_known = tree.get("steps", 0) >= FEW_STEPS
        found = f"{verdict['text']}. {verdict.get('advice', '')}"
        text = found if is_known else f"too short to tell: fewer than {FEW_STEPS} steps"
        said.append((("slowest", "magenta"), text))
    said += [(("warning", "yellow"), line) for line in spell_lines(tree.get("warnings") or [])]
    said += [(("failed", "bold red"), str(problem)) for problem in tree.get("failures") or []]
    learning = tree.get("learning") or {}
    if tree.get("ok"):
        said.append((("ok", "bold green"), "everything that was expected of the run holds"))
    if learning.get("text"):
        style = "yellow" if learning["verdict"] == NOTHING_LEARNED else "dim"
        said.append((("learning", style), learning["text"]))
    for (name, style), text in said:  # a terminal breaks between words; files and programs get whole lines
        console.print(Text.assemble((f"{name}  ", style), text), soft_wrap=not console.is_terminal)


def spell_lines(warnings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The warnings of a run that is over, each once: when it held, and what to do about it next time."""
    found: dict[tuple[Any, Any], list[str]] = {}
    for warning in warnings:
        until, worst = warning.get("until_step"), warning.get("worst")
        end = "the end" if until is None else str(until)  # steps are counted from 1 for people
        shown = f"{worst:.4g}" if worst is not None else "not a number"
        steps = f"steps {warning.get('since_step', 0) + 1} to {end}, at worst {shown}"
        found.setdefault((warning.get("text"), warning.get("advice")), []).append(steps)
    return [f"{text} ({'; '.join(steps)}). {advice}" for (text, advice), steps in found.items()]


def _shown(value: Any, form: str) -> str:
    if value is None:
        return NOTHING
    if form == PERCENT:
        return f"{value:.1%}"
    if form == NUMBER:
        return f"{value:.3f}"
    return f"{value:,.1f} s" if form == SECONDS else f"{value:,.0f}"


def show_report(
    run_id: str | None, as_json: bool, runs_dir: Path | None, fails_on_warning: bool = False
) -> int:
    """Print the report of a finished run, and keep it in the run's folder; returns the exit code.

    Where its streams are gone, or in the archive alone, the report that the folder keeps is shown.

    Raises:
        TidemillError: nothing is left of the run, or it has not finished.
    """
    log_nothing()
    folder = find_run(run_id, folder_of_runs(runs_dir))
    console, note = Console(highlight=False), ""
    tree = run_main(_tree_of(folder))
    if tree is not None:
        note = _keep(folder, tree)
    elif (tree := read_report(folder)) is None:
        raise ConfigError(
            f"run {folder.run_id}: its archive alone is left, and no {SUMMARY_FILE}; `tidemill streams show "
            f"{folder.run_id}` shows what there is."
        )
    if as_json:
        print(json.dumps(tree, indent=2))
    else:
        print_report(console, folder, tree)
        console.print(note, style="dim", soft_wrap=True)
    return 1 if tree.get("failures") or (fails_on_warning and tree.get("warnings")) else 0


async def _tree_of(folder: RunFolder) -> dict[str, Any] | None:
    """The report from the streams; None where the run's Redis and its data are gone."""
    try:
        async with open_history(str(folder.path), None) as access:
            if access.history.broker is None:
                return None
            summary, config = await _summarise(access.history.broker, folder)
            return summary_tree(summary, failures(summary, config))
    except (BrokerError, MissingHistoryError):
        if not folder.summary.exists():
            raise
        return None


async def _summarise(broker: Broker, folder: RunFolder) -> tuple[RunSummary, RunConfig]:
    keys = Keys(folder.run_id)
    config = await read_config(broker, keys)
    state = await read_state(broker, keys)
    if not await has_finished(broker, keys, config.trainer.steps):
        raise ConfigError(
            f"run {folder.run_id} has not finished ({state.get('version', 0)} of {config.trainer.steps} "
            "steps, then the last evaluation). `tidemill status` says how it is doing."
        )
    ran_s = float(state.get("ran_s", 0.0))
    return await summarise(broker, keys, config, folder.path, wall_s=ran_s, rollout_idle=None), config


def _keep(folder: RunFolder, tree: dict[str, Any]) -> str:
    """Write the report where the run's folder is seen from here; returns what to say if it is not."""
    if not folder.path.is_dir():
        return f"not kept: {folder.path} is not on this machine"
    try:
        write_report(folder, tree)
    except StorageError as error:
        return f"not kept: {error}"
    return ""
