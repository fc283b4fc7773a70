"""Where the time of a run goes, as its commits and its processes say, and which stage makes it slow."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.common.digits import few_digits
from tidemill.common.process.activity import WAIT, WAIT_ENVIRONMENT, WAIT_REDIS, WAIT_START, times_of
from tidemill.common.process.heartbeats import FAILING_SHARE, Heartbeat

RATE_STEPS = 10
"""Rates and shares are taken over this many last steps."""
STALLED_S = 60.0
STALLED_STEPS = 3
"""Without a commit for this long (seconds, and mean steps), the trainer is judged by its last minute."""
IDLE_SHARE = 0.25
"""Where stages overlap, a trainer that waits for more than this share of its time is not the bottleneck."""
CLEAR_SHARE = 0.4
"""A stage with less than this part of a step does not stand out."""
LITTLE_USE = 0.5
"""Reward workers that use less than this share of their capacity are not too few."""
MOSTLY_FAILING = 0.5
"""With a larger share of failed attempts, more reward workers would only fail more often."""
NEGLIGIBLE = 0.005
ROLES = ("trainer", "rollout", "reward")
WORKERS = {
    "rollout": ("generate", "wait:tickets", "trajectories"),
    "reward": ("score", "wait:trajectories", "scores"),
}
"""For each role but the trainer: its state at work, its state without work, and its output stream."""
BLAMED_STATES = {
    WAIT_REDIS: "redis",
    WAIT_ENVIRONMENT: "environment",
    "wait:weights": "weights",
    "wait:evaluation": "evaluation",
    "wait:disk": "disk",
    "weights": "weights",
    "checkpoint": "checkpoint",
}
ADVICE = {
    "trainer": "More workers would not help. Give it more or faster GPUs (trainer.num_ranks), raise "
    "trainer.micro_batch_tokens, or train on fewer tokens.",
    "redis": "Look at its processor, its memory, the disk of its AOF, and the network to it: "
    "`redis-cli --latency`. More workers would not help.",
    "weights": "Put the weights folder on a faster disk or network; LoRA writes little.",
    "checkpoint": "Raise trainer.checkpoint_every, or put the run's folder on a faster disk.",
    "evaluation": "Evaluate less often, on fewer prompts or samples (trainer.evaluation).",
    "environment": "Make its calls faster, let more of them run at once "
    "(rollout.environment.processes), or hold more sessions (rollout.max_groups_in_flight).",
    "disk": "Make room on the disk of the run's folder; the trainer's log says which.",
}

Shares = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Evidence:
    """Measurements, any of which may be missing. Shares are of a role's time, and add up to 1."""

    shares: Mapping[str, Shares] = field(default_factory=dict)
    """Shares by role and state: the trainer's over the last steps, the workers' mean of the last minute."""
    num_workers: Mapping[str, int] = field(default_factory=dict)
    """By role: workers that are alive, or if no process is, those that had a part in the last steps."""
    is_live: bool = False
    """Whether the processes themselves were asked."""
    score_use: float | None = None
    """Share of the reward workers' capacity (scores at once) that is in use."""
    redis_s: float | None = None
    """Seconds that a Redis command takes in the process where it takes longest."""
    step_s: float | None = None
    max_staleness: int = 1
    failing_share: float = 0.0
    """Share of the reward workers' attempts that fail: of the last minute, or of the last steps' scores."""

    def share(self, role: str, state: str) -> float:
        return self.shares.get(role, {}).get(state, 0.0)

    def busy(self, role: str) -> float | None:
        """Part of a role's time spent working; of a reward worker, of what it can do at once."""
        if role == "reward" and self.score_use is not None:
            return self.score_use
        shares = self.shares.get(role)
        return sum(share for state, share in shares.items() if not state.startswith(WAIT)) if shares else None

    def waits(self, role: str) -> dict[str, float]:
        """Idle time of a role by cause, the longest first."""
        shares = self.shares.get(role, {})
        waits = {state: share for state, share in shares.items() if state.startswith(WAIT) and share}
        return {state.removeprefix(WAIT): share for state, share in _largest_first(waits)}


def _largest_first(shares: Shares) -> list[tuple[str, float]]:
    return sorted(shares.items(), key=lambda item: -item[1])


def gather_evidence(
    steps: Sequence[Mapping[str, float]],
    workers: Iterable[Heartbeat],
    *,
    max_staleness: int,
    since_commit_s: float = 0.0,
) -> Evidence:
    """Collect the evidence from the metrics of steps and the heartbeats of processes.

    Args:
        steps: their metrics, without those of the warm-up.
        workers: all processes that have reported.
        max_staleness: trainer.max_staleness of the run.
        since_commit_s: how long ago the last step was committed.
    """
    alive = [beat for beat in workers if beat.is_alive]
    recent = list(steps)[-RATE_STEPS:]
    step_s = _sum(recent, "step_time_s") / len(recent) if recent else None
    shares = _shares_of_steps(recent, step_s)
    is_stalled = since_commit_s > max(STALLED_S, STALLED_STEPS * (step_s or 0.0))
    # A step may take far longer than the minute that a heartbeat covers.
    is_trainer_known = "trainer" in shares and not is_stalled
    for role in ROLES:
        if role == "trainer" and is_trainer_known:
            continue
        beats = [beat for beat in alive if beat.role == role and beat.shares]
        if beats:
            states = sorted({state for beat in beats for state in beat.shares})
            means = {}
            for state in states:
                of_beats = [beat.shares.get(state, 0.0) for beat in beats]
                means[state] = sum(of_beats) / len(of_beats)
            shares[role] = means
    num_alive = Counter(beat.role for beat in alive)
    num_workers = {role: num_alive[role] for role in ROLES}
    if not alive:
        num_workers = {role: round(_mean(recent, f"stages/{role}_workers")) for role in WORKERS}
    redis_ms = [beat.counts["redis_ms"] for beat in alive if "redis_ms" in beat.counts]
    return Evidence(
        shares=shares,
        num_workers=num_workers,
        is_live=bool(alive),
        score_use=_score_use(recent, alive),
        redis_s=max(redis_ms) / 1000 if redis_ms else None,
        step_s=step_s,
        max_staleness=max_staleness,
        failing_share=_failing_share(recent, alive),
    )


def _failing_share(steps: Sequence[Mapping[str, float]], alive: Sequence[Heartbeat]) -> float:
    shares = [beat.counts[FAILING_SHARE] for beat in alive if FAILING_SHARE in beat.counts]
    return sum(shares) / len(shares) if shares else _mean(steps, "scores/failed_ratio")


def _shares_of_steps(steps: Sequence[Mapping[str, float]], step_s: float | None) -> dict[str, Shares]:
    """Shares of the trainer's states, and of workers' time with and without work for these steps."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for numbers in steps:
        for state, spent_s in times_of(numbers).items():
            seconds[state] += spent_s
    total_s = sum(seconds.values())
    if not total_s or not step_s:
        return {}
    shares: dict[str, Shares] = {"trainer": {state: spent / total_s for state, spent in seconds.items()}}
    for role, (work, without_work, _) in WORKERS.items():
        workers = _mean(steps, f"stages/{role}_workers")
        if workers:
            busy = min(1.0, _mean(steps, f"stages/{role}_busy_s") / (workers * step_s))
            shares[role] = {work: busy, without_work: 1.0 - busy}
    return shares


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


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What a run waits for.

    Example: `stage` "rollout", `blame` {"rollout": 0.7, "trainer": 0.3}, `step_with_one_more_s` {"rollout":
    6.1}: seven tenths of a step are waits for rollout workers, and with one more a step would take 6.1 s.
    """

    stage: str
    """trainer, rollout, reward, redis, weights, environment, checkpoint, evaluation or disk."""
    blame: dict[str, float]
    """Part of a step's time by stage, the largest first; adds up to 1."""
    text: str
    advice: str
    step_with_one_more_s: dict[str, float]
    """Seconds that a step would take, at best, with one more worker of a role."""
    evidence: Evidence

    def as_dict(self) -> dict[str, Any]:
        evidence = self.evidence
        return {
            "stage": self.stage,
            "text": self.text,
            "advice": self.advice,
            "blame": {stage: round(share, 4) for stage, share in self.blame.items()},
            "busy": {role: evidence.busy(role) for role in ROLES},
            "waits": {role: evidence.waits(role) for role in ROLES},
            "shares": {role: dict(shares) for role, shares in evidence.shares.items()},
            "step_s": evidence.step_s,
            "step_with_one_more_s": self.step_with_one_more_s,
            "score_use": evidence.score_use,
            "redis_command_s": evidence.redis_s,
            "failing_share": evidence.failing_share,
        }


def find_bottleneck(evidence: Evidence) -> Bottleneck | None:
    """The verdict; None while nothing is known of the trainer's time."""
    blame = _blame(evidence)
    if not blame:
        return None
    stage = next(iter(blame))
    others = [name for name in blame if name != "trainer"]
    # Where stages overlap, a trainer that waits for another stage is not what the run waits for.
    if evidence.max_staleness and sum(evidence.waits("trainer").values()) > IDLE_SHARE and others:
        stage = others[0]
    step_with_one_more_s = {}
    for role in WORKERS:
        step_s = _step_with_one_more(evidence, blame, role)
        if step_s is not None:
            step_with_one_more_s[role] = step_s
    if stage in WORKERS:
        text = _reasons_of_workers(evidence, stage)
        advice = _advice_on_workers(evidence, stage, step_with_one_more_s)
    else:
        text = _reasons(evidence, stage)
        advice = ADVICE[stage]
        if stage == "trainer" and evidence.max_staleness == 0:
            advice = (
                "Let generation go on meanwhile: trainer.max_staleness 1. Else give the trainer more GPUs."
            )
    clear_share = IDLE_SHARE if evidence.max_staleness else CLEAR_SHARE
    if blame[stage] < clear_share:
        parts = ", ".join(f"{name} {share:.0%}" for name, share in list(blame.items())[:3])
        largest = text.replace(" is the bottleneck: ", ": ", 1)
        beside = "" if stage == next(iter(blame)) else " beside the trainer"
        text = f"no stage stands out: of a step's time, {parts}. The largest{beside}, {largest}"
    return Bottleneck(stage, blame, text, advice, step_with_one_more_s, evidence)


def _blame(evidence: Evidence) -> dict[str, float]:
    """Parts of the trainer's time by the stage that is to blame, the largest first; they add up to 1.

    Time that the trainer waits for a stream is divided by what the workers that write it do in that time.
    """
    role_waited_for = {f"{WAIT}{product}": role for role, (_, _, product) in WORKERS.items()}
    blame: defaultdict[str, float] = defaultdict(float)
    for state, share in evidence.shares.get("trainer", {}).items():
        role = role_waited_for.get(state)
        if role is not None:
            _, without_work, _ = WORKERS[role]
            parts: defaultdict[str, float] = defaultdict(float)
            for worker_state, fraction in evidence.shares.get(role, {}).items():
                # A worker without work waits for the trainer itself: that time says nothing of the cause.
                if worker_state not in (without_work, WAIT_START):
                    parts[BLAMED_STATES.get(worker_state, role)] += fraction
            if not any(parts.values()):
                parts[role] = 1.0
            for stage, fraction in parts.items():
                blame[stage] += share * fraction / sum(parts.values())
        elif state in BLAMED_STATES or not state.startswith(WAIT):
            blame[BLAMED_STATES.get(state, "trainer")] += share
    total = sum(blame.values())
    return {stage: amount / total for stage, amount in _largest_first(blame)} if total > 0 else {}


def _step_with_one_more(evidence: Evidence, blame: dict[str, float], role: str) -> float | None:
    """Seconds of a step, at best, with one more worker of this role; None where that cannot be said. A step
    takes as long as its busiest stage where stages overlap, and as all together where they take turns."""
    number = evidence.num_workers.get(role, 0)
    step_s = evidence.step_s
    if not number or not step_s:
        return None
    if evidence.max_staleness == 0:
        # The role's part of the step shrinks from 1 to n / (n + 1).
        return step_s * (1.0 - blame.get(role, 0.0) / (number + 1))
    loads = {name: evidence.busy(name) or 0.0 for name in ROLES}
    busiest = max(loads.values())
    if not busiest:
        return None
    loads[role] *= number / (number + 1)
    by_load = max(loads.values()) / busiest
    # More than the waits for this role cannot be saved.
    without_waits = 1.0 - blame.get(role, 0.0)
    return step_s * max(by_load, without_waits)


def _reasons(evidence: Evidence, stage: str) -> str:
    share = evidence.share
    if stage == "redis":
        felt = [
            f"{role} {share(role, WAIT_REDIS):.0%}" for role in ROLES if share(role, WAIT_REDIS) > NEGLIGIBLE
        ]
        takes = f"; a command takes {few_digits(1000 * evidence.redis_s)} ms" if evidence.redis_s else ""
        return f"Redis is the bottleneck: of their time, processes wait for it: {', '.join(felt)}{takes}"
    if stage == "trainer":
        parts = _largest_first(evidence.shares["trainer"])
        work = [f"{s} {p:.0%}" for s, p in parts if p > NEGLIGIBLE and not s.startswith(WAIT)]
        busy = f"it works {evidence.busy('trainer'):.0%} of its time ({', '.join(work)})"
        waited = sum(evidence.waits("trainer").values())
        return f"trainer is the bottleneck: {busy}{f', and waits {waited:.0%}' if waited else ''}"
    if stage == "weights":
        writes = share("trainer", stage)
        waits = share("rollout", "wait:weights")
        return (
            f"handing over weights is the bottleneck: the trainer writes them {writes:.0%} of its time, "
            f"rollout waits for them {waits:.0%}"
        )
    if stage == "environment":
        waits = share("trainer", "wait:trajectories")
        idle = share("rollout", WAIT_ENVIRONMENT)
        return (
            f"environment is the bottleneck: the trainer waits {waits:.0%} of its time for trajectories; "
            f"rollout waits {idle:.0%} of its own for environments, with idle engines"
        )
    whole = share("trainer", stage) + share("trainer", f"{WAIT}{stage}")
    return f"{stage} is the bottleneck: it takes {whole:.0%} of the trainer's time"


def _reasons_of_workers(evidence: Evidence, role: str) -> str:
    work, _, product = WORKERS[role]
    waited = evidence.share("trainer", f"{WAIT}{product}")
    text = f"{role} is the bottleneck: the trainer waits {waited:.0%} of its time for {product}"
    number = evidence.num_workers.get(role, 0)
    busy = evidence.busy(role)
    if evidence.is_live and not number:
        return f"{text}, and no {role} worker is alive"
    who = f"{number} {role} worker{'s' if number != 1 else ''}" if number else f"the {role} workers"
    return f"{text}; {who} {work}{'s' if number == 1 else ''} {busy or 0.0:.0%} of what is possible"


def _advice_on_workers(evidence: Evidence, role: str, step_with_one_more_s: dict[str, float]) -> str:
    if evidence.is_live and not evidence.num_workers.get(role):
        return f"Start one: python -m tidemill.services.{role} --run RUN_ID."
    if role == "reward" and evidence.failing_share > MOSTLY_FAILING:
        return (
            f"{evidence.failing_share:.0%} of the attempts fail, so that more workers would not help: first "
            "see to it that the reward gives values."
        )
    use = evidence.score_use
    if role == "reward" and use is not None and use < LITTLE_USE and evidence.max_staleness:
        return (
            "A score takes long, but more workers would not help: most of what they could do at once is "
            "unused. Make scores faster, or raise trainer.max_staleness so that more of them are under way."
        )
    if role in step_with_one_more_s and evidence.step_s:
        shorter_s = few_digits(step_with_one_more_s[role])
        step_s = few_digits(evidence.step_s)
        return f"With one more {role} worker a step would take {shorter_s} s instead of {step_s} s, at best."
    return f"Add {role} workers; they may join now."
