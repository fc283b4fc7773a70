"""What happens to a run, drawn from a seed: kills of every kind, and workers that join and leave.

A fault waits for a version, so that any machine gets all of them within the run, however fast it is, and
then for a random time, so that it comes at any moment of a step. Where faults come so close together that
the run is past that version already, most of the time is left out: else the last ones would come after the
run's end. Faults may meet: a second process may be killed while the first one is still starting.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is done. All but the last two are `kill -9` of something that is started again."""

    ENVIRONMENT = "environment"
    """A process in which a rollout worker's environments run."""

    SERVER = "environment server"
    """The server that environments ask, with all that it knows of their sessions."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAINER = "trainer"
    REDIS = "redis"
    TAIL = "lost tail"
    """Redis comes back without the end of what it wrote within the last fsync window."""
    FAILOVER = "failover"
    """Redis dies, and a replica takes over that has not seen the last moments."""
    POWER = "power cut"
    """Everything dies at once, and Redis has lost its tail."""
    JOIN = "join"
    LEAVE = "leave"
    """SIGTERM, or SIGKILL, of a worker that joined; nobody starts it again."""


LOSSES = (Kind.TAIL, Kind.FAILOVER, Kind.POWER)
"""What loses writes that services took for done."""
KILLS = (Kind.ROLLOUT, Kind.REWARD, Kind.TRAINER, Kind.REDIS, *LOSSES)
PARTS = (Kind.ROLLOUT, Kind.REWARD, Kind.TRAINER, Kind.REDIS, Kind.POWER)
"""What dies in turn."""
SESSION_KILLS = (*KILLS, Kind.ENVIRONMENT, Kind.SERVER)
"""Of a run that plays sessions."""
LONGEST_DELAY_S = 3.0
LATE_SHARE = 0.1
"""Of its delay, for a fault whose version has passed."""
MIDDLE_S = 0.7
STEPS_PER_MOVE = 12
LONGEST_LAG_S = 1.0
"""Of a replica that takes over."""
QUIET_STEPS = 3
QUIET_SHARE = 1 / 3
"""No fault is planned for this share of the run at its end, nor for the last few steps of a short one: the
run must still be there for faults that come late. A failover takes as long as a dozen steps of a small
model."""


@dataclass(frozen=True)
class Fault:
    """One thing that happens. `role` is who joins; `is_term` how one leaves."""

    kind: Kind
    at_version: int
    delay_s: float
    role: str = ""
    is_term: bool = False

    def wait_s(self, version: int) -> float:
        """Seconds to wait, now that the run has come to `version`.

        >>> Fault(Kind.REDIS, at_version=8, delay_s=2.0).wait_s(version=8)
        2.0
        >>> Fault(Kind.REDIS, at_version=8, delay_s=2.0).wait_s(version=9)
        0.2
        """
        is_late = version > self.at_version
        return self.delay_s * LATE_SHARE if is_late else self.delay_s


def plan(
    seed: int,
    num_kills: int,
    steps: int,
    longest_delay_s: float = LONGEST_DELAY_S,
    kills: Sequence[Kind] = KILLS,
) -> list[Fault]:
    """Faults in the order in which they happen; each kind of kill comes equally often, up to one."""
    rng = random.Random(seed)
    kinds = [kills[i % len(kills)] for i in range(num_kills)]
    rng.shuffle(kinds)
    last = max(0, steps - max(QUIET_STEPS, int(steps * QUIET_SHARE)))
    faults = [_at(kind, rng.uniform(0, last), rng.uniform(0, longest_delay_s)) for kind in kinds]
    for number in range(max(2, steps // STEPS_PER_MOVE)):
        joins_at = rng.uniform(0, last)
        faults.append(_at(Kind.JOIN, joins_at, 0.0, role=("rollout", "reward")[number % 2]))
        leaves_at = rng.uniform(joins_at, last)
        faults.append(_at(Kind.LEAVE, leaves_at, rng.uniform(0, longest_delay_s), is_term=number % 4 < 2))
    return sorted(faults, key=lambda fault: fault.at_version)


def each_in_turn(steps: int) -> list[Fault]:
    """Each part dies once, evenly over the steps, in the middle of one.

    >>> [fault.at_version for fault in each_in_turn(steps=30)]
    [4, 8, 12, 16, 20]
    """
    gap = (steps - QUIET_STEPS) // (len(PARTS) + 1)
    return [Fault(kind, number * gap, MIDDLE_S) for number, kind in enumerate(PARTS, 1)]


def _at(kind: Kind, version: float, delay_s: float, role: str = "", is_term: bool = False) -> Fault:
    return Fault(kind, int(version), delay_s, role, is_term)
