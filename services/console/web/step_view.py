"""One step for people: its numbers by topic, where its time went, and what its micro-batches held."""

from collections.abc import Mapping
from dataclasses import dataclass

from common.history.outcomes import WHOLE_GROUP, micro_batches_of
from common.wire.messages import Commit, Lane
from services.console.web.group_index import GroupIndex, GroupRow

TOPICS = (
    ("Reward", ("reward", "scores/", "frac_reward", "rewards/")),
    ("Update", ("loss", "grad_norm", "learning_rate", "update_skipped", "mini_batches", "micro_batches")),
    ("Policy", ("entropy", "kl", "rollout_kl", "clip_ratio/", "sampling/", "logprob_gap/", "value")),
    ("Completions", ("completion", "step_tokens", "groups_dropped")),
    ("Staleness", ("staleness/",)),
    ("Time", ("step_time_s", "time/", "trainer_idle_share")),
)
OTHER = "Other"
TIME_PREFIX = "time/"
SECONDS_SUFFIX = "_s"


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward and backward pass held."""

    mini: int
    micro: int
    tickets: tuple[tuple[int, tuple[int, ...]], ...]
    """Tickets with the indices that were in it, in order."""
    num_samples: int


@dataclass(frozen=True, slots=True)
class StepView:
    """What a commit says, joined with the index."""

    commit: Commit
    rows: list[GroupRow]
    """Groups that were trained, in the order in which they entered."""
    dropped: list[tuple[int, int, str]]
    micro_batches: list[MicroBatch]
    topics: list[tuple[str, list[tuple[str, float]]]]
    times: list[tuple[str, float, float]]
    """Part of the step, its seconds, and its share of the step."""


def view_step(commit: Commit, index: GroupIndex) -> StepView:
    """Put a step together."""
    rows = [index.get(ticket, Lane.TRAIN) or GroupRow(ticket) for ticket in commit.groups]
    return StepView(
        commit,
        rows,
        sorted(commit.dropped, key=lambda item: (item[1] != WHOLE_GROUP, item)),
        _micro_batches(commit),
        sort_metrics(commit.metrics),
        _times(commit.metrics),
    )


def sort_metrics(metrics: Mapping[str, float]) -> list[tuple[str, list[tuple[str, float]]]]:
    """Metrics by topic; what belongs to none comes last."""
    topics: dict[str, list[tuple[str, float]]] = {name: [] for name, _ in TOPICS}
    topics[OTHER] = []
    for name, value in metrics.items():
        topics[_topic(name)].append((name, value))
    return [(topic, found) for topic, found in topics.items() if found]


def _topic(name: str) -> str:
    return next((topic for topic, starts in TOPICS if name.startswith(starts)), OTHER)


def _times(metrics: Mapping[str, float]) -> list[tuple[str, float, float]]:
    whole = metrics.get("step_time_s", 0.0)
    parts = [
        (name.removeprefix(TIME_PREFIX).removesuffix(SECONDS_SUFFIX), value)
        for name, value in metrics.items()
        if name.startswith(TIME_PREFIX) and name.endswith(SECONDS_SUFFIX)
    ]
    rest = whole - sum(value for _, value in parts)
    if whole and rest > 0:
        parts.append(("waiting and all else", rest))
    return [(name, value, min(1.0, value / whole) if whole else 0.0) for name, value in parts]


def _micro_batches(commit: Commit) -> list[MicroBatch]:
    found = []
    for mini, micro, keys in micro_batches_of(commit):
        tickets: dict[int, list[int]] = {}
        for ticket, index in keys:
            tickets.setdefault(ticket, []).append(index)
        grouped = tuple((ticket, tuple(indices)) for ticket, indices in tickets.items())
        found.append(MicroBatch(mini, micro, grouped, len(keys)))
    return found
