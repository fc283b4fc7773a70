"""What a reward worker says of itself in its heartbeat."""

from types import SimpleNamespace
from typing import Any

from tests.support.rewards import together
from tidemill.common.config import RewardConfig
from tidemill.common.process.activity import Activity
from tidemill.common.process.failures import Failure, FailureLog
from tidemill.common.process.heartbeats import FAILING_SHARE, Heartbeat
from tidemill.services.reward.worker import WorkerMetrics


def beat_with(**post_processing: Any) -> Heartbeat:
    parts = {"failures_by_name": dict, "deaths": [], "notes": [], "log": FailureLog()} | post_processing
    reward = together({"mine": (SimpleNamespace(slots=None), {})})
    counts = WorkerMetrics(Activity("reward"), RewardConfig(), reward, SimpleNamespace(**parts))  # type: ignore[arg-type]
    beat = Heartbeat("w1", "reward")
    counts.report(beat)
    return beat


def test_a_death_is_shown_and_counts_for_no_failed_attempt() -> None:
    """Its calls are run again; a worker most of whose attempts fail is told to get no help."""
    death = Failure("a process of the group function", "died", "exit code 3", count=7)
    beat = beat_with(deaths=[death])
    assert beat.failures == [death]
    assert beat.counts[FAILING_SHARE] == 0.0


def test_a_failed_attempt_at_post_processing_counts() -> None:
    log = FailureLog()
    log.note("group function", "error", "ValueError: no (mine.py, line 4)")
    beat = beat_with(log=log)
    assert [failure.what for failure in beat.failures] == ["group function"]
    assert beat.counts[FAILING_SHARE] == 1.0


def test_what_is_wrong_with_the_processes_of_the_group_function_is_a_note() -> None:
    assert beat_with(notes=["mine blocks its event loop"]).detail == "mine blocks its event loop"
