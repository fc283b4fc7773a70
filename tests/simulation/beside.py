"""Additions to a schedule, each drawn from a generator of its own, so that the other draws stay the same."""

import random
from dataclasses import replace

from tests.simulation.schedule import ENVIRONMENTS, LEASE_S, Fault, Setup

GROUP_SHARE = 0.12
"""Share of the schedules whose reward is given whole groups."""
SESSIONS_SHARE = 0.12
"""Share of those whose samples are sessions."""
KEPT_SHARE = 0.12
"""Share of those whose stream of commits is trimmed."""
PARTS_SHARE = 0.3
"""Share of those whose samples leave parts."""
TORN_SHARE = 0.2
"""Share of the schedules with parts in which one is torn."""
LINES_SHARE = 0.5
"""Share of those in which calls of a process share a connection."""
BESIDE = {"": 76, "full": 6, "add": 6, "operate": 4, "second": 4, "resume": 4}
"""Kind of what is added to a schedule's faults -> in how many of 100 schedules it is."""


def with_draws(seed: int, setup: Setup) -> Setup:
    """The setup, with features that only some runs have."""
    if random.Random(f"group {seed}").random() < GROUP_SHARE:
        setup = replace(setup, per_group=True)
    if random.Random(f"sessions {seed}").random() < SESSIONS_SHARE:
        setup = replace(setup, sessions=True)
    if random.Random(f"lines {seed}").random() < LINES_SHARE:
        setup = replace(setup, shares_lines=True)
    rng = random.Random(f"parts {seed}")
    if rng.random() < PARTS_SHARE:
        kind = rng.choice(("restore", "repeat")) if setup.sessions else rng.choice(("turns", *ENVIRONMENTS))
        setup = replace(setup, parts=kind)
    rng = random.Random(f"kept {seed}")
    if rng.random() < KEPT_SHARE and setup.trim:
        setup = replace(setup, kept_commits=rng.choice((1, 2)))
    return setup


def torn(seed: int, setup: Setup) -> list[Fault]:
    """A part that arrives cut off, and the deaths of the workers that could have gone on with it."""
    rng = random.Random(f"torn {seed}")
    if not setup.parts or rng.random() >= TORN_SHARE:
        return []
    at_s = round(rng.uniform(0.5, 8.0), 3)
    victims = [Fault(round(at_s + rng.uniform(0.3, 1.5), 3), "kill", f"rollout-{i}") for i in range(2)]
    return [Fault(at_s, "damage", "append_part"), *victims]


def beside(seed: int) -> list[Fault]:
    """Faults in addition to those that are drawn for a seed."""
    rng = random.Random(f"beside {seed}")
    kind = rng.choices(list(BESIDE), list(BESIDE.values()))[0]
    at_s = round(rng.uniform(1.0, 8.0), 3)
    for_s = round(rng.uniform(1.1, 2.0) * LEASE_S, 2)
    if kind == "full":
        return [Fault(at_s, "full", "", {"for_s": round(rng.uniform(0.5, 6.0), 2)})]
    if kind == "add":
        # The new worker finds what the others hold: their leases have run out while Redis was away.
        role = rng.choice(("rollout", "reward"))
        added = Fault(round(at_s + 0.5, 3), "add", f"{role}-9")
        return [Fault(at_s, "restart", "", {"for_s": for_s}), added]
    if kind == "operate":
        # At moments when there may be something to put back.
        moments = [round(at_s + 1.5 * i, 3) for i in range(3)]
        return [Fault(at_s, "damage", "publish_sample"), *(Fault(m, "operate") for m in moments)]
    if kind == "second":
        return [Fault(at_s, "second")]
    if kind == "resume":
        settings = [{"max_staleness": rng.choice((0, 1, 3))}, {"algorithm.filter_zero_variance": True}]
        changed = {f"trainer.{name}": value for name, value in rng.choice(settings).items()}
        return [Fault(at_s, "config", "trainer", {"set": changed})]
    return []
