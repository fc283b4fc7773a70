"""What the streams have of a group, as it arrives in the trainer, or as a replay reads it.

Guarantees: the first entry of a key wins, and a score counts for the tokens that it is of.
"""

from dataclasses import dataclass, field

from tidemill.common.streams.entries import Entry
from tidemill.common.wire.messages import Score, Trajectory, is_demonstration

GroupEntry = Entry[Trajectory] | Entry[Score]


@dataclass(slots=True)
class RecordedGroup:
    """Trajectories and scores of one ticket, by index: as they arrive, or as a replay reads them.

    Example: `ticket` 12, `group_size` 4, `trajectories` with the indices 0, 1 and 3, `scores` with 0 and 3:
    sample 1 waits for its score, and sample 2 is still generated.
    """

    ticket: int
    step: int = -1
    """Step that the ticket was issued for; -1: not known."""
    trajectories: dict[int, Trajectory] = field(default_factory=dict)
    scores: dict[int, Score] = field(default_factory=dict)
    group_size: int = 0
    trajectory_ids: dict[int, str] = field(default_factory=dict)
    score_ids: dict[int, str] = field(default_factory=dict)
    """Ids of their entries; both are empty where a committed step is trained again."""
    other_scores: list[Entry[Score]] = field(default_factory=list)
    """Further scores of keys without a trajectory, of other tokens than the first: the trajectory decides."""

    @property
    def is_demonstration(self) -> bool:
        """Whether the group is trained on as it is: it has no scores, and no version produced it."""
        return is_demonstration(self.ticket)

    def take(self, entry: GroupEntry) -> list[GroupEntry]:
        """Keep the first trajectory of a key, and the first score of that trajectory's tokens.

        Returns what does not count: this entry, or a score that came before its trajectory and is of other
        tokens. Example: a score of tokens X comes, then one of tokens Y, then the trajectory with Y. Taking
        that keeps the second score, and returns the first.
        """
        message = entry.message
        if isinstance(message, Score):
            return [] if self._keep_score(entry.entry_id, message) else [entry]
        if not self._is_first(message):
            return [entry]
        self.trajectory_ids[message.index] = entry.entry_id
        self.trajectories[message.index] = message
        return self._choose_score(message)

    def _keep_score(self, entry_id: str, score: Score) -> bool:
        """Keep a score, unless it does not count; returns whether it is kept."""
        # A demonstration is complete without a score, and must not become complete twice.
        if self.is_demonstration or self.is_of_other_tokens(score):
            return False
        if self._is_undecided(score) and len(self.other_scores) < self.group_size:  # memory is bounded
            self.other_scores.append(Entry(entry_id, score))
            return True
        if not self._is_first(score):
            return False
        self.score_ids[score.index] = entry_id
        self.scores[score.index] = score
        return True

    def _is_first(self, message: Trajectory | Score) -> bool:
        """Whether its index is one of the group's, and none of its kind and key was kept before it."""
        index = message.index
        ids = self.trajectory_ids if isinstance(message, Trajectory) else self.score_ids
        return index not in ids and index < self.group_size

    def _is_undecided(self, score: Score) -> bool:
        """Whether the trajectory, when it comes, has to decide between this score and the first one."""
        first = self.scores.get(score.index)
        if first is None or score.index in self.trajectories:
            return False
        return not score.is_of(first.tokens_digest)

    def is_of_other_tokens(self, message: Trajectory | Score) -> bool:
        """Whether it is a score of other tokens than the key's trajectory, as after Redis lost the first."""
        trajectory = self.trajectories.get(message.index)
        return (
            isinstance(message, Score)
            and trajectory is not None
            and not message.is_of(trajectory.tokens_digest)
        )

    def _choose_score(self, sample: Trajectory) -> list[GroupEntry]:
        """Of the scores that came before their trajectory, keep the first one of its tokens. Returns the
        score that was kept until now, if it is of other tokens."""
        first = self.scores.get(sample.index)
        if first is None:
            return []
        came = [entry for entry in self.other_scores if entry.message.index == sample.index]
        self.other_scores = [entry for entry in self.other_scores if entry.message.index != sample.index]
        if first.is_of(sample.tokens_digest):
            return []
        refused = Entry(self.score_ids.pop(sample.index), self.scores.pop(sample.index))
        for entry in came:
            if entry.message.is_of(sample.tokens_digest):
                # Through `take`, which notes the entry's id too: a checkpoint's positions must lie below it.
                self.take(entry)
                break
        return [refused]
