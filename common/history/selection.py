"""Which streams there are, and which of their entries somebody wants to see."""

from dataclasses import dataclass
from enum import StrEnum

from common.keys import Keys
from common.messages import (
    Commit,
    DeadLetter,
    Lane,
    Message,
    Score,
    ScoreStatus,
    Ticket,
    Trajectory,
    WeightManifest,
)
from common.streams import id_order

Range = tuple[float | None, float | None]
"""Both ends belong to it; None is open."""


class StreamName(StrEnum):
    """The streams of a run, spelled as after the run's prefix."""

    PROMPTS = "prompts"
    TRAJECTORIES = "trajectories"
    SCORES = "scores"
    WEIGHTS = "weights"
    COMMITS = "commits"
    DEAD = "dead"
    PROMPTS_EVAL = "prompts:eval"
    TRAJECTORIES_EVAL = "trajectories:eval"
    SCORES_EVAL = "scores:eval"

    @property
    def lane(self) -> Lane:
        """Training or evaluation; streams without lanes belong to training."""
        return Lane.EVAL if self.endswith(":eval") else Lane.TRAIN

    @property
    def message_type(self) -> type[Message]:
        """What its entries hold."""
        return _TYPES[self.removesuffix(":eval")]

    def key(self, keys: Keys) -> str:
        """Its Redis key."""
        return {
            "prompts": keys.prompts(self.lane),
            "trajectories": keys.trajectories(self.lane),
            "scores": keys.scores(self.lane),
            "weights": keys.weights,
            "commits": keys.commits,
            "dead": keys.dead,
        }[self.removesuffix(":eval")]


_TYPES: dict[str, type[Message]] = {
    "prompts": Ticket,
    "trajectories": Trajectory,
    "scores": Score,
    "weights": WeightManifest,
    "commits": Commit,
    "dead": DeadLetter,
}


@dataclass(frozen=True, slots=True)
class Selection:
    """Entries that fulfil everything that is given. What a message does not have excludes it."""

    first_id: str = "-"
    last_id: str = "+"
    tickets: Range | None = None
    index: int | None = None
    steps: Range | None = None
    """Steps that the tickets were issued for, as tickets, trajectories and commits tell."""
    versions: Range | None = None
    """Some token's version lies in it; for manifests and commits, theirs."""
    times: Range | None = None
    """Seconds since 1970: when the message was finished, scored, issued or announced."""
    rewards: Range | None = None
    worker: str = ""
    status: ScoreStatus | None = None

    def matches(self, entry_id: str, message: Message) -> bool:
        """Whether an entry is selected."""
        if self.first_id != "-" and id_order(entry_id) < id_order(self.first_id):
            return False
        if self.last_id != "+" and id_order(entry_id) > id_order(self.last_id):
            return False
        if self.index is not None and getattr(message, "index", None) != self.index:
            return False
        if self.worker and getattr(message, "worker", None) != self.worker:
            return False
        if self.status is not None and getattr(message, "status", None) != self.status:
            return False
        return (
            _has(self.tickets, getattr(message, "ticket", None))
            and _has(self.steps, getattr(message, "step", None))
            and _has(self.times, time_of(message))
            and _has(self.rewards, getattr(message, "value", None))
            and (self.versions is None or any(_has(self.versions, v) for v in _versions(message)))
        )


ALL = Selection()


def time_of(message: Message) -> float | None:
    """When the message was made, in seconds since 1970; None where it does not tell."""
    for name in ("finished_at", "scored_at", "issued_at", "announced_at", "died_at"):
        if found := getattr(message, name, None):
            return float(found)
    return None


def _has(wanted: Range | None, value: float | None) -> bool:
    if wanted is None:
        return True
    low, high = wanted
    return value is not None and (low is None or value >= low) and (high is None or value <= high)


def _versions(message: Message) -> list[int]:
    if isinstance(message, Trajectory):
        return [version for version, _ in message.spans]
    version = getattr(message, "version", None)
    return [] if version is None else [version]
