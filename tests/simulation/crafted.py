"""Schedules whose faults come at the one moment where they matter, which chance rarely draws."""

import random
from collections.abc import Callable
from dataclasses import replace

from tests.simulation.schedule import LEASE_S, Fault, Setup
from tidemill.services.trainer.batch.reconciler import WATCH_S

Crafted = tuple[Setup, list[Fault]]


def crafted(kind: str, rng: random.Random, setup: Setup) -> Crafted:
    """The setup and the faults of a kind, which takes the place of the faults that were drawn."""
    at_s = round(rng.uniform(2.0, 8.0), 3)
    for_s = round(rng.uniform(0.3, 2.5), 2)
    return CRAFTED[kind](rng, setup, at_s, for_s)


def _outage(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """An outage that is longer than a lease: all leases have run out."""
    return setup, [Fault(at_s, "restart", "", {"for_s": round(rng.uniform(1.1, 2.0) * LEASE_S, 2)})]


def _behind(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """After a failover to an earlier clock, new ids are lower than the positions of readers."""
    clock_s = -round(rng.uniform(15.0, 90.0), 1)
    how = {"for_s": for_s, "lose": rng.randint(8, 64), "clock_s": clock_s}
    return setup, [Fault(at_s, "failover", "", how)]


def _back(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """The trainer dies, and Redis loses commits that came after the last checkpoint."""
    setup = replace(setup, checkpoint_every=4, max_staleness=rng.choice((0, 0, 1)))
    lost = {"for_s": for_s, "lose_commits": rng.randint(1, 3)}
    back = Fault(round(at_s + rng.uniform(0.0, 0.3), 3), "restart", "", lost)
    return setup, [Fault(at_s, "kill", "trainer"), back]


def _jump(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """Redis's clock jumps when all have renewed a lease: before, a jump looks like a restart."""
    setup = replace(setup, steps=4, sample_s=1.25 * LEASE_S, rollouts=2, rewards=2)
    return setup, [Fault(round(at_s + 6.0, 3), "server_clock", "trainer", {"by_s": rng.randint(10, 3600)})]


def _leave(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """Workers get SIGTERM before they can finish what they hold."""
    setup = replace(setup, sample_s=1.25 * LEASE_S, steps=3, rollouts=2, rewards=2, reward_slots=2)
    leavers = rng.sample(("rollout-0", "rollout-1", "reward-0", "reward-1"), 3)
    return setup, [Fault(round(at_s + 2.0 * i, 3), "term", name) for i, name in enumerate(leavers)]


def _ahead(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """Foreign samples of a version that will exist before their step is trained."""
    return replace(setup, max_staleness=3, steps=6), _strangers(rng, "ahead")


def _twin(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """Foreign samples with keys of real ones, of a version that their tickets allow."""
    return replace(setup, group_size=8), _strangers(rng, "twin")


def _strangers(rng: random.Random, content: str) -> list[Fault]:
    moments = [round(rng.uniform(0.5, 6.0), 3) for _ in range(6)]
    return [Fault(moment, "foreign", "trajectories", {"what": content}) for moment in moments]


def _between(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """A step was trained and is not committed; Redis loses what it was trained on, and no commit."""
    setup = replace(setup, steps=5, max_staleness=0, checkpoint_every=4, archive=False, evaluation=False)
    at_s = at_s if setup.sample_s < LEASE_S else 2.0 * at_s
    moment = rng.choice((["mark", "committing"], ["append_after", "commits"]))
    how = {"for_s": for_s, "lose_step": True, "before": moment}
    return setup, [Fault(at_s, rng.choice(("restart", "failover")), "", how)]


def _trim(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """When a trim is decided, a server takes over that has lost the entries and gives lower ids to others."""
    setup = replace(setup, steps=6, checkpoint_every=1, keep_checkpoints=1, trim=True, archive=False)
    how = {"for_s": for_s, "lose_commits": 1, "lose": rng.randint(8, 64), "before": ["trim", "trajectories"]}
    how |= {"clock_s": -round(rng.uniform(15.0, 90.0), 1), "hold_s": round(rng.uniform(3.0, 6.0), 1)}
    setup = replace(setup, max_staleness=rng.choice((1, 3)), sample_s=1.0)
    if rng.random() < 0.5:  # before it has its mark
        how["before"] = ["mark", "trimming"]
    return setup, [Fault(at_s, "failover", "", how)]


def _oldest(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """The newest checkpoint is torn: the one before replays what has come since."""
    setup = replace(setup, steps=6, checkpoint_every=rng.choice((1, 2)), keep_checkpoints=2, archive=False)
    torn = {"what": "checkpoint", "share": round(rng.random(), 3)}
    return replace(setup, trim=True, sample_s=1.0), [Fault(round(at_s + 2.0, 3), "tear", "trainer", torn)]


def _reuse(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """Ids no longer follow the time: lost ids are given to the next entries."""
    back = Fault(0.8, "server_clock", "trainer", {"by_s": -rng.randint(60, 600)})
    faults = [back, Fault(at_s, "restart", "", {"for_s": for_s, "lose": rng.randint(8, 64)})]
    if rng.random() < 0.5:
        how = {"for_s": 6.0, "share": round(rng.uniform(0.1, 0.4), 2), "hang": 0.5}
        faults.append(Fault(at_s, "unreliable", "", how))
    setup = replace(setup, steps=4, max_staleness=rng.choice((0, 1)), evaluation=False, sample_s=1.0)
    return replace(setup, group_size=8, rollouts=3, rewards=1), faults


def _end(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """When the run is over, a server takes over that lacks the last commits."""
    how = {"for_s": for_s, "lose_commits": rng.choice((1, 1, 2)), "before": ["finish", "commits"]}
    return replace(setup, steps=3), [Fault(2.0, rng.choice(("restart", "failover")), "", how)]


def _late(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """Groups of earlier steps are replaced in later ones."""
    setup = replace(setup, steps=6, batch_order="as_ready", groups_per_step=3, group_size=2, mixed=True)
    setup = replace(setup, max_staleness=rng.choice((1, 3)), rollouts=2, rewards=2, evaluation=False)
    setup = replace(setup, sample_s=1.0)
    freeze = Fault(
        round(at_s / 2.0, 3), "freeze", rng.choice(("rollout-0", "rollout-1")), {"for_s": 2.0 * for_s}
    )
    return setup, [freeze]


def _again(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """The trainer dies when it has evaluated a version, and is about to announce the next."""
    how = {"before": ["XINFO STREAM", "weights"]}
    faults = [Fault(round(at_s / 2.0 + 2.5 * i, 3), "kill", "trainer", how) for i in range(3)]
    return replace(setup, evaluation=True, steps=6, sample_s=1.0), faults


def _last(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """A reward worker dies between the last result of a group and its publication, perhaps: another one
    takes the last trajectory over."""
    how = {"before": ["store_result", "trajectories"], "step": "unsent"}
    kills = [Fault(round(0.5 * at_s + i, 3), "kill", f"reward-{i % 2}", how) for i in range(4)]
    return replace(setup, per_group=True, group_size=2, rewards=2, steps=4, sample_s=1.0), kills


def _unheard(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """Answers are lost, and nothing else: what was done is asked for again."""
    how = {"for_s": 8.0, "share": round(rng.uniform(0.2, 0.4), 2)}
    return replace(setup, steps=4), [Fault(round(at_s / 2.0, 3), "unreliable", "", how)]


def _older(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """Two releases at once: a worker of the one before reads what it does not understand."""
    setup = replace(setup, claims=True, steps=4, rewards=2, sample_s=1.0)
    return setup, [Fault(round(at_s / 2.0, 3), "older", "reward-9", {"for_s": 0.5 + for_s})]


PART = {"before": ["append_part", "prompts"]}
"""The moment when a part arrives that is of the target, or of the worker named by `of`."""


def _heirs(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """Workers die when a part of theirs has come, more often than a ticket may be delivered without one; with
    the last one Redis loses what came last."""
    setup = _with_parts(rng, setup)
    # A sample that is played again from its beginning, since its answers differed, makes no progress.
    setup = replace(setup, max_staleness=0, max_attempts=5 if setup.parts == "repeat" else 2)
    faults = [
        Fault(round(0.4 * at_s + 2.5 * i, 3), "kill", f"rollout-{i % 2}", PART)
        for i in range(rng.choice((3, 4)))
    ]
    if rng.random() < 0.6:
        lost = {"for_s": for_s, "lose": rng.randint(1, 24)}
        faults.append(Fault(round(at_s + 4.0, 3), "restart", f"rollout-{rng.randrange(2)}", lost | PART))
    return setup, faults


def _forks(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """A version is lost with its commit, and much that it was trained on, while samples of it are made; their
    worker dies with the first part that comes after it."""
    setup = replace(_with_parts(rng, setup), steps=6, max_staleness=rng.choice((1, 3)), checkpoint_every=4)
    setup = replace(setup, rollouts=3, group_size=3)
    faults = [Fault(0.5, "kill", "rollout-2")]
    for i in range(2):
        moment = round(at_s / 2.0 + 3.0 + 6.0 * i, 3)
        worker = f"rollout-{i}"
        lost = {"for_s": round(0.4 * for_s, 2), "lose_commits": 1, "lose": rng.randint(0, 40)}
        faults.append(Fault(moment, "restart", worker, lost | PART | {"then": ["kill", worker]}))
        faults.append(Fault(moment, "kill", "trainer", {"of": worker} | PART))
    return setup, faults


def _sleepers(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """Each of two workers is frozen, or cut off, with a part on its way, until the other one has taken
    over what it holds and works on it; answers may be lost."""
    kinds = [rng.choice(("freeze", "freeze", "cut_off")) for _ in range(3)]
    lasting_s = [round(rng.uniform(1.2, 1.7) * LEASE_S, 2) for _ in kinds]
    faults = [
        Fault(
            round(at_s / 4.0 + 1.2 * LEASE_S * i, 3), kind, f"rollout-{i % 2}", {"for_s": lasting_s[i]} | PART
        )
        for i, kind in enumerate(kinds)
    ]
    if rng.random() < 0.5:
        how = {"for_s": 8.0, "share": round(rng.uniform(0.2, 0.4), 2)}
        faults.append(Fault(round(at_s / 2.0, 3), "unreliable", "", how))
    return _with_parts(rng, setup), faults


def _with_parts(rng: random.Random, setup: Setup) -> Setup:
    setup = replace(setup, parts=rng.choice(("turns", "restore", "repeat")), choices=rng.random() < 0.5)
    setup = replace(
        setup, steps=3, groups_per_step=1, group_size=2, rollouts=2, evaluation=False, sessions=False
    )
    return replace(setup, sample_s=0.9 * LEASE_S, trim=True, per_group=rng.random() < 0.3)


def _rows(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """Choices come back in a replay, from their files or the archive; their writers die between their files,
    or between files and entries, and the store of them is away, or has lost or changed some."""
    setup = replace(setup, choices=True, claims=rng.random() < 0.3, steps=5, checkpoint_every=4, trim=True)
    setup = replace(setup, archive=rng.random() < 0.7, segment_mb=0.001, keep_choices=rng.random() < 0.7)
    steps = {"file": rng.randrange(12), "claimed": rng.randrange(4)}
    faults = [
        Fault(0.5 + 1.5 * i, "kill", f"rollout-{i % setup.rollouts}", {"step": step, "count": count})
        for i, (step, count) in enumerate(steps.items())
    ]
    faults += [Fault(round(at_s + i, 3), "kill", "trainer") for i in (0.0, 4.0)]
    if rng.random() < 0.5:
        faults.append(Fault(round(at_s - 1.0, 3), "away", "", {"for_s": round(4.0 * for_s, 2)}))
    elif rng.random() < 0.5:
        how = {"count": rng.randint(1, 4)} | ({"share": round(rng.random(), 3)} if rng.random() < 0.5 else {})
        faults.append(Fault(round(at_s - 1.0, 3), "vanish", "", how))
    return replace(setup, sample_s=1.0), faults


def _beginning(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """A worker is frozen when it is about to begin a group, until another one has taken the ticket over."""
    how = {"for_s": _over_a_lease(rng), "sending": ["start_group", "prompts"]}
    setup = replace(setup, rollouts=2, group_size=4, steps=4, sample_s=1.0)
    return setup, [Fault(round(at_s / 2.0, 3), "freeze", rng.choice(("rollout-0", "rollout-1")), how)]


def _leaving(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """A worker that leaves is frozen when it is about to hand back what it holds, until others have it."""
    setup = replace(setup, sample_s=1.25 * LEASE_S, steps=3, rollouts=2, rewards=2, reward_slots=2)
    leaver, stream = rng.choice((("rollout-0", "prompts"), ("reward-0", "trajectories")))
    if stream == "trajectories":
        at_s = round(at_s + LEASE_S, 3)
    how = {"for_s": _over_a_lease(rng), "sending": ["hand_back", stream]}
    return setup, [Fault(at_s, "term", leaver), Fault(at_s, "freeze", leaver, how)]


def _over_a_lease(rng: random.Random) -> float:
    """Seconds in which a lease ends, and other workers have looked for such leases."""
    return round(rng.uniform(1.7, 2.4) * LEASE_S, 2)


def _put_back(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """What a worker of an older release could not read is put back before the trainer has heard of it."""
    setup = replace(setup, claims=True, steps=4, rewards=2, sample_s=1.0, per_group=False)
    at_s = round(at_s / 2.0, 3)
    older = Fault(at_s, "older", "reward-9", {"for_s": 1.5 + for_s})
    freeze = Fault(at_s, "freeze", "trainer", {"for_s": 1.5 * LEASE_S})
    return setup, [older, freeze, *(Fault(round(at_s + 1.0 + i, 3), "operate") for i in range(5))]


def _other_weights(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """A worker is frozen while the version that it holds is lost, and trained again on other samples."""
    setup = replace(setup, steps=5, max_staleness=0, groups_per_step=3, group_size=2, checkpoint_every=4)
    # Longer than the worker takes to learn of it: it publishes before there is a version after this one.
    setup = replace(setup, rollouts=2, sample_s=3.0, evaluation=False, parts="")
    at_s = round(at_s + 8.0, 3)
    lost_s = round(at_s + 0.1, 3)
    # Three versions are announced after the loss: the one before both, the first one, and the one held.
    freeze = Fault(at_s, "freeze", "rollout-0", {"for_s": 30.0, "until": ["append_after", "weights", 3]})
    lost = {"for_s": round(0.4 * for_s, 2), "lose_commits": 2}
    return setup, [freeze, Fault(lost_s, "kill", "trainer"), Fault(lost_s, "restart", "", lost)]


def _shift(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """Redis loses some deliveries while scores gather for one call: they come again before it is sent."""
    setup = replace(setup, steps=4, group_size=8, rewards=1, rollouts=2, sample_s=1.0, per_group=False)
    faults = []
    for i in range(3):
        lost = {"for_s": round(rng.uniform(0.8, 2.0), 2), "lose": rng.randint(2, 12)}
        how = lost | {"before": ["complete", "scores"]}
        faults.append(Fault(round(at_s / 2.0 + 4.0 * i, 3), "restart", "reward-0", how))
    return setup, faults


def _question(rng: random.Random, setup: Setup, at_s: float, for_s: float) -> Crafted:
    """While a step is trained, Redis loses what it is trained on; the trainer's background check is the first
    to see another server, and one of its questions has no answer while the step is committed."""
    setup = replace(setup, groups_per_step=3, checkpoint_every=4, sample_s=1.0, shares_lines=False)
    setup = replace(setup, steps=5, group_size=rng.choice((2, 3, 4)), archive=False, evaluation=False)
    at_s = round(rng.choice((1, 1, 2)) * WATCH_S - rng.uniform(0.03, 0.1), 3)
    restart = Fault(at_s, "restart", "", {"for_s": 0.05, "lose": rng.randint(8, 40)})
    how = {"for_s": 0.0, "share": 1.0, "hang": 1.0, "sending": ["HGET", "state"]}
    return setup, [restart, Fault(round(at_s + 0.01, 3), "unreliable", "trainer", how)]


CRAFTED: dict[str, Callable[[random.Random, Setup, float, float], Crafted]] = {
    "outage": _outage,
    "behind": _behind,
    "back": _back,
    "jump": _jump,
    "leave": _leave,
    "ahead": _ahead,
    "twin": _twin,
    "between": _between,
    "trim": _trim,
    "oldest": _oldest,
    "reuse": _reuse,
    "end": _end,
    "late": _late,
    "again": _again,
    "last": _last,
    "unheard": _unheard,
    "older": _older,
    "heirs": _heirs,
    "sleepers": _sleepers,
    "forks": _forks,
    "rows": _rows,
    "beginning": _beginning,
    "leaving": _leaving,
    "put_back": _put_back,
    "other_weights": _other_weights,
    "shift": _shift,
    "question": _question,
}
"""Kind -> what makes it from a generator, a setup, and a time and a duration in seconds that it may use."""
