"""Where the time of a run goes, from what its commits and its processes say: the facts behind a verdict."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.common.process.activity import WAIT, WAIT_ENVIRONMENT, WAIT_REDIS, WAIT_START, times_of
from tidemill.common.process.heartbeats import Heartbeat

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
        for state, spent_s in times_of(numbers).items():
            seconds[state] += spent_s
    total_s = sum(seconds.values())
    if not total_s or not step_s:
        return {}
    shares: dict[str, Shares] = {"trainer": {state: spent / total_s for state, spent in seconds.items()}}
    for role, work, wait in (("rollout", GENERATING, WAIT_TICKETS), ("reward", SCORING, WAIT_TRAJECTORIES)):
        if workers := _mean(steps, f"stages/{role}_workers"):
            busy = min(1.0, _mean(steps, f"stages/{role}_busy_s") / (workers * step_s))
            shares[role] = {work: busy, wait: 1.0 - busy}
    return shares


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


TRAINER, ROLLOUT, REWARD, REDIS = "trainer", "rollout", "reward", "redis"
WEIGHTS, CHECKPOINT, EVALUATION, DISK = "weights", "checkpoint", "evaluation", "disk"
ENVIRONMENT = "environment"
IDLE_SHARE = 0.25
"""Where stages overlap, a trainer that waits more than this is not the one that the others wait for."""
CLEAR_SHARE = 0.4
"""A stage with less than this part of a step does not stand out."""
LITTLE_USE = 0.5
"""Reward workers that use less than this of what they can do at once are not too few."""
NEGLIGIBLE = 0.005
WORK = {ROLLOUT: "generate", REWARD: "score"}
PASSED_ON = {"wait:trajectories": (ROLLOUT, WAIT_TICKETS), "wait:scores": (REWARD, WAIT_TRAJECTORIES)}
"""What the trainer waits for, the role that makes it, and what that one waits for without work."""
BLAMED_STATES = {
    WAIT_REDIS: REDIS,
    WAIT_ENVIRONMENT: ENVIRONMENT,
    "wait:weights": WEIGHTS,
    "wait:evaluation": EVALUATION,
    "wait:disk": DISK,
    "weights": WEIGHTS,
    "checkpoint": CHECKPOINT,
}


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What makes the run slow."""

    stage: str
    """trainer, rollout, reward, redis, weights, environment, checkpoint, evaluation or disk."""
    blame: dict[str, float]
    """Part of a step's time by stage, the largest first; adds up to 1."""
    text: str
    advice: str
    step_with_one_more_s: dict[str, float]
    """What a step would take, at best, with one more worker of a role."""
    evidence: Evidence

    def as_dict(self) -> dict[str, Any]:
        return {
            "stage": self.stage,
            "text": self.text,
            "advice": self.advice,
            "blame": {stage: round(share, 4) for stage, share in self.blame.items()},
            "busy": {role: self.evidence.busy(role) for role in ROLES},
            "waits": {role: self.evidence.waits(role) for role in ROLES},
            "shares": {role: dict(shares) for role, shares in self.evidence.shares.items()},
            "step_s": self.evidence.step_s,
            "step_with_one_more_s": self.step_with_one_more_s,
            "score_use": self.evidence.score_use,
            "redis_command_s": self.evidence.redis_s,
        }


def find_bottleneck(evidence: Evidence) -> Bottleneck | None:
    """The verdict; None while nothing is known of the trainer's time."""
    blame = _blame(evidence)
    if not blame:
        return None
    stage = _slowest(evidence, blame)
    more = {
        role: step_s
        for role in (ROLLOUT, REWARD)
        if (step_s := _step_with_one_more(evidence, blame, role)) is not None
    }
    text, advice = _reasons(evidence, stage), _advice(evidence, stage, more)
    if blame[stage] < (IDLE_SHARE if evidence.max_staleness else CLEAR_SHARE):
        parts = ", ".join(f"{name} {part:.0%}" for name, part in list(blame.items())[:3])
        text = f"no stage stands out: of a step's time, {parts}. The largest: {text}"
    return Bottleneck(stage, blame, text, advice, more, evidence)


def _blame(evidence: Evidence) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for state, share in evidence.shares.get(TRAINER, {}).items():
        if state in PASSED_ON:
            for stage, part in _passed_on(evidence, state).items():
                found[stage] += share * part
        elif state in BLAMED_STATES or not state.startswith(WAIT):
            found[BLAMED_STATES.get(state, TRAINER)] += share
    total = sum(found.values())
    if total <= 0:
        return {}
    return {stage: part / total for stage, part in sorted(found.items(), key=lambda item: -item[1])}


def _slowest(evidence: Evidence, blame: dict[str, float]) -> str:
    """The largest part of a step; of stages that overlap, never a trainer that waits for another one."""
    waits = sum(evidence.waits(TRAINER).values())
    others = [stage for stage in blame if stage != TRAINER]
    if evidence.max_staleness and waits > IDLE_SHARE and others:
        return others[0]
    return next(iter(blame))


def _passed_on(evidence: Evidence, state: str) -> dict[str, float]:
    """Who is to blame for what the trainer waits for, in parts that add up to 1."""
    role, nothing_to_do = PASSED_ON[state]
    found: defaultdict[str, float] = defaultdict(float)
    for own, share in evidence.shares.get(role, {}).items():
        if own not in (nothing_to_do, WAIT_START):
            found[BLAMED_STATES.get(own, role)] += share
    total = sum(found.values())
    return {stage: part / total for stage, part in found.items()} if total > 0 else {role: 1.0}


def _step_with_one_more(evidence: Evidence, blame: dict[str, float], role: str) -> float | None:
    """Where stages overlap, a step takes as long as the busiest; where they take turns, all their times."""
    number, step_s = evidence.num_workers.get(role, 0), evidence.step_s
    if not number or not step_s:
        return None
    if evidence.max_staleness == 0:
        return step_s * (1.0 - blame.get(role, 0.0) / (number + 1))
    loads = {name: evidence.busy(name) or 0.0 for name in ROLES}
    if not (busiest := max(loads.values())):
        return None
    loads[role] *= number / (number + 1)
    return step_s * max(max(loads.values()) / busiest, 1.0 - blame.get(role, 0.0))


def _reasons(evidence: Evidence, stage: str) -> str:
    """The verdict in words, with the shares that it rests on."""
    waits = evidence.waits(TRAINER)
    if stage in WORK:
        return _reasons_of_workers(evidence, stage)
    if stage == REDIS:
        felt = [
            f"{role} {part:.0%}" for role in ROLES if (part := evidence.share(role, WAIT_REDIS)) > NEGLIGIBLE
        ]
        takes = f"; a command takes {1000 * evidence.redis_s:.3g} ms" if evidence.redis_s else ""
        return f"Redis is the bottleneck: of their time, processes wait for it: {', '.join(felt)}{takes}"
    if stage == TRAINER:
        work = _listed({s: p for s, p in evidence.shares[TRAINER].items() if not s.startswith(WAIT)})
        idle = f", and waits {sum(waits.values()):.0%}" if waits else ""
        return f"trainer is the bottleneck: it works {evidence.busy(TRAINER):.0%} of its time ({work}){idle}"
    if stage == WEIGHTS:
        return (
            "handing over weights is the bottleneck: the trainer writes them "
            f"{evidence.share(TRAINER, WEIGHTS):.0%} of its time, rollout waits for them "
            f"{evidence.share(ROLLOUT, 'wait:weights'):.0%}"
        )
    if stage == ENVIRONMENT:
        return (
            "environment is the bottleneck: the trainer waits "
            f"{evidence.share(TRAINER, 'wait:trajectories'):.0%} of its time for trajectories; rollout waits "
            f"{evidence.share(ROLLOUT, WAIT_ENVIRONMENT):.0%} of its own for environments, with idle engines"
        )
    share = evidence.share(TRAINER, stage) + evidence.share(TRAINER, f"{WAIT}{stage}")
    return f"{stage} is the bottleneck: it takes {share:.0%} of the trainer's time"


def _reasons_of_workers(evidence: Evidence, role: str) -> str:
    product = {ROLLOUT: "trajectories", REWARD: "scores"}[role]
    waits = f"the trainer waits {evidence.share(TRAINER, f'{WAIT}{product}'):.0%} of its time for {product}"
    number, busy = evidence.num_workers.get(role, 0), evidence.busy(role)
    if evidence.is_live and not number:
        return f"{role} is the bottleneck: {waits}, and no {role} worker is alive"
    who = f"{number} {role} worker{'s' if number != 1 else ''}" if number else f"the {role} workers"
    verb = WORK[role] + ("s" if number == 1 else "")
    return f"{role} is the bottleneck: {waits}; {who} {verb} {busy or 0.0:.0%} of what is possible"


def _advice(evidence: Evidence, stage: str, more: dict[str, float]) -> str:
    if stage in WORK:
        return _advice_on_workers(evidence, stage, more)
    if stage == TRAINER and evidence.max_staleness == 0:
        return "Let generation go on meanwhile: trainer.max_staleness 1. Else give the trainer more GPUs."
    return {
        TRAINER: "More workers would not help. Give it more or faster GPUs (trainer.num_ranks), raise "
        "trainer.micro_batch_tokens, or train on fewer tokens.",
        REDIS: "Look at its processor, its memory, the disk of its AOF, and the network to it: "
        "`redis-cli --latency`. More workers would not help.",
        WEIGHTS: "Put the weights folder on a faster disk or network; LoRA writes little.",
        CHECKPOINT: "Raise trainer.checkpoint_every, or put the run's folder on a faster disk.",
        EVALUATION: "Evaluate less often, on fewer prompts or samples (trainer.evaluation).",
        ENVIRONMENT: "Make its calls faster, let more of them run at once "
        "(rollout.environment.processes), or hold more sessions (rollout.max_groups_in_flight).",
        DISK: "Make room on the disk of the run's folder; the trainer's log says which.",
    }[stage]


def _advice_on_workers(evidence: Evidence, role: str, more: dict[str, float]) -> str:
    if evidence.is_live and not evidence.num_workers.get(role):
        return f"Start one: python -m tidemill.services.{role} --run RUN_ID."
    use = evidence.score_use
    if role == REWARD and use is not None and use < LITTLE_USE and evidence.max_staleness:
        return (
            "A score takes long, but more workers would not help: most of what they could do at once is "
            "unused. Make scores faster, or raise trainer.max_staleness so that more of them are under way."
        )
    if role in more and evidence.step_s:
        return (
            f"With one more {role} worker a step would take {more[role]:.3g} s instead of "
            f"{evidence.step_s:.3g} s, at best."
        )
    return f"Add {role} workers; they may join now."


def _listed(parts: dict[str, float]) -> str:
    shown = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {part:.0%}" for name, part in shown if part > NEGLIGIBLE)
