"""The processes in which workers' environments run: found below the workers, killed, and gone in the end."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from tests.chaos.archive import Archive
from tests.chaos.fleet import Fleet
from tests.chaos.verdict import known_trajectories
from tests.support.waiting import wait_until
from tidemill.common.config import RunConfig
from tidemill.common.wire.messages import ScoreStatus

MARK = b"tidemill.services.rollout.environments.stages"
PATIENCE_S = 30.0


class EnvironmentProcesses:
    """Those of all rollout workers, also of the dead."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._seen: set[int] = set()

    def look(self) -> dict[int, str]:
        """Those that live below a worker now, with its name."""
        names = [*self._fleet.running("rollout"), *self._fleet.running("rollout", False)]
        workers = {name: self._fleet.members[name].process.pid for name in names}
        children = {
            child: name for name, pid in workers.items() for child in _children(pid) if _is_one(child)
        }
        self._seen |= children.keys()
        return children

    async def kill(self, rng: random.Random, timeout_s: float) -> tuple[str, float]:
        """SIGKILL of one; returns its worker and the time of death."""
        children = await wait_until(self.look, timeout_s)
        pid = rng.choice(sorted(children))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return children[pid], time.time()

    async def left_over(self) -> list[int]:
        """Those that have outlived their workers, after what a process may take to end."""
        self.look()
        try:
            await wait_until(lambda: not any(map(_is_one, self._seen)), PATIENCE_S)
        except TimeoutError:
            return [pid for pid in sorted(self._seen) if _is_one(pid)]
        return []


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has just died
        return []


def _is_one(pid: int) -> bool:
    try:
        return MARK in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def misjudged(archive: Archive, config: RunConfig) -> list[str]:
    """Scores that are not what the environment gave in a play of that session, in words; each is one too
    many. Single turns have none."""
    if config.rollout.environment.is_single_turn:
        return []
    records = known_trajectories(archive)
    problems = []
    for score in (*archive.scores.messages, *archive.scores.lost.values()):
        if score.status is not ScoreStatus.OK:
            continue
        rewards = [record.session.reward for record in records.get(score.key, []) if record.session]
        if not score.value or score.value not in rewards:
            problems.append(
                f"{score.key} has the score {score.value}; its environment gave {rewards or 'nothing'}"
            )
    return problems


def num_faults(archive: Archive) -> int:
    """Plays that ended in a fault, of all sessions that were played to their end."""
    trajectories = (*archive.trajectories.messages, *archive.trajectories.lost.values())
    return sum(trajectory.session.num_faults for trajectory in trajectories if trajectory.session)
