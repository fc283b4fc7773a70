"""What a run's history proves, computed from copies of its streams alone.

* lost: a ticket that no commit trained or dropped with a reason, counted in trajectories; or a trajectory of
  a trained group that its commit neither trained nor left out with a reason.
* duplicated: a trajectory that was trained by more than one commit, or twice by one.
* a violation: a trained trajectory with a token older than the bound, or from a version of the future, or
  one whose record nobody has seen.
"""

from collections import Counter
from dataclasses import dataclass, field

from tests.chaos.archive import Archive
from tidemill.common.wire.messages import Commit, Trajectory, TrajectoryKey

WHOLE_GROUP = -1


@dataclass
class Verdict:
    """Counts that must all be zero, and what they were counted over."""

    steps: int = 0
    tickets: int = 0
    trained: int = 0
    lost: int = 0
    duplicated: int = 0
    violations: int = 0
    violating: list[str] = field(default_factory=list)
    """Each violation in words."""
    dead: int = 0
    max_staleness: int = 0
    gaps: list[int] = field(default_factory=list)
    """Steps without a commit below the last one."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing was lost, trained twice, or too old."""
        return not (self.lost or self.duplicated or self.violations or self.gaps)


def judge(archive: Archive, group_size: int, max_staleness: int) -> Verdict:
    commits = sorted(archive.commits.messages, key=lambda commit: commit.step)
    tickets = {ticket.ticket for ticket in archive.tickets.messages}
    trained = Counter(key for commit in commits for key in commit.trained_keys)
    settled = {ticket for commit in commits for ticket in _settled(commit)}
    steps = {commit.step for commit in commits}
    verdict = Verdict(len(commits), len(tickets), len(trained))
    # Tickets are numbered without gaps: one that is missing in the copy was issued all the same.
    issued = set(range(max(tickets | settled, default=-1) + 1))
    verdict.lost = group_size * len(issued - settled)
    verdict.lost += sum(_left_unsaid(commit, group_size) for commit in commits)
    verdict.duplicated = sum(count > 1 for count in trained.values())
    verdict.dead = len(archive.dead.entries)
    verdict.gaps = sorted(set(range(max(steps, default=-1) + 1)) - steps)
    records = known_trajectories(archive)
    for commit in commits:
        for key in commit.trained_keys:
            staleness = [_staleness(record, commit.step) for record in records.get(key, [])]
            if not any(0 <= steps <= max_staleness for steps in staleness):
                verdict.violations += 1
                spans = [record.spans for record in records.get(key, [])]
                verdict.violating.append(
                    f"step {commit.step} trained {key} with versions {spans or 'unseen'}"
                )
            verdict.max_staleness = max(verdict.max_staleness, *staleness, 0)
    return verdict


def known_trajectories(archive: Archive) -> dict[TrajectoryKey, list[Trajectory]]:
    """Every record of a key: the one that stands first, then those that Redis has lost."""
    records: dict[TrajectoryKey, list[Trajectory]] = {}
    for sample in (*archive.trajectories.messages, *archive.trajectories.lost.values()):
        records.setdefault(sample.key, []).append(sample)
    return records


def _settled(commit: Commit) -> list[int]:
    return [*commit.groups, *(ticket for ticket, index, _ in commit.dropped if index == WHOLE_GROUP)]


def _left_unsaid(commit: Commit, group_size: int) -> int:
    """Trajectories of the commit's groups that it says nothing about."""
    accounted = set(commit.trained_keys) | {(ticket, index) for ticket, index, _ in commit.dropped}
    sizes = {ticket: commit.sizes.get(str(ticket), group_size) for ticket in commit.groups}
    return sum((ticket, i) not in accounted for ticket, size in sizes.items() for i in range(size))


def _staleness(sample: Trajectory, step: int) -> int:
    """Of the oldest token; negative where a token comes from a version that was not there yet."""
    return step - sample.min_version if sample.max_version <= step else -1
