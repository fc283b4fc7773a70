"""What people see of a run under chaos: progress while it goes on, the table of faults, one line of JSON."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.report import print_table
from tests.chaos.driver import Driver, Outcome
from tests.chaos.faults import LOSSES, SESSION_KILLS
from tests.chaos.recovery import Event, summary

REFRESH_S = 0.5


class ChaosProgress:
    """Two bars, steps and faults, with each fault as a line above them."""

    def __init__(self, console: Console, num_steps: int, num_faults: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            auto_refresh=False,
        )
        self._steps = self._progress.add_task("steps", total=num_steps)
        self._faults = self._progress.add_task("faults", total=num_faults)

    def tell(self, text: str) -> None:
        """A line above the bars."""
        self._progress.console.print(text, highlight=False, markup=False)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """For the length of a block."""
        with self._progress:
            yield

    def update(self, driver: Driver) -> None:
        """Draw where the run stands."""
        self._progress.update(self._steps, completed=driver.archive.version)
        self._progress.update(self._faults, completed=driver.num_done)
        self._progress.refresh()


def print_faults(outcome: Outcome) -> None:
    """Every fault of a run and its recovery."""
    rows = [_row(event) for event in outcome.watch.events]
    verdict = outcome.verdict
    note = (
        f"{outcome.num_kills} kills in {outcome.wall_s:.0f} s; {verdict.steps} commits, {verdict.tickets} "
        f"tickets, {verdict.trained} trajectories trained, greatest staleness {verdict.max_staleness}.\n"
        f"lost {verdict.lost}, trained twice {verdict.duplicated}, too old {verdict.violations}, "
        f"dead letters {verdict.dead}; {outcome.num_lost_entries} entries lost by Redis.\n"
        f"faults of environments {outcome.num_faults}, scores that no environment gave "
        f"{len(outcome.misjudged)}, processes of environments left over {len(outcome.left_over)}.\n"
        f"{outcome.replay.num_compared} versions trained again, {len(outcome.replay.different)} different, "
        f"{len(outcome.replay.not_standing)} whose records Redis has lost."
    )
    columns = ("fault", "of", "at, s", "version", "loaded, s", "useful again, s", "")
    print_table(f"seed {outcome.seed}: what was done to the run", columns, rows, note)


def result(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The last line, over one run or several."""
    return {
        "seeds": [outcome.seed for outcome in outcomes],
        "kills": sum(outcome.num_kills for outcome in outcomes),
        "lost": sum(outcome.verdict.lost for outcome in outcomes),
        "duplicated_in_training": sum(outcome.verdict.duplicated for outcome in outcomes),
        "staleness_violations": sum(outcome.verdict.violations for outcome in outcomes),
        "environment_faults": sum(outcome.num_faults for outcome in outcomes),
        "faults_scored_0": sum(len(outcome.misjudged) for outcome in outcomes),
        "regenerated_share": round(max(outcome.regenerated_share for outcome in outcomes), 4),
        "environments_left_over": sum(len(outcome.left_over) for outcome in outcomes),
        "dead": sum(outcome.verdict.dead for outcome in outcomes),
        "digests_match": all(outcome.replay.matches for outcome in outcomes),
        "digests_compared": sum(outcome.replay.num_compared for outcome in outcomes),
        "archive_disagreements": sum(len(outcome.disagreements) for outcome in outcomes),
        "archiver_kills": sum(outcome.num_archiver_kills for outcome in outcomes),
        "recovery_s": summary([outcome.watch for outcome in outcomes]),
    }


def _row(event: Event) -> tuple[str, ...]:
    note = event.note
    if event.recovered_s is None and not note:
        note = "nothing was left for it to do"
    if event.is_overtaken:
        note = "killed again before that"
    is_kill = event.kind in SESSION_KILLS and event.kind not in LOSSES
    kind = f"kill {event.kind.value}" if is_kill else event.kind.value
    times = (_seconds(event.loaded_s), _seconds(event.recovered_s))
    return (kind, event.victim, f"{event.at_s:.1f}", str(event.version), *times, note)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
