"""Watches the numbers of each step and says in plain words what is wrong, since when, and what to do.

A warning begins when a number was outside of its healthy range for `PATIENCE_STEPS` steps in a row, and ends
when it was inside for as many; each is said once. What is known follows from the steps on record alone, so a
trainer that resumes goes on with the same warnings.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import InitVar, asdict, dataclass, field
from typing import Any

import structlog

from tidemill.common.config.diagnostics import Check, HealthyRange, Ranges, checks_with
from tidemill.common.run.state import STEP, Record
from tidemill.common.telemetry import metrics

log = structlog.get_logger(__name__)

PATIENCE_STEPS = 3
"""One step is noise."""
MAX_WARNINGS = 100
"""Kept for people, the newest; ended ones go first."""

WAITS = {
    "time/wait_trajectories_s": "generation: add rollout workers or GPUs, or shorten max_tokens",
    "time/wait_scores_s": "scores: add reward workers (they may join now), raise their concurrency, or give "
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
class _Course:
    """What one check has seen."""

    num_outside: int = 0
    num_inside: int = 0
    worst: float = 0.0
    warning: Warned | None = None


@dataclass(slots=True)
class Diagnostics:
    """The checks of one run: `observe` every step, in order."""

    ranges: InitVar[Ranges]
    patience_steps: int = PATIENCE_STEPS
    warnings: list[Warned] = field(default_factory=list)
    """All that were said, oldest first."""
    _courses: dict[str, _Course] = field(default_factory=dict)
    _checks: list[Check] = field(init=False)

    def __post_init__(self, ranges: Ranges) -> None:
        self._checks = checks_with(ranges)

    def resume(self, records: Iterable[Record]) -> "Diagnostics":
        """Itself in the state after the steps on record; says nothing again."""
        for record in records:
            if record["kind"] == STEP:
                self._judge(record["step"], record)
        for check in self._checks:
            self._show(check, self._course(check))
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
        """For the run's state, as plain JSON."""
        return [asdict(warning) for warning in self.warnings]

    def _judge(self, step: int, numbers: Mapping[str, Any]) -> list[Warned]:
        return [
            warning
            for check in self._checks
            if check.metric in numbers
            if (warning := self._judge_one(check, step, numbers[check.metric], numbers)) is not None
        ]

    def _judge_one(
        self, check: Check, step: int, value: float | None, numbers: Mapping[str, Any]
    ) -> Warned | None:
        number = math.nan if value is None else float(value)  # a record has null for what is not finite
        healthy, course = check.healthy, self._course(check)
        if healthy.holds(number):
            course.num_inside, course.num_outside = course.num_inside + 1, 0
            return self._end(check, course, step)
        course.worst = _worse(healthy, course.worst, number) if course.num_outside else number
        course.num_outside, course.num_inside = course.num_outside + 1, 0
        if course.warning is not None:
            course.warning.worst = _plain(_worse(healthy, course.warning.worst, number))
            return None
        return self._begin(check, course, step, number, numbers)

    def _begin(
        self, check: Check, course: _Course, step: int, number: float, numbers: Mapping[str, Any]
    ) -> Warned | None:
        if course.num_outside < self.patience_steps:
            return None
        since = step - course.num_outside + 1
        problem, advice = check.problem, check.advice
        if check.problem_low and check.healthy.low is not None and number < check.healthy.low:
            problem, advice = check.problem_low, check.advice_low
        if check.name == "waiting":
            advice = time_advice(numbers)
        text = f"{problem}: {check.metric} is {number:.4g}, healthy is {_shown(check.healthy)}"
        course.warning = Warned(check.name, check.metric, since, _plain(course.worst), text, advice)
        self._keep(course.warning)
        self._show(check, course)
        return course.warning

    def _end(self, check: Check, course: _Course, step: int) -> Warned | None:
        warning = course.warning
        if warning is None or course.num_inside < self.patience_steps:
            return None
        warning.until_step, course.warning = step - course.num_inside + 1, None
        self._show(check, course)
        return warning

    def _keep(self, warning: Warned) -> None:
        self.warnings.append(warning)
        if len(self.warnings) > MAX_WARNINGS:
            ended = (item for item in self.warnings if item.until_step is not None)
            self.warnings.remove(next(ended, self.warnings[0]))

    def _show(self, check: Check, course: _Course) -> None:
        metrics.UNHEALTHY.labels(check.name).set(course.warning is not None)

    def _course(self, check: Check) -> _Course:
        return self._courses.setdefault(check.name, _Course())


def _worse(healthy: HealthyRange, one: float | None, other: float) -> float:
    """Whichever lies farther outside; what is not a number is the worst."""
    if one is None or math.isnan(one) or math.isnan(other):
        return math.nan
    return max(one, other, key=lambda value: _excess(healthy, value))


def _excess(healthy: HealthyRange, value: float) -> float:
    below = healthy.low - value if healthy.low is not None else -math.inf
    above = value - healthy.high if healthy.high is not None else -math.inf
    return max(below, above)


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _shown(healthy: HealthyRange) -> str:
    if healthy.low is None:
        return f"at most {healthy.high:g}"
    if healthy.high is None:
        return f"at least {healthy.low:g}"
    return f"{healthy.low:g} to {healthy.high:g}"


def time_advice(numbers: Mapping[str, Any]) -> str:
    """What to do about waiting: about the longest wait of the step."""
    waits = {name: float(numbers.get(name) or 0.0) for name in WAITS}
    longest = max(waits, key=lambda name: waits[name])
    if not waits[longest]:
        return "`tidemill status` says who waits for whom."
    return f"It waited {waits[longest]:.3g} s for {WAITS[longest]}."
