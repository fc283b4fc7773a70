"""What a run came to, computed from its commits rather than from what a process says about itself.

Commits that were trimmed are in the archive, so this can be computed again at any time, and it is what proves
that nothing was lost and nothing trained twice:

* a ticket is lost when it was issued and no commit trained its group or says why it was dropped;
* a trajectory of a trained group is lost when its commit neither trained it nor says why it was left out;
* a trajectory is duplicated when it was trained more than once, in one step or in several.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.history import History, StreamName
from tidemill.common.history.groups import TicketOutcomes, dropped_groups, left_out
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import EVALUATION, read_state
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, TrajectoryKey

ROUNDING = 1e-9
"""0.7 - 0.3 is a gain of 0.4, whatever floating point says."""


@dataclass(slots=True)
class RunSummary:
    run_id: str
    steps: int = 0
    """Committed steps."""
    eval_before: float | None = None
    """Mean score of the first evaluation, over its datasets."""
    eval_after: float | None = None
    """Mean score of the last evaluation, over its datasets."""
    reward_first: float | None = None
    """Mean reward of the first step."""
    reward_last: float | None = None
    """Mean reward of the last step."""
    max_staleness_seen: int = 0
    """Greatest staleness of a trained token, in steps."""
    tokens_per_s: float | None = None
    """Completion tokens trained per second of training time."""
    trainer_idle_share: float | None = None
    """Share of the trainer's time spent waiting, after the first step."""
    rollout_idle_share: float | None = None
    """The same of the rollout workers, on average."""
    trajectories_generated: int = 0
    trajectories_trained: int = 0
    lost: int = 0
    """Trajectories issued that no commit accounts for."""
    duplicated_in_training: int = 0
    sessions: dict[str, float] = field(default_factory=dict)
    """Mean turns, the environment's share of tokens and of time, the share that a limit truncated, and the
    number of faults; empty for single turns."""
    wall_s: float = 0.0
    """Time `tidemill up` has run, over all its starts; without it, the time from first step to last."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Trajectories left out, by reason."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    """The best evaluated version, whose weights are kept: version, metric, value, weights."""
    warnings: list[dict[str, Any]] = field(default_factory=list)
    """Numbers of the steps that left their healthy range: what, since when, until when, what to do."""
    reward_curve: list[float] = field(default_factory=list)
    """Mean reward of every step."""


async def summarise(
    broker: Broker,
    keys: Keys,
    config: RunConfig,
    run_dir: Path,
    records: Iterable[Mapping[str, Any]],
    *,
    wall_s: float,
    rollout_idle: float | None,
) -> RunSummary:
    """Read a run's commits, wherever they are, and its state, and sum them up.

    `records` are those of metrics.jsonl.
    """
    state = await read_state(broker, keys)
    tally = CommitTotals(config.trainer.group_size)
    history = History(keys.run_id, run_dir, broker)
    async for commit in history.messages(StreamName.COMMITS, Commit):
        tally.add(commit)
    summary = RunSummary(keys.run_id, wall_s=round(wall_s, 3), rollout_idle_share=rollout_idle)
    tally.write_into(summary, int(state.get("tickets_issued", 0)))
    summary.trajectories_generated = int(state.get("trajectories_seen", 0))
    # The last commit's is that of the training; the state's may be that of a process which only resumed.
    summary.trainer_idle_share = tally.trainer_idle_share
    if summary.trainer_idle_share is None:
        summary.trainer_idle_share = state.get("trainer_idle_share")
    recorded = [record for record in records if record["kind"] == EVALUATION]
    evaluations = merge_evaluations(state.get("evaluations") or [], recorded)
    summary.evaluations = evaluations
    summary.best = state.get("best")
    summary.warnings = list(state.get("warnings") or [])
    if evaluations:
        summary.eval_before = mean_score(evaluations, evaluations[0]["version"])
        summary.eval_after = mean_score(evaluations, evaluations[-1]["version"])
    return summary


class CommitTotals:
    """Adds up commits one by one, holding keys but not the commits."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size
        self.trained: Counter[TrajectoryKey] = Counter()
        self.outcomes = TicketOutcomes()
        self.dropped: Counter[str] = Counter()
        self.lost = 0
        self.rewards: list[float] = []
        self.steps: set[int] = set()
        self.max_staleness = 0
        self.tokens, self.seconds = 0.0, 0.0
        self.sessions: defaultdict[str, float] = defaultdict(float)
        """Sums over steps of the metrics of sessions; `steps` is how many have them."""
        self.trainer_idle_share: float | None = None
        self.started_at, self.finished_at = math.inf, 0.0
        """When the first step began and the last one ended."""

    def add(self, commit: Commit) -> None:
        keys = commit.trained_keys
        self.trained.update(keys)
        self.steps.add(commit.step)
        self.started_at = min(self.started_at, commit.started_at)
        self.finished_at = max(self.finished_at, commit.finished_at)
        accounted = set(keys)
        self.outcomes.add(commit)
        for ticket, reason in dropped_groups(commit):
            self.dropped[reason] += self._size_of(commit, ticket)
        for ticket, index, reason in left_out(commit):
            accounted.add((ticket, index))
            self.dropped[reason] += 1
        for ticket in commit.groups:
            size = self._size_of(commit, ticket)
            self.lost += sum((ticket, index) not in accounted for index in range(size))
        self._add_metrics(commit.metrics)

    def _size_of(self, commit: Commit, ticket: int) -> int:
        return commit.sizes.get(str(ticket), self.group_size)

    def write_into(self, summary: RunSummary, tickets_issued: int) -> None:
        """The totals, given how many tickets there were."""
        missing = sum(ticket not in self.outcomes for ticket in range(tickets_issued))
        summary.steps = len(self.steps)
        summary.lost = self.lost + missing * self.group_size
        summary.duplicated_in_training = sum(count > 1 for count in self.trained.values())
        summary.trajectories_trained = len(self.trained)
        summary.dropped = dict(self.dropped)
        summary.max_staleness_seen = self.max_staleness
        summary.reward_curve = [round(reward, 6) for reward in self.rewards]
        if self.steps and not summary.wall_s:
            summary.wall_s = round(self.finished_at - self.started_at, 3)
        summary.sessions = self._session_numbers()
        if self.rewards:
            summary.reward_first, summary.reward_last = self.rewards[0], self.rewards[-1]
        if self.seconds:
            summary.tokens_per_s = round(self.tokens / self.seconds, 3)

    def _session_numbers(self) -> dict[str, float]:
        """Means over the steps; faults are counted."""
        sums = self.sessions
        if not (steps := sums.get("steps")):
            return {}
        waited_s = sums["engine_s"] + sums["environment_s"]
        numbers = {
            "mean_turns": sums["mean_turns"] / steps,
            "environment_tokens_share": sums["environment_tokens_share"] / steps,
            "environment_time_share": sums["environment_s"] / waited_s if waited_s else 0.0,
            "truncated_share": sum(v for name, v in sums.items() if name.startswith("ended_")) / steps,
            "faults": sums["faults"],
        }
        return {name: round(value, 4) for name, value in numbers.items()}

    def _add_metrics(self, metrics: Mapping[str, float]) -> None:
        if "sessions/mean_turns" in metrics:
            self.sessions["steps"] += 1
            for name, value in metrics.items():
                if name.startswith("sessions/") and name != "sessions/ended_done":
                    self.sessions[name.removeprefix("sessions/")] += value
        if "reward" in metrics:
            self.rewards.append(metrics["reward"])
        self.max_staleness = max(self.max_staleness, int(metrics.get("staleness/max", 0)))
        self.tokens += metrics.get("completion_tokens", 0.0)
        self.seconds += metrics.get("step_time_s", 0.0)
        self.trainer_idle_share = metrics.get("trainer_idle_share", self.trainer_idle_share)


def merge_evaluations(
    state: Iterable[Mapping[str, Any]], records: Iterable[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Evaluations of the run's state and those that only metrics.jsonl still knows, oldest first."""
    merged = {(item["version"], item["set"]): dict(item) for item in [*records, *state]}
    return [merged[key] for key in sorted(merged)]


def mean_score(evaluations: Sequence[Mapping[str, Any]], version: int) -> float | None:
    """Mean score of one version over its datasets; None where no sample of it was scored."""
    scores = [e.get("score") for e in evaluations if e["version"] == version]
    known = [score for score in scores if score is not None and score == score]
    return sum(known) / len(known) if known else None


def failures(summary: RunSummary, config: RunConfig) -> list[str]:
    """What the run should have done and did not, one line each."""
    trainer, gain = config.trainer, config.expect.eval_gain
    found = []
    if summary.steps != trainer.steps:
        found.append(f"{summary.steps} of {trainer.steps} steps have a commit")
    if summary.lost:
        found.append(f"{summary.lost} trajectories were issued and never accounted for; expected 0")
    if summary.duplicated_in_training:
        found.append(f"{summary.duplicated_in_training} trajectories were trained more than once; expected 0")
    if summary.max_staleness_seen > trainer.max_staleness:
        found.append(
            f"a token of staleness {summary.max_staleness_seen} was trained on; "
            f"trainer.max_staleness is {trainer.max_staleness}"
        )
    if gain is not None:
        before, after = summary.eval_before, summary.eval_after
        if before is None or after is None:
            found.append(f"expect.eval_gain is {gain:g}, but no evaluation has a score")
        elif after - before < gain - ROUNDING:
            found.append(f"the evaluation went from {before:.3f} to {after:.3f}; expected a gain of {gain:g}")
    return found


def summary_tree(summary: RunSummary, problems: Sequence[str]) -> dict[str, Any]:
    """The summary as plain values, with the verdict."""
    verdict, text = learning_of(summary)
    learning = {"verdict": verdict, "text": text}
    return {**asdict(summary), "ok": not problems, "failures": list(problems), "learning": learning}


TOO_SHORT, NOTHING_LEARNED, LEARNED, FELL, UNKNOWN = "too_short", "nothing", "learned", "fell", ""
MIN_STEPS = 9
"""Three in each third."""
NUM_ERRORS = 2.0
"""Standard errors by which a reward must have moved to be more than noise."""


def learning_of(summary: RunSummary) -> tuple[str, str]:
    """Whether the reward rose, by its first and last third, and that in words; neither where all steps have
    the same reward, as where a teacher is what is learned from."""
    curve = summary.reward_curve
    if curve and len(curve) < MIN_STEPS:
        return TOO_SHORT, f"too short to tell: {len(curve)} steps, and at least {MIN_STEPS} are compared"
    if not curve or max(curve) == min(curve):
        return UNKNOWN, ""
    third = len(curve) // 3
    first, last = curve[:third], curve[-third:]
    before, after = statistics.fmean(first), statistics.fmean(last)
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / third)
    moved = f"from {before:.3f} in the first third of the steps to {after:.3f} in the last"
    if abs(after - before) <= NUM_ERRORS * error:
        return NOTHING_LEARNED, f"ran correctly, learned nothing: the reward went {moved}, within its noise"
    return (LEARNED, f"the reward rose {moved}") if after > before else (FELL, f"the reward fell {moved}")
