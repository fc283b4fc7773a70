"""Where the time of a run goes, from what its commits and its processes say: the facts behind a verdict."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.process.activity import WAIT
from common.process.heartbeats import Heartbeat

RATE_STEPS = 10
"""Rates and shares are taken over this many last steps."""
STALLED_S, STALLED_STEPS = 60.0, 3
"""After so long, and so many steps' time, without a commit the last minute tells more than the steps."""
ROLES = ("trainer", "rollout", "reward")
GENERATING, SCORING = "generate", "score"
WAIT_TICKETS, WAIT_TRAJECTORIES = "wait:tickets", "wait:trajectories"

Shares = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known; everything may be missing. Shares are of a role's time, and add up to 1."""

    shares: Mapping[str, Shares] = field(default_factory=dict)
    """By role, by state: the trainer's over the last steps, the workers' of the last minute, on average."""
    num_workers: Mapping[str, int] = field(default_factory=dict)
    """By role: those that are alive, or that had a part in the last steps where none can be asked."""
    is_live: bool = False
    """Whether the processes themselves were asked."""
    score_use: float | None = None
    """How much of what the reward workers can score at once is in use."""
    redis_s: float | None = None
    """What a Redis command takes, as the slowest process feels it."""
    step_s: float | None = None
    max_staleness: int = 1

    def share(self, role: str, state: str) -> float:
        """Part of a role's time spent in a state."""
        return self.shares.get(role, {}).get(state, 0.0)

    def busy(self, role: str) -> float | None:
        """Part of a role's time spent working; of a reward worker, of what it can do at once."""
        if role == "reward" and self.score_use is not None:
            return self.score_use
        shares = self.shares.get(role)
        return sum(part for state, part in shares.items() if not state.startswith(WAIT)) if shares else None

    def waits(self, role: str) -> dict[str, float]:
        """Idle time of a role by cause, the longest first."""
        shares = self.shares.get(role, {})
        waits = {state: part for state, part in shares.items() if state.startswith(WAIT) and part}
        causes = {state.removeprefix(WAIT): part for state, part in waits.items()}
        return dict(sorted(causes.items(), key=lambda item: -item[1]))


def gather_evidence(
    steps: Sequence[Mapping[str, float]],
    workers: Iterable[Heartbeat],
    *,
    max_staleness: int,
    since_commit_s: float = 0.0,
    remembered: Mapping[str, Any] | None = None,
) -> Evidence:
    """Evidence from the metrics of the steps (without those of the warm-up) and from the living processes.

    `since_commit_s` is how long ago the last step was committed. `remembered` is the verdict on a run whose
    workers cannot be asked any more, as plain values: their shares of time, and `score_use`.
    """
    alive = [beat for beat in workers if beat.is_alive]
    recent = list(steps)[-RATE_STEPS:]
    step_s = _sum(recent, "step_time_s") / len(recent) if recent else None
    shares = _shares_of_steps(recent, step_s)
    remembered = remembered or {}
    known = remembered.get("shares") or {}
    shares |= {role: known[role] for role in ("rollout", "reward") if known.get(role)}
    asked = _shares_of_processes(alive)
    is_stalled = since_commit_s > max(STALLED_S, STALLED_STEPS * (step_s or 0.0))
    # A step may be far longer than the minute of which a process tells.
    by_steps = {"trainer"} if "trainer" in shares and not is_stalled else set()
    shares |= {role: found for role, found in asked.items() if role not in by_steps}
    num_workers = {role: sum(beat.role == role for beat in alive) for role in ROLES}
    if not alive:
        num_workers = {role: round(_mean(recent, f"stages/{role}_workers")) for role in ("rollout", "reward")}
    redis_ms = [beat.counts["redis_ms"] for beat in alive if "redis_ms" in beat.counts]
    return Evidence(
        shares,
        num_workers,
        bool(alive),
        remembered.get("score_use") if not alive else _score_use(recent, alive),
        max(redis_ms) / 1000 if redis_ms else None,
        step_s,
        max_staleness,
    )


def _shares_of_steps(steps: Sequence[Mapping[str, float]], step_s: float | None) -> dict[str, Shares]:
    """The trainer's own states, and of the workers when they had something of these steps to do."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for numbers in steps:
        for name, value in numbers.items():
            if name.startswith("time/") and name.endswith("_s"):
                seconds[state_of(name)] += value
    total_s = sum(seconds.values())
    if not total_s or not step_s:
        return {}
    shares: dict[str, Shares] = {"trainer": {state: spent / total_s for state, spent in seconds.items()}}
    for role, work, wait in (("rollout", GENERATING, WAIT_TICKETS), ("reward", SCORING, WAIT_TRAJECTORIES)):
        if workers := _mean(steps, f"stages/{role}_workers"):
            busy = min(1.0, _mean(steps, f"stages/{role}_busy_s") / (workers * step_s))
            shares[role] = {work: busy, wait: 1.0 - busy}
    return shares


def state_of(name: str) -> str:
    """`time/wait_scores_s` as the state that it was: `wait:scores`."""
    state = name.removeprefix("time/").removesuffix("_s")
    return state.replace("_", ":", 1) if state.startswith("wait_") else state


def _shares_of_processes(alive: Sequence[Heartbeat]) -> dict[str, Shares]:
    """The mean over the processes of each role."""
    found: dict[str, Shares] = {}
    for role in ROLES:
        beats = [beat for beat in alive if beat.role == role and beat.shares]
        states = {state for beat in beats for state in beat.shares}
        if beats:
            found[role] = {
                state: sum(beat.shares.get(state, 0.0) for beat in beats) / len(beats)
                for state in sorted(states)
            }
    return found


def _score_use(steps: Sequence[Mapping[str, float]], alive: Sequence[Heartbeat]) -> float | None:
    """Time spent on scores over what the workers could have spent, each as many at once as it can."""
    at_once = sum(beat.counts.get("parallel", 0.0) for beat in alive if beat.role == "reward")
    spent_s = sum(n.get("stages/score_s", 0.0) * n.get("stages/scores", 0.0) for n in steps)
    seconds = _sum(steps, "step_time_s")
    return min(1.0, spent_s / (at_once * seconds)) if at_once and seconds else None


def _sum(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(numbers.get(name, 0.0) for numbers in steps)


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return _sum(steps, name) / len(steps) if steps else 0.0
