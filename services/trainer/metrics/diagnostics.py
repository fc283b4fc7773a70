"""Watches the numbers of each step and says in plain words what is wrong, since when, and what to do.

A warning begins when a number was outside of its healthy range for `PATIENCE_STEPS` steps in a row, and ends
when it was inside for as many; each is logged once. Warnings follow from the steps on record alone, so a
trainer that resumes goes on with the same ones.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from tidemill.common.command_line import command_line
from tidemill.common.config.diagnostics import Check, HealthyRange, Ranges, checks_with
from tidemill.common.digits import few_digits
from tidemill.common.run.state import STEP, Record
from tidemill.common.telemetry import metrics

log = structlog.get_logger(__name__)

PATIENCE_STEPS = 3
"""Steps in a row: a single one may be noise."""
MAX_WARNINGS = 100
"""Most warnings that are kept, the newest; ended ones are removed first."""

SCORES_WAIT = "time/wait_scores_s"
MOSTLY_FAILED = 0.5
"""With a larger share of failed scores, more reward workers would not help."""
WAITS = {
    "time/wait_trajectories_s": "generation: add rollout workers or GPUs, or shorten max_tokens",
    SCORES_WAIT: "scores: add reward workers (they may join now), raise their concurrency, or give "
    "slow judges replicas",
    "time/wait_redis_s": "Redis: look at its load and at the network to it; see docs/operations/sizing.md",
    "time/wait_evaluation_s": "evaluation: evaluate less often, on fewer prompts or samples",
}


@dataclass(slots=True)
class Warned:
    """A number that left its healthy range, and perhaps came back."""

    check: str
    metric: str
    since_step: int
    worst: float | None
    """The value farthest outside; None where it was not a number."""
    text: str
    advice: str
    until_step: int | None = None
    """First step back inside; None while the warning holds."""


@dataclass(slots=True)
class _Watch:
    check: Check
    patience_steps: int
    num_outside: int = 0
    """Steps in a row, up to the last one."""
    num_inside: int = 0
    worst: float = 0.0
    """The value farthest outside, of these steps in a row; `warning.worst` is that of the whole warning."""
    warning: Warned | None = None
    """The one that holds now."""

    def judge(self, step: int, numbers: Mapping[str, Any]) -> Warned | None:
        """Returns the warning that begins or ends with this step."""
        value = numbers[self.check.metric]
        number = math.nan if value is None else float(value)  # a record has null for what is not finite
        if self.check.healthy.holds(number):
            return self._note_inside(step)
        self._note_outside(number)
        if self.warning is not None or self.num_outside < self.patience_steps:
            return None
        self.warning = self._begun(step, number, numbers)
        return self.warning

    def _note_inside(self, step: int) -> Warned | None:
        """Returns the warning that ends with this step."""
        self.num_inside += 1
        self.num_outside = 0
        if self.warning is None or self.num_inside < self.patience_steps:
            return None
        ended = self.warning
        ended.until_step = step - self.num_inside + 1
        self.warning = None
        return ended

    def _note_outside(self, number: float) -> None:
        healthy = self.check.healthy
        self.worst = _worse(healthy, self.worst, number) if self.num_outside else number
        self.num_outside += 1
        self.num_inside = 0
        if self.warning is not None:
            self.warning.worst = _plain(_worse(healthy, self.warning.worst, number))

    def _begun(self, step: int, number: float, numbers: Mapping[str, Any]) -> Warned:
        """The warning that begins with this step."""
        check = self.check
        problem = check.problem
        advice = check.advice
        if check.problem_low and check.healthy.low is not None and number < check.healthy.low:
            problem = check.problem_low
            advice = check.advice_low
        if check.name == "waiting":
            advice = time_advice(numbers)
        text = f"{problem}: {check.metric} is {number:.4g}, healthy is {_shown(check.healthy)}"
        since_step = step - self.num_outside + 1
        return Warned(check.name, check.metric, since_step, _plain(self.worst), text, advice)


class Diagnostics:
    """The checks of one run: `observe` every step, in order."""

    def __init__(self, ranges: Ranges, patience_steps: int = PATIENCE_STEPS) -> None:
        self.warnings: list[Warned] = []
        """Warnings so far, oldest first."""
        self._watches = [_Watch(check, patience_steps) for check in checks_with(ranges)]

    def resume(self, records: Iterable[Record]) -> "Diagnostics":
        """Take the state after the steps on record, without logging; returns itself."""
        for record in records:
            if record["kind"] == STEP:
                self._judge(record["step"], record)
        return self

    def observe(self, step: int, numbers: Mapping[str, Any]) -> list[Warned]:
        """Check one step; returns the warnings that began or ended with it, after logging them."""
        changed = self._judge(step, numbers)
        for warning in changed:
            if warning.until_step is None:
                log.warning(warning.text, since_step=warning.since_step, advice=warning.advice)
            else:
                log.info(f"{warning.metric} is healthy again", step=step, since_step=warning.until_step)
        return changed

    def as_state(self) -> list[dict[str, Any]]:
        return [asdict(warning) for warning in self.warnings]

    def _judge(self, step: int, numbers: Mapping[str, Any]) -> list[Warned]:
        changed = []
        for watch in self._watches:
            if watch.check.metric in numbers and (warning := watch.judge(step, numbers)) is not None:
                changed.append(warning)
            metrics.UNHEALTHY.labels(watch.check.name).set(watch.warning is not None)
        self.warnings += [warning for warning in changed if warning.until_step is None]
        while len(self.warnings) > MAX_WARNINGS:
            ended = (warning for warning in self.warnings if warning.until_step is not None)
            oldest_ended = next(ended, None)
            self.warnings.remove(self.warnings[0] if oldest_ended is None else oldest_ended)
        return changed


def _worse(healthy: HealthyRange, worst: float | None, new: float) -> float:
    """The value farther outside of the range; NaN is the worst, also as a `worst` of None (see `Warned`)."""
    if worst is None or math.isnan(worst) or math.isnan(new):
        return math.nan
    low = -math.inf if healthy.low is None else healthy.low
    high = math.inf if healthy.high is None else healthy.high

    def distance(value: float) -> float:
        return max(low - value, value - high)

    return max(worst, new, key=distance)


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shown(healthy: HealthyRange) -> str:
    if healthy.low is None:
        return f"at most {healthy.high:g}"
    if healthy.high is None:
        return f"at least {healthy.low:g}"
    return f"{healthy.low:g} to {healthy.high:g}"


def time_advice(numbers: Mapping[str, Any]) -> str:
    """Advice about the longest wait of the step."""
    waits = {name: float(numbers.get(name) or 0.0) for name in WAITS}
    longest = max(waits, key=lambda name: waits[name])
    waited = f"It waited {few_digits(waits[longest])} s for"
    if longest == SCORES_WAIT and float(numbers.get("scores/failed_ratio") or 0.0) > MOSTLY_FAILED:
        return (
            f"{waited} scores, and most of them failed: first see to it that the reward gives values. "
            f"`{command_line('status')}` says why it fails."
        )
    if not waits[longest]:
        return f"`{command_line('status')}` says who waits for whom."
    return f"{waited} {WAITS[longest]}."
