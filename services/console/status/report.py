"""The end of a run: summary.json, the picture, and a table for people."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from tidemill.common.errors import BrokerError, ConfigError
from tidemill.common.files import StorageError, write_atomically
from tidemill.common.process.programs import run_main
from tidemill.common.run.plots import plot_learning_curve
from tidemill.common.run.state import METRICS_FILE, has_finished, read_config, read_records, read_state
from tidemill.common.wire.keys import Keys
from tidemill.services.console.run.folder import (
    PICTURE_FILE,
    SUMMARY_FILE,
    RunFolder,
    log_nothing,
    nearest,
)
from tidemill.services.console.run.history import MissingHistoryError, open_history
from tidemill.services.console.status.summary import NOTHING_LEARNED, failures, summarise, summary_tree
from tidemill.services.console.text.formats import printable_block
from tidemill.services.console.text.tree import Node, jsonable, part, print_tree

FEW_STEPS = 5
"""With fewer, most of the time is that of the start."""
ROWS = (
    ("steps", "steps", ""),
    ("eval_before", "evaluation before", ""),
    ("eval_after", "evaluation after", ""),
    ("reward_first", "reward, first step", ""),
    ("reward_last", "reward, last step", ""),
    ("max_staleness_seen", "greatest staleness", ""),
    ("tokens_per_s", "completion tokens per second", ""),
    ("trainer_idle_share", "trainer idle", "share"),
    ("rollout_idle_share", "rollout idle", "share"),
    ("trajectories_generated", "trajectories generated", ""),
    ("trajectories_trained", "trajectories trained", ""),
    ("lost", "lost", ""),
    ("duplicated_in_training", "trained twice", ""),
    ("wall_s", "wall time", "s"),
)
SESSION_ROWS = (
    ("mean_turns", "turns a session", ""),
    ("environment_tokens_share", "tokens of the environment", "share"),
    ("environment_time_share", "time in the environment", "share"),
    ("truncated_share", "sessions truncated", "share"),
    ("faults", "faults of the environment", ""),
)
"""Fields of a summary with their labels and units."""

Records = Sequence[Mapping[str, Any]]


def write_report(folder: RunFolder, tree: Mapping[str, Any], records: Records) -> None:
    """Write summary.json, and reward.png from the records of metrics.jsonl, into the run's folder."""
    plain = json.dumps(jsonable(tree), indent=2, allow_nan=False) + "\n"
    write_atomically(folder.summary, plain)
    plot_learning_curve(records, folder.path / PICTURE_FILE)


def read_report(folder: RunFolder) -> dict[str, Any] | None:
    """The summary of a finished run, None where there is none."""
    try:
        tree = json.loads(folder.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return tree if isinstance(tree, dict) else None


def report_tree(tree: Mapping[str, Any]) -> Node:
    """The numbers of a summary."""
    sessions = tree.get("sessions") or {}
    lines = [Node(label, tree.get(name), unit) for name, label, unit in ROWS]
    lines += [Node(label, sessions.get(name), unit) for name, label, unit in SESSION_ROWS if sessions]
    if best := tree.get("best"):
        lines.append(Node(f"best version, by {best['metric']}", f"{best['version']} ({best['value']:.3f})"))
    for reason, count in (tree.get("dropped") or {}).items():
        lines.append(Node(f"left out: {reason.replace('_', ' ')}", count))
    return part(f"run {tree.get('run_id', '')}", lines)


def verdict_lines(tree: Mapping[str, Any]) -> Iterator[Node]:
    """What made the run slow, what it warned of, what failed, and whether it learned."""
    if verdict := tree.get("bottleneck"):
        is_known = tree.get("steps", 0) >= FEW_STEPS
        found = f"{verdict['text']}. {verdict.get('advice', '')}"
        text = found if is_known else f"too short to tell: fewer than {FEW_STEPS} steps"
        yield Node("slowest", text, "text", style="magenta")
    for line in spell_lines(tree.get("warnings") or []):
        yield Node("warning", line, "text", style="yellow")
    for problem in tree.get("failures") or []:
        yield Node("failed", str(problem), "text", style="bold red")
    if tree.get("ok"):
        yield Node("ok", "everything that was expected of the run holds", style="bold green")
    learning = tree.get("learning") or {}
    if learning.get("text"):
        style = "yellow" if learning["verdict"] == NOTHING_LEARNED else "dim"
        yield Node("learning", learning["text"], style=style)


def print_report(console: Console, folder: RunFolder, tree: Mapping[str, Any]) -> None:
    """The numbers, where the files are, and the verdict."""
    print_tree(console, report_tree(tree))
    for path in (folder.summary, folder.path / PICTURE_FILE):
        if path.exists():
            console.print(f"  {nearest(path)}", style="dim", soft_wrap=True)
    for line in verdict_lines(tree):  # a terminal breaks between words; files and programs get whole lines
        said = Text.assemble((f"{line.label}  ", line.style), printable_block(line.value))
        console.print(said, soft_wrap=not console.is_terminal)


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


def show_report(folder: RunFolder, as_json: bool, fails_on_warning: bool = False) -> int:
    """Print the report of a finished run, and keep it in the run's folder; returns the exit code.

    Where its streams are gone, or in the archive alone, the report that the folder keeps is shown.

    Raises:
        TidemillError: nothing is left of the run, or it has not finished.
    """
    log_nothing()
    console, note = Console(highlight=False), ""
    records = read_records(folder.path / METRICS_FILE)
    tree = run_main(_tree_of(folder, records))
    if tree is not None:
        note = _keep(folder, tree, records)
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


async def _tree_of(folder: RunFolder, records: Records) -> dict[str, Any] | None:
    """The report from the streams; None where the run's Redis and its data are gone."""
    try:
        async with open_history(folder) as access:
            if (broker := access.history.broker) is None:
                return None
            keys = Keys(folder.run_id)
            config, state = await read_config(broker, keys), await read_state(broker, keys)
            if not await has_finished(broker, keys, config.trainer.steps):
                raise ConfigError(
                    f"run {folder.run_id} has not finished ({state.get('version', 0)} of "
                    f"{config.trainer.steps} steps, then the last evaluation). `tidemill status` says how it "
                    "is doing."
                )
            ran_s = float(state.get("ran_s", 0.0))
            summary = await summarise(
                broker, keys, config, folder.path, records, wall_s=ran_s, rollout_idle=None
            )
            return summary_tree(summary, failures(summary, config))
    except (BrokerError, MissingHistoryError):
        if not folder.summary.exists():
            raise
        return None


def _keep(folder: RunFolder, tree: dict[str, Any], records: Records) -> str:
    """Write the report where the run's folder is seen from here; returns what to say if it is not."""
    if not folder.path.is_dir():
        return f"not kept: {folder.path} is not on this machine"
    try:
        write_report(folder, tree, records)
    except StorageError as error:
        return f"not kept: {error}"
    return ""
