"""A reward worker whose machine is short of descriptors: its samples are scored by a healthy one.

The limit is a real one, set for the running process. As root no limit of processes holds, so `EAGAIN` comes from
a `Popen` that is made to fail in the worker's process.
"""

import errno
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.reward.test_reward_service import PLAIN, put, run_of, scores
from tests.support.rewards import Pool, num_pending, obedient_functions
from tests.support.runs import ServiceRun
from tests.support.training import messages
from tests.support.waiting import wait_until
from tidemill.common.errors import MachineFaultError
from tidemill.common.process import children, shortage
from tidemill.common.process.heartbeats import Heartbeat, read_heartbeats
from tidemill.common.process.shortage import SHORT
from tidemill.common.wire.messages import DeadLetter, ScoreStatus
from tidemill.services.reward.outcome import AttemptError

NUM_SAMPLES = 20
NO_MORE = 3
"""A limit of open files at which no further one can be opened; those that are open stay so."""

LENGTH = """
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return float(len(solution_str))
"""


def limit_files(pid: int, count: int | None = None) -> None:
    """Limit the open files of a running process; None: as many as it may have at most."""
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most if count is None else count, most))


async def beat_of(run: ServiceRun, name: str, is_short: bool) -> Heartbeat:
    """The worker's heartbeat, once it says that its machine is short of something, or that it is not."""

    async def find_beat() -> Heartbeat | None:
        beats = {beat.name: beat for beat in await read_heartbeats(run.broker, run.keys)}
        beat = beats.get(name)
        # It reports its scores once it has imported all that it needs.
        is_ready = beat is not None and "scored" in beat.counts
        return beat if is_ready and bool(beat.counts.get(SHORT)) == is_short else None

    return await wait_until(find_beat)


async def test_a_worker_without_descriptors_gives_its_samples_to_a_healthy_one(tmp_path: Path) -> None:
    async with run_of(tmp_path, LENGTH, lease_s=2.0) as run:
        sick = run.start("reward", "sick")
        await beat_of(run, "sick", is_short=False)
        limit_files(sick.pid, NO_MORE)
        await put(run, *["abc"] * NUM_SAMPLES)
        beat = await beat_of(run, "sick", is_short=True)
        assert beat.detail.startswith("takes no samples") and "ulimit -n" in beat.detail
        assert [failure.what for failure in beat.failures] == ["the machine of sick"]
        assert await messages(run.broker, run.keys.scores(), DeadLetter) == []

        run.start("reward", "healthy")
        made = await scores(run, NUM_SAMPLES)
        assert sorted(score.key for score in made) == [(ticket, 0) for ticket in range(NUM_SAMPLES)]
        assert {score.status for score in made} == {ScoreStatus.OK}
        assert {score.worker for score in made} == {"healthy"}
        # No attempt was counted: a sample that was delivered often is suspected of killing its workers.
        assert {score.attempts for score in made} == {1}
        assert await messages(run.broker, run.keys.dead, DeadLetter) == []
        assert await num_pending(run.broker, run.keys) == 0

        await run.stop_all("healthy")
        limit_files(sick.pid)
        await put(run, *["abc"] * NUM_SAMPLES, first=NUM_SAMPLES)
        made = await scores(run, 2 * NUM_SAMPLES)
        assert {score.worker for score in made[NUM_SAMPLES:]} == {"sick"}
        assert {score.status for score in made} == {ScoreStatus.OK}
        await beat_of(run, "sick", is_short=False)
        log = (tmp_path / "sick.log").read_text()
        assert "this machine is short of something" in log and "a start works again" in log
        assert "Traceback" not in log
