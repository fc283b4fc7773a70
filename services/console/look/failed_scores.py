"""Which rewards failed in a run, how often and why: from its scores.

Heartbeats say it while the workers are there. Scores stay when the workers have left or were killed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tidemill.common.config import RewardConfig
from tidemill.common.history import History, StreamName
from tidemill.common.process.failures import Failure, FailureLog, added_up
from tidemill.common.wire.messages import Score, ScoreStatus, TrajectoryKey
from tidemill.services.console.text.tree import Node

OF_SAMPLE = "sample"
"""What failed where no reward was asked: its environment, or its payload."""
OF_SUM = "weighted sum"
MAX_LINES = 5
"""Causes that people are shown; summary.json has all that were counted."""


async def count_failed_scores(history: History, reward: RewardConfig) -> list[Failure]:
    """The failed rewards of all training scores that the streams and the archive have, by reward and cause,
    the most frequent first. A reward for which a fixed value counted has failed, too."""
    log = FailureLog()
    failed_keys: set[TrajectoryKey] = set()
    async for score in history.messages(StreamName.SCORES, Score):
        failures = failures_in(score, reward)
        # After a takeover a score may be there twice.
        if failures and score.key not in failed_keys:
            failed_keys.add(score.key)
            kind = "timeout" if score.status is ScoreStatus.TIMEOUT else "error"
            for subject, error in failures:
                log.note(subject, kind, error)
    return added_up(log.failures)


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


def parse_failures(rows: object) -> list[Failure]:
    """The failures of a summary; none where they are missing, as in one of an older release."""
    try:
        return _FAILURES.validate_python(rows or [])
    except ValidationError:
        return []


def failure_rows(failures: list[Failure]) -> list[dict[str, Any]]:
    return [asdict(failure) for failure in failures]


_FAILURES = TypeAdapter(list[Failure])
