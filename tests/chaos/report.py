"""What people see of a run under chaos when it is over: the table of faults, one line of JSON."""

from collections.abc import Sequence
from typing import Any

from benchmarks.report import print_table
from tests.chaos.driver import Outcome
from tests.chaos.faults import LOSSES, SESSION_KILLS
from tests.chaos.recovery import Event, summary


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
    if outcome.num_kills_left:
        note += (
            f"\nThe run ended before the last {outcome.num_kills_left} kills: give it more steps "
            "(--set trainer.steps=N), or ask for fewer kills (--kills N)."
        )
    columns = "fault,of,at (s),version,loaded (s),useful again (s),"
    print_table(f"seed {outcome.seed}: what was done to the run", columns, rows, note)


def result(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The last line, over one run or several."""
    return {
        "seeds": [outcome.seed for outcome in outcomes],
        "kills": sum(outcome.num_kills for outcome in outcomes),
        "kills_left": sum(outcome.num_kills_left for outcome in outcomes),
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
