"""The result of a run: summary.json, reward.png, and a table for people.

All of it is computed from the run's commits rather than from what a process says about itself. Commits that
were trimmed are in the archive, so this can be computed again at any time, and it is what proves that nothing
was lost and nothing trained twice:

* a ticket is lost when it was issued and no commit trained its group or says why it was dropped;
* a trajectory of a trained group is lost when its commit neither trained it nor says why it was left out;
* a trajectory is duplicated when it was trained more than once, in one step or in several.
"""

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from tidemill.common.config import RunConfig
from tidemill.common.errors import BrokerError, ConfigError
from tidemill.common.files import StorageError, write_atomically
from tidemill.common.history import History, StreamName
from tidemill.common.history.groups import TicketOutcomes, dropped_groups, left_out
from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import (
    METRICS_FILE,
    REASON,
    has_finished,
    read_config,
    read_records,
    read_state,
)
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, TrajectoryKey
from tidemill.services.console.commands import StatusOptions
from tidemill.services.console.look.failed_scores import FailedScores, failing_lines, failure_rows
from tidemill.services.console.look.plots import plot_learning_curve
from tidemill.services.console.run.folder import (
    PICTURE_FILE,
    SUMMARY_FILE,
    RunFolder,
    find_run,
    log_nothing,
    nearest,
)
from tidemill.services.console.run.history import MissingHistoryError, open_history
from tidemill.services.console.text.formats import printable_block
from tidemill.services.console.text.tree import Node, jsonable, part, print_tree

ROUNDING = 1e-9
"""Tolerance of a gain: 0.7 - 0.3 counts as 0.4, in spite of floating point."""
MIN_STEPS = 9
"""Least steps with which a run's reward is judged: three in each third."""
MAX_FAILED_SHARE = 0.1
"""With a larger share of failed samples an evaluation's mean decides nothing: those that are left may be the
easy ones."""
EXPECTED_HOLDS = "everything that was expected of the run holds"
NOTHING_EXPECTED = (
    "every step is committed, nothing is lost or trained twice. Nothing was expected of its result (expect)"
)
NUM_ERRORS = 2.0
"""Standard errors by which a reward must have moved to be more than noise."""
REASONS_OF_SCORES = frozenset(("failed_score", "too_few_scores"))
"""Why samples are left out, or groups replaced, whose rewards have failed."""
FEW_STEPS = 5
"""With fewer steps no bottleneck is named: most of the time is that of the start."""


@dataclass(frozen=True, slots=True)
class EvaluatedSamples:
    """Over how many samples an evaluation's mean is, and why others have no score."""

    num_scored: int = 0
    num_failed: int = 0
    reason: str = ""
    """Why samples failed, the most frequent cause; empty where none did."""

    @classmethod
    def of(cls, evaluations: Sequence[Mapping[str, Any]], version: int) -> "EvaluatedSamples":
        """The evaluated samples of one version, over its datasets."""
        of_version = [item for item in evaluations if item["version"] == version]
        reasons = [str(item[REASON]) for item in of_version if item.get(REASON)]
        return cls(
            sum(int(item.get("num_samples") or 0) for item in of_version),
            sum(int(item.get("num_failed") or 0) for item in of_version),
            reasons[0] if reasons else "",
        )

    @property
    def failed_share(self) -> float:
        total = self.num_scored + self.num_failed
        return self.num_failed / total if total else 0.0

    @property
    def in_words(self) -> str:
        """`37 of 128 samples; 91 failed: REASON`; empty where none failed."""
        if not self.num_failed:
            return ""
        total = self.num_scored + self.num_failed
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.num_scored:,} of {total:,} samples; {self.num_failed:,} failed{reason}"


@dataclass(slots=True)
class RunSummary:
    """What a run did from its first commit to its last: most of summary.json.

    Example: `steps` 200, `eval_before` 0.12, `eval_after` 0.81, `trajectories_trained` 6,390, `dropped`
    {"stale": 10}, `lost` 0, `duplicated_in_training` 0.
    """

    run_id: str
    steps: int = 0
    eval_before: float | None = None
    """Mean score of the first evaluation, over its datasets."""
    eval_after: float | None = None
    """Mean score of the last evaluation, over its datasets."""
    eval_before_samples: EvaluatedSamples = field(default_factory=EvaluatedSamples)
    eval_after_samples: EvaluatedSamples = field(default_factory=EvaluatedSamples)
    """The samples behind both: a mean over the survivors alone says little."""
    reward_first: float | None = None
    reward_last: float | None = None
    max_staleness_seen: int = 0
    tokens_per_s: float | None = None
    """Completion tokens trained per second of training time."""
    trainer_idle_share: float | None = None
    """Share of the trainer's time spent waiting, after the first step."""
    rollout_idle_share: float | None = None
    """Mean idle share that the rollout workers last reported."""
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
    failed_rewards: list[dict[str, Any]] = field(default_factory=list)
    """Rewards that failed, by reward and cause: what, kind, reason (of the last), count."""
    failed_rewards_among: int | None = None
    """Of how many newest scores; None: of all."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    best: dict[str, Any] | None = None
    """The best evaluated version, whose weights are kept: version, metric, value, weights."""
    warnings: list[dict[str, Any]] = field(default_factory=list)
    """Metrics that left their healthy range: which, since and until which step, what to do."""
    reward_curve: list[float] = field(default_factory=list)


async def summarise(
    broker: Broker,
    keys: Keys,
    config: RunConfig,
    run_dir: Path,
    *,
    wall_s: float,
    rollout_idle: float | None,
) -> dict[str, Any]:
    """The tree of summary.json, from a run's commits, wherever they are, and its state. `wall_s` is how long
    `tidemill up` has run, 0 where nothing watched; `rollout_idle` the share that
    the rollout workers last reported."""
    state = await read_state(broker, keys)
    totals = CommitTotals(keys.run_id, config.trainer.group_size)
    history = History(keys.run_id, run_dir, broker)
    async for commit in history.messages(StreamName.COMMITS, Commit):
        totals.add(commit)
    summary = totals.finish(int(state.get("tickets_issued", 0)))
    has_fixed_values = any(named.failure_value is not None for named in config.reward.rewards.values())
    # Scores are read only where some may have failed: there may be very many.
    if totals.has_failed_scores or has_fixed_values:
        failed_scores = FailedScores(config.reward)
        await failed_scores.read(history)
        summary.failed_rewards = failure_rows(failed_scores.failures)
        summary.failed_rewards_among = None if failed_scores.is_complete else failed_scores.num_read
    summary.wall_s = round(wall_s, 3) or summary.wall_s
    summary.rollout_idle_share = rollout_idle
    summary.trajectories_generated = int(state.get("trajectories_seen", 0))
    summary.evaluations = list(state.get("evaluations") or [])
    summary.best = state.get("best")
    summary.warnings = list(state.get("warnings") or [])
    if summary.evaluations:
        first = summary.evaluations[0]["version"]
        last = summary.evaluations[-1]["version"]
        summary.eval_before = mean_score(summary.evaluations, first)
        summary.eval_after = mean_score(summary.evaluations, last)
        summary.eval_before_samples = EvaluatedSamples.of(summary.evaluations, first)
        summary.eval_after_samples = EvaluatedSamples.of(summary.evaluations, last)
    return summary_tree(summary, config)


class CommitTotals:
    """Adds commits up one by one into a summary, holding keys but not the commits."""

    def __init__(self, run_id: str, group_size: int) -> None:
        self._summary = RunSummary(run_id)
        self._group_size = group_size
        self._trained: Counter[TrajectoryKey] = Counter()
        self._dropped: Counter[str] = Counter()
        self._outcomes = TicketOutcomes()
        self._sums: defaultdict[str, float] = defaultdict(float)
        """Sums of metrics over steps, and `session_steps`, the number of steps with metrics of sessions."""
        self._began_at = math.inf
        self._ended_at = 0.0
        self.has_failed_scores = False

    def add(self, commit: Commit) -> None:
        summary = self._summary
        keys = commit.trained_keys
        metrics = commit.metrics
        summary.steps += 1
        self._trained.update(keys)
        self._outcomes.add(commit)
        self._began_at = min(self._began_at, commit.started_at)
        self._ended_at = max(self._ended_at, commit.finished_at)
        for ticket, reason in dropped_groups(commit):
            self._dropped[reason] += commit.sizes.get(str(ticket), self._group_size)
        self._dropped.update(reason for *_, reason in left_out(commit))
        accounted = {*keys, *((ticket, index) for ticket, index, _ in left_out(commit))}
        for ticket in commit.groups:
            size = commit.sizes.get(str(ticket), self._group_size)
            summary.lost += sum((ticket, index) not in accounted for index in range(size))
        if metrics.get("scores/failed_ratio") or not REASONS_OF_SCORES.isdisjoint(self._dropped):
            self.has_failed_scores = True
        self._sums["session_steps"] += "sessions/mean_turns" in metrics
        for name, value in metrics.items():
            if name.startswith("sessions/") or name in ("completion_tokens", "step_time_s"):
                self._sums[name] += value
        reward = metrics.get("reward")
        if reward is not None:
            summary.reward_first = reward if summary.reward_first is None else summary.reward_first
            summary.reward_last = reward
            summary.reward_curve.append(round(reward, 6))
        summary.max_staleness_seen = max(summary.max_staleness_seen, int(metrics.get("staleness/max", 0)))
        summary.trainer_idle_share = metrics.get("trainer_idle_share", summary.trainer_idle_share)

    def finish(self, tickets_issued: int) -> RunSummary:
        """Complete the summary and return it; called once, after the last commit."""
        summary = self._summary
        seconds = self._sums["step_time_s"]
        summary.tokens_per_s = round(self._sums["completion_tokens"] / seconds, 3) if seconds else None
        summary.trajectories_trained = len(self._trained)
        summary.duplicated_in_training = sum(count > 1 for count in self._trained.values())
        missing = sum(ticket not in self._outcomes for ticket in range(tickets_issued))
        summary.lost += missing * self._group_size
        summary.wall_s = round(self._ended_at - self._began_at, 3) if summary.steps else 0.0
        summary.dropped = dict(self._dropped)
        summary.sessions = self._sessions()
        return summary

    def _sessions(self) -> dict[str, float]:
        steps = self._sums["session_steps"]
        if not steps:
            return {}
        sums = {name.removeprefix("sessions/"): value for name, value in self._sums.items()}
        spent_s = sums.get("environment_s", 0.0)
        waited_s = sums.get("engine_s", 0.0) + spent_s
        ended = sum(v for name, v in sums.items() if name.startswith("ended_") and name != "ended_done")
        numbers = {
            "mean_turns": sums["mean_turns"] / steps,
            "environment_tokens_share": sums.get("environment_tokens_share", 0.0) / steps,
            "environment_time_share": spent_s / waited_s if waited_s else 0.0,
            "truncated_share": ended / steps,
            "faults": sums.get("faults", 0.0),
        }
        return {name: round(value, 4) for name, value in numbers.items()}


def mean_score(evaluations: Sequence[Mapping[str, Any]], version: int) -> float | None:
    """Mean score of one version over its datasets; None where no sample of it was scored."""
    scores = [e.get("score") for e in evaluations if e["version"] == version]
    numbers = [score for score in scores if score is not None and score == score]
    return sum(numbers) / len(numbers) if numbers else None


def failures(summary: RunSummary, config: RunConfig) -> list[str]:
    """What the run should have done and did not, one line each."""
    trainer = config.trainer
    gain = config.expect.eval_gain
    problems = []
    if summary.steps != trainer.steps:
        problems.append(f"{summary.steps} of {trainer.steps} steps have a commit")
    if summary.lost:
        problems.append(f"{summary.lost} trajectories were issued and never accounted for; expected 0")
    if summary.duplicated_in_training:
        problems.append(
            f"{summary.duplicated_in_training} trajectories were trained more than once; expected 0"
        )
    if summary.max_staleness_seen > trainer.max_staleness:
        problems.append(
            f"a token of staleness {summary.max_staleness_seen} was trained on; "
            f"trainer.max_staleness is {trainer.max_staleness}"
        )
    if gain is not None:
        before = summary.eval_before
        after = summary.eval_after
        problems += survivor_problems(summary, gain)
        if before is None or after is None:
            problems.append(f"expect.eval_gain is {gain:g}, but no evaluation has a score")
        elif after - before < gain - ROUNDING:
            problems.append(
                f"the evaluation went from {before:.3f} to {after:.3f}; expected a gain of {gain:g}"
            )
    return problems


def survivor_problems(summary: RunSummary, gain: float) -> list[str]:
    """Why an expected gain is not known to hold: evaluations whose mean is over too few of their samples."""
    ends = (("first", summary.eval_before_samples), ("last", summary.eval_after_samples))
    return [
        f"expect.eval_gain is {gain:g}, and whether it holds is not known: the mean of the {which} "
        f"evaluation is over {samples.in_words}. At most {MAX_FAILED_SHARE:.0%} may fail"
        for which, samples in ends
        if samples.failed_share > MAX_FAILED_SHARE
    ]


def summary_tree(summary: RunSummary, config: RunConfig) -> dict[str, Any]:
    problems = failures(summary, config)
    verdict, text = learning_of(summary)
    learning = {"verdict": verdict, "text": text}
    expected = {name: value for name, value in config.expect.model_dump().items() if value is not None}
    ends = {"ok": not problems, "failures": problems, "learning": learning, "expected": expected}
    return {**asdict(summary), **ends}


def learning_of(summary: RunSummary) -> tuple[str, str]:
    """Whether the reward rose from its first to its last third, or else the evaluation by more than the
    reward's noise, as a verdict and in words; both are empty where all steps have the same reward, as when
    only a teacher is learned from."""
    curve = summary.reward_curve
    if curve and len(curve) < MIN_STEPS:
        return "too_short", f"too short to tell: {len(curve)} steps, and at least {MIN_STEPS} are compared"
    if not curve or max(curve) == min(curve):
        return "", ""
    third = len(curve) // 3
    first = curve[:third]
    last = curve[-third:]
    before = statistics.fmean(first)
    after = statistics.fmean(last)
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / third)
    moved = f"from {before:.3f} in the first third of the steps to {after:.3f} in the last"
    if abs(after - before) <= NUM_ERRORS * error:
        went = f"the reward went {moved}, within its noise"
        score = summary.eval_after
        start = summary.eval_before
        if score is not None and start is not None and score - start > NUM_ERRORS * error:
            return "learned", f"the evaluation rose from {start:.3f} to {score:.3f}; {went}"
        return "nothing", f"ran correctly, learned nothing: {went}"
    return ("learned", f"the reward rose {moved}") if after > before else ("fell", f"the reward fell {moved}")


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


def write_report(folder: RunFolder, tree: Mapping[str, Any]) -> None:
    """Write summary.json, and reward.png from the records of metrics.jsonl, into the run's folder."""
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


def summary_value(tree: Mapping[str, Any], name: str) -> Any:
    """A field of the summary; a mean with the samples that it is over, where others failed."""
    value = tree.get(name)
    fields = tree.get(f"{name}_samples") or {}
    words = EvaluatedSamples(**fields).in_words
    if not words:
        return value
    return f"{value:.3f} of {words}" if value is not None else f"none: {words}"


def report_tree(tree: Mapping[str, Any]) -> Node:
    sessions = tree.get("sessions") or {}
    lines = [Node(label, summary_value(tree, name), unit) for name, label, unit in ROWS]
    lines += [Node(label, sessions.get(name), unit) for name, label, unit in SESSION_ROWS if sessions]
    best = tree.get("best")
    if best:
        lines.append(Node(f"best version, by {best['metric']}", f"{best['version']} ({best['value']:.3f})"))
    for reason, count in (tree.get("dropped") or {}).items():
        lines.append(Node(f"left out: {reason.replace('_', ' ')}", count))
    return part(f"run {tree.get('run_id', '')}", lines)


def verdict_lines(tree: Mapping[str, Any]) -> Iterator[Node]:
    """What made the run slow, what it warned of, what failed, and whether it learned."""
    verdict = tree.get("bottleneck")
    if verdict:
        is_known = tree.get("steps", 0) >= FEW_STEPS
        words = f"{verdict['text']}. {verdict.get('advice', '')}"
        text = words if is_known else f"too short to tell: fewer than {FEW_STEPS} steps"
        yield Node("slowest", text, "text", style="magenta")
    for line in spell_lines(tree.get("warnings") or []):
        yield Node("warning", line, "text", style="yellow")
    for problem in tree.get("failures") or []:
        yield Node("failed", str(problem), "text", style="bold red")
    if tree.get("ok"):
        # An older release's summary does not say what was expected.
        is_checked = tree.get("expected") is None or tree["expected"]
        yield Node("ok", EXPECTED_HOLDS if is_checked else NOTHING_EXPECTED, style="bold green")
    learning = tree.get("learning") or {}
    if learning.get("text"):
        style = "yellow" if learning["verdict"] == "nothing" else "dim"
        yield Node("learning", learning["text"], style=style)


def print_report(console: Console, folder: RunFolder, tree: Mapping[str, Any]) -> None:
    print_tree(console, report_tree(tree))
    _print_lines(console, failing_lines(tree))  # right below what was left out
    for path in (folder.summary, folder.path / PICTURE_FILE):
        if path.exists():
            console.print(f"  {nearest(path)}", style="dim", soft_wrap=True)
    _print_lines(console, verdict_lines(tree))


def _print_lines(console: Console, lines: Iterable[Node]) -> None:
    for line in lines:  # a terminal breaks between words; files and programs get whole lines
        said = Text.assemble((f"{line.label}  ", line.style), printable_block(line.value))
        console.print(said, soft_wrap=not console.is_terminal)


def spell_lines(warnings: Iterable[Mapping[str, Any]]) -> list[str]:
    """The warnings of a run that is over, each once: when it held, and what to do about it next time."""
    spells: dict[tuple[Any, Any], list[str]] = {}
    for warning in warnings:
        until = warning.get("until_step")
        worst = warning.get("worst")
        end = "the end" if until is None else str(until)  # steps are counted from 1 for people
        worst_text = f"{worst:.4g}" if worst is not None else "not a number"
        steps = f"steps {warning.get('since_step', 0) + 1} to {end}, at worst {worst_text}"
        spells.setdefault((warning.get("text"), warning.get("advice")), []).append(steps)
    return [f"{text} ({'; '.join(steps)}). {advice}" for (text, advice), steps in spells.items()]


def show_report(options: StatusOptions) -> int:
    """Show the report from the streams; where Redis has them no longer, the one kept in the folder."""
    log_nothing()
    folder = find_run(options.run_id, options.runs_dir)
    console = Console(highlight=False)
    note = ""
    tree = run_main(_tree_of(folder))
    if tree is not None and not folder.path.is_dir():
        note = f"not kept: {folder.path} is not on this machine"
    elif tree is not None:
        try:
            write_report(folder, tree)
        except StorageError as error:
            note = f"not kept: {error}"
    elif (tree := read_report(folder)) is None:
        raise ConfigError(
            f"run {folder.run_id}: its archive alone is left, and no {SUMMARY_FILE}; "
            f"`{folder.command('streams', 'show')}` shows what there is."
        )
    if options.as_json:
        print(json.dumps(tree, indent=2))
    else:
        print_report(console, folder, tree)
        console.print(note, style="dim", soft_wrap=True)
    return 1 if tree.get("failures") or (options.fails_on_warning and tree.get("warnings")) else 0


async def _tree_of(folder: RunFolder) -> dict[str, Any] | None:
    """The report from the streams; None where the run's Redis and its data are gone."""
    try:
        async with open_history(folder) as access:
            broker = access.history.broker
            if broker is None:
                return None
            keys = Keys(folder.run_id)
            config = await read_config(broker, keys)
            state = await read_state(broker, keys)
            if not await has_finished(broker, keys, config.trainer.steps):
                raise ConfigError(
                    f"run {folder.run_id} has not finished ({state.get('version', 0)} of "
                    f"{config.trainer.steps} steps, then the last evaluation). "
                    f"`{folder.command('status')}` says how it is doing."
                )
            ran_s = float(state.get("ran_s", 0.0))
            return await summarise(broker, keys, config, folder.path, wall_s=ran_s, rollout_idle=None)
    except (BrokerError, MissingHistoryError):
        if not folder.summary.exists():
            raise
        return None
