"""Schedules from seeds: a config, and up to six faults, often close together."""

import random
from dataclasses import replace
from typing import Any

from tests.simulation.beside import beside, torn, with_draws
from tests.simulation.crafted import CRAFTED, crafted
from tests.simulation.schedule import LEASE_S, Fault, Schedule, Setup

MOST_FAULTS = 6
MIXED_SHARE = 0.25
"""Share of the schedules whose run has several sources and a curriculum."""
CLAIMS_SHARE = 0.15
"""Share of those whose trajectories lie beside the streams."""
CHOICES_SHARE = 0.2
"""Share of those whose sampling is filtered."""
LONG_SHARE = 0.15
"""Share of those whose samples and rewards may take longer than a lease."""
FEW_SLOTS_SHARE = 0.5
"""Share of those whose reward workers are always full, and read ahead."""
SPAN_S = 14.0
"""Faults begin within this many seconds: about what an undisturbed run takes."""
MOMENTS = (
    ("XADD", "prompts"),
    ("XADD", "commits"),
    ("XADD", "weights"),
    ("XINFO STREAM", "prompts"),
    ("XINFO STREAM", "commits"),
    ("XTRIM", "trajectories"),
    ("HSET", "state"),
    ("INFO", "server"),
)
"""Commands of the trainer before which Redis may fail."""
RARE = {
    "": 21,
    "between": 4,
    "trim": 6,
    "oldest": 4,
    "reuse": 4,
    "end": 3,
    "late": 3,
    "again": 3,
    "damage": 5,
    "old": 5,
    "commit": 6,
    "clock": 4,
    "outage": 5,
    "behind": 5,
    "back": 6,
    "ahead": 4,
    "jump": 3,
    "leave": 4,
    "twin": 5,
}
"""Kind of what chance rarely draws -> in how many of 100 schedules it is."""
ADDED = {"": 66, "last": 2, "older": 2, "unheard": 3, "heirs": 7, "sleepers": 9, "rows": 8, "forks": 3}
"""Kinds that were added later, of 100 schedules, drawn apart: other seeds keep their schedules."""
LATEST = {
    "": 85,
    "beginning": 2,
    "leaving": 3,
    "put_back": 2,
    "other_weights": 3,
    "shift": 3,
    "question": 2,
}
"""Kinds that were added last, drawn apart for the same reason."""
STREAMS = (
    "prompts",
    "trajectories",
    "scores",
    "weights",
    "commits",
    "dead",
    "prompts:eval",
    "trajectories:eval",
)


def schedule_of(seed: int, is_tight: bool = False) -> Schedule:
    """The schedule of a seed. With `is_tight` the archive has the smallest files, so that Redis keeps only
    what is in flight, and checkpoints are few."""
    rng = random.Random(f"schedule {seed}")
    setup = _setup(rng, random.Random(f"mixed {seed}").random() < MIXED_SHARE)
    if random.Random(f"slots {seed}").random() < FEW_SLOTS_SHARE:
        setup = replace(setup, reward_slots=2)
    if random.Random(f"claims {seed}").random() < CLAIMS_SHARE:
        setup = replace(setup, claims=True)
    if random.Random(f"choices {seed}").random() < CHOICES_SHARE:
        setup = replace(setup, choices=True)
    if random.Random(f"long {seed}").random() < LONG_SHARE:
        setup = replace(setup, sample_s=1.25 * LEASE_S, steps=3)
    if is_tight:
        every = max(4, setup.checkpoint_every)
        setup = replace(setup, trim=True, archive=True, segment_mb=0.001, checkpoint_every=every, steps=6)
    setup = with_draws(seed, setup)
    names = [f"rollout-{i}" for i in range(setup.rollouts)] + [f"reward-{i}" for i in range(setup.rewards)]
    faults: list[Fault] = []
    at_s = rng.uniform(0.0, SPAN_S)
    for _ in range(rng.choice((1, 1, 2, 2, 3, 3, 4, 5, MOST_FAULTS))):
        if rng.random() < 0.5:
            at_s = rng.uniform(0.0, SPAN_S)
        else:
            at_s += rng.uniform(0.0, 0.6)  # on top of the one before
        faults.append(_fault(rng, round(at_s, 3), names, setup))
    rng = random.Random(f"rare {seed}")
    if (kind := _kind_of(seed, rng)) in CRAFTED:
        setup, faults = crafted(kind, rng, setup)
    else:
        faults += _rare(kind, rng, names) + beside(seed) + torn(seed, setup)
    return Schedule(seed, setup, tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _kind_of(seed: int, rng: random.Random) -> str:
    for name, kinds in (("latest", LATEST), ("added", ADDED)):
        kind = random.Random(f"{name} {seed}").choices(list(kinds), list(kinds.values()))[0]
        if kind:
            return kind
    return rng.choices(list(RARE), list(RARE.values()))[0]


def _rare(kind: str, rng: random.Random, names: list[str]) -> list[Fault]:
    """Faults that chance rarely draws, because they need a certain moment or each other."""
    at_s = round(rng.uniform(1.0, SPAN_S), 3)
    for_s = round(rng.uniform(0.3, 2.5), 2)
    if kind == "damage":
        return [Fault(at_s, "damage", rng.choice(("publish_sample", "complete")))]
    if kind == "old":
        # While there are still steps to come, and often enough to come before the sample itself.
        moments = [round(rng.uniform(1.5, 6.0), 3) for _ in range(3)]
        return [Fault(moment, "foreign", "trajectories", {"what": "old"}) for moment in moments]
    if kind == "commit":
        moment = rng.choice((["mark", "committing"], ["XADD", "commits"]))
        how = {"for_s": for_s, "lose": rng.randint(8, 64), "before": moment}
        return [Fault(at_s, rng.choice(("restart", "failover")), "", how)]
    if kind == "clock":
        at_s /= 2.0  # while there is much in flight
        back = Fault(round(at_s + 0.1, 3), "server_clock", "trainer", {"by_s": -rng.randint(60, 600)})
        return [Fault(round(at_s, 3), "kill", rng.choice(names)), back]
    return []


def _setup(rng: random.Random, is_mixed: bool) -> Setup:
    trim = rng.random() < 0.8
    return Setup(
        steps=rng.choice((3, 4, 5, 6)),
        groups_per_step=rng.choice((1, 2, 3)),
        group_size=rng.choice((2, 3, 4, 8)),
        max_staleness=rng.choice((0, 1, 1, 3)),
        batch_order=rng.choice(("in_order", "in_order", "as_ready")),
        checkpoint_every=rng.choice((1, 1, 2, 3, 4)),
        keep_checkpoints=rng.choice((1, 2, 2)),
        trim=trim,
        archive=trim and rng.random() < 0.35,
        evaluation=rng.random() < 0.25,
        rollouts=rng.choice((1, 2, 3)),
        rewards=rng.choice((1, 2)),
        mixed=is_mixed,
    )


def _fault(rng: random.Random, at_s: float, names: list[str], setup: Setup) -> Fault:
    kind = rng.choices(list(_MAKERS), [weight for weight, _ in _MAKERS.values()])[0]
    target, how = _MAKERS[kind][1](rng, names, setup)
    return Fault(at_s, kind, target, how)


Made = tuple[str, dict[str, Any]]


def _kill(rng: random.Random, names: list[str], setup: Setup) -> Made:
    target = "trainer" if rng.random() < 0.5 else rng.choice(names)
    step = rng.choice(("now", "unsent", "applied", "file"))
    return target, {} if step == "now" else {"step": step, "count": rng.randrange(12)}


def _one(rng: random.Random, names: list[str], setup: Setup) -> Made:
    return rng.choice(["trainer", *names]), {}


def _freeze(rng: random.Random, names: list[str], setup: Setup) -> Made:
    return rng.choice(["trainer", *names, *names]), {"for_s": round(rng.uniform(0.5, 3.0) * LEASE_S, 2)}


def _cut_off(rng: random.Random, names: list[str], setup: Setup) -> Made:
    return rng.choice(["trainer", *names]), {"for_s": round(rng.uniform(0.2, 3.0) * LEASE_S, 2)}


def _loss(rng: random.Random, names: list[str], setup: Setup) -> Made:
    how: dict[str, Any] = {"for_s": round(rng.uniform(0.1, 3.0), 2)}
    if rng.random() < 0.35:
        how["lose_commits"] = rng.randint(1, 4)
    elif rng.random() < 0.9:
        how["lose"] = int(2 ** rng.uniform(0, 7))
    if rng.random() < 0.4:
        how["before"] = list(rng.choice(MOMENTS))
    return "", how


def _failover(rng: random.Random, names: list[str], setup: Setup) -> Made:
    target, how = _loss(rng, names, setup)
    if rng.random() < 0.4:
        how["clock_s"] = round(rng.uniform(-30.0, 30.0), 1)
    return target, how


def _empty(rng: random.Random, names: list[str], setup: Setup) -> Made:
    return "", {"flush": True} if rng.random() < 0.5 else {"for_s": 1.0}


def _slow(rng: random.Random, names: list[str], setup: Setup) -> Made:
    return "", {"for_s": round(rng.uniform(1.0, 10.0), 1), "slow_s": round(rng.uniform(0.02, 1.5), 2)}


def _unreliable(rng: random.Random, names: list[str], setup: Setup) -> Made:
    how = {"for_s": round(rng.uniform(1.0, 10.0), 1), "share": round(rng.uniform(0.05, 0.6), 2)}
    return "", how | ({"hang": round(rng.uniform(0.1, 0.5), 2)} if rng.random() < 0.3 else {})


def _clock(rng: random.Random, names: list[str], setup: Setup) -> Made:
    return rng.choice(["trainer", *names]), {
        "by_s": round(rng.choice((-600, -60, -5, 5, 60, 3600)) * rng.random(), 1)
    }


def _disk(rng: random.Random, names: list[str], setup: Setup) -> Made:
    return "", {"for_s": round(rng.uniform(0.5, 10.0), 1)}


def _tear(rng: random.Random, names: list[str], setup: Setup) -> Made:
    kinds = ["checkpoint", "checkpoint", "weights", "metrics"]
    return "trainer", {"what": rng.choice(kinds), "share": round(rng.random(), 3)}


def _foreign(rng: random.Random, names: list[str], setup: Setup) -> Made:
    if rng.random() < 0.4:
        return "trajectories", {"what": rng.choice(("future", "old", "nan"))}
    return rng.choice(STREAMS), {"what": rng.choice(("garbage", "text", "copied"))}


def _config(rng: random.Random, names: list[str], setup: Setup) -> Made:
    name = rng.choice(("trainer.checkpoint_every", "trainer.keep_checkpoints", "trainer.keep_weights"))
    return "trainer", {"set": {name: rng.choice((2, 3))}}


_MAKERS: dict[str, tuple[float, Any]] = {
    "kill": (6.0, _kill),
    "freeze": (2.0, _freeze),
    "term": (1.0, _one),
    "restart": (5.0, _loss),
    "failover": (2.0, _failover),
    "empty": (0.7, _empty),
    "slow": (1.0, _slow),
    "unreliable": (2.0, _unreliable),
    "cut_off": (1.5, _cut_off),
    "server_clock": (0.8, _clock),
    "host_clock": (0.8, _clock),
    "disk_full": (1.0, _disk),
    "tear": (1.8, _tear),
    "foreign": (1.5, _foreign),
    "config": (0.7, _config),
}
"""Kind -> how often it is drawn, and what makes one."""
