"""Which rewards failed in a run, how often and why: from its newest scores.

Heartbeats say it while the workers are there. Scores stay when the workers have left or were killed. There
may be millions: the newest are read first, and no more than the end of a run can wait for.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tidemill.common.config import RewardConfig
from tidemill.common.history import History, StreamName
from tidemill.common.process.failures import POST_PROCESSING, Failure, FailureLog, added_up
from tidemill.common.wire.messages import Score, ScoreStatus, TrajectoryKey
from tidemill.services.console.text.tree import Node

OF_SAMPLE = "sample"
"""What failed where no reward was asked: its environment, or its payload."""
OF_SUM = "weighted sum"
MAX_LINES = 5
"""Causes that people are shown; summary.json has all that were counted."""
MAX_SCORES = 100_000
"""Newest scores that are read: some ten seconds."""


class FailedScores:
    """Counts the failed rewards of a run's training scores, from the newest on. A reward for which a fixed
    value counted has failed, too.

    Example: of 250,000 scores `num_read` is 100,000, and `failures` has what failed in these.
    """

    def __init__(self, reward: RewardConfig) -> None:
        self._reward = reward
        self._failed: dict[TrajectoryKey, tuple[str, list[tuple[str, str]]]] = {}
        """By sample the kind of failure, what failed and why."""
        self.num_read = 0
        self.is_complete = False
        """Whether there are no older ones."""

    async def read(self, history: History, most: int = MAX_SCORES) -> None:
        """Read the streams and the archive. What was read counts, also where this is cancelled."""
        async for score in history.messages(StreamName.SCORES, Score, newest_first=True):
            if self.num_read == most:
                return
            self.num_read += 1
            failures = failures_in(score, self._reward)
            if failures:
                kind = "timeout" if score.status is ScoreStatus.TIMEOUT else "error"
                # After a takeover a score may be there twice.
                self._failed[score.key] = (kind, failures)
        self.is_complete = True

    @property
    def failures(self) -> list[Failure]:
        """By reward and cause, the most frequent first; each with the reason of the newest score."""
        log = FailureLog()
        for kind, failures in reversed(self._failed.values()):
            for subject, error in failures:
                log.note(subject, kind, error)
        return added_up(log.failures)

    @property
    def lines(self) -> list[str]:
        """For people, of the most frequent causes."""
        lines = [failure.in_words for failure in self.failures[:MAX_LINES]]
        if lines and not self.is_complete:
            lines.append(among(self.num_read))
        return lines


def among(num_read: int) -> str:
    return f"so it is among the newest {num_read:,} scores; older ones were not read"


def failures_in(score: Score, reward: RewardConfig) -> list[tuple[str, str]]:
    """What failed in a score, and why.

    Of the rewards `exact` and `style`, `error` "exact: KeyError: 'a' (my.py, line 4); style: HTTP 503" is
    [("reward exact", "KeyError: 'a' (my.py, line 4)"), ("reward style", "HTTP 503")].
    """
    replaced = score.detail.get("failures") if reward.rewards else None
    failures = [(f"reward {name}", str(error)) for name, error in _items(replaced)]
    if score.value is not None:
        return failures
    if not score.latency_s:
        return [(OF_SAMPLE, score.error)]
    if score.error.startswith(f"{POST_PROCESSING}: "):
        return [*failures, (POST_PROCESSING, score.error.removeprefix(f"{POST_PROCESSING}: "))]
    if not reward.rewards:
        (name,) = reward.named
        return [(f"reward {name}", score.error)]
    # A name begins its reason, and the names come in the order of the config.
    starts = {name: _start_of(name, score.error) for name in reward.rewards}
    places = sorted((start, name) for name, start in starts.items() if start >= 0)
    if not places or places[0][0] > 0:
        return [*failures, (OF_SUM, score.error)]
    ends = [start for start, _ in places[1:]] + [len(score.error) + len("; ")]
    for (start, name), end in zip(places, ends, strict=True):
        reason = score.error[start + len(f"{name}: ") : end - len("; ")]
        failures.append((f"reward {name}", reason))
    return failures


def _start_of(name: str, error: str) -> int:
    """Where the reason of a reward begins in the error of a sum; -1 where it has none."""
    if error.startswith(f"{name}: "):
        return 0
    separator = error.find(f"; {name}: ")
    return separator + len("; ") if separator >= 0 else -1


def _items(value: object) -> list[tuple[str, object]]:
    return list(value.items()) if isinstance(value, Mapping) else []


def failing_lines(tree: Mapping[str, Any]) -> Iterator[Node]:
    """Lines for people about the failed rewards of a summary."""
    failures = parse_failures(tree.get("failed_rewards"))
    for failure in failures[:MAX_LINES]:
        yield Node("failing", failure.in_words, style="red")
    more = len(failures) - MAX_LINES
    if more > 0:
        yield Node("failing", f"and for {more} more causes: failed_rewards of summary.json")
    num_read = tree.get("failed_rewards_among")
    if failures and isinstance(num_read, int):
        yield Node("failing", among(num_read))


def parse_failures(rows: object) -> list[Failure]:
    """The failures of a summary; none where they are missing, as in one of an older release."""
    try:
        return _FAILURES.validate_python(rows or [])
    except ValidationError:
        return []


def failure_rows(failures: list[Failure]) -> list[dict[str, Any]]:
    return [asdict(failure) for failure in failures]


_FAILURES = TypeAdapter(list[Failure])
