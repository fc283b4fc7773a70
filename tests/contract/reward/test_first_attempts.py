"""First attempts of an async function, for which no task of the worker waits: what fails, dies, is late, is
lost or is stopped ends as it does where a task waits for it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.rewards import beat_of, num_pending, obedient_functions, peak, scores, worker
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Consumer, append
from tidemill.common.streams.entries import NOBODY
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import ScoreStatus
from tidemill.services.reward.worker import RewardLane

RAISES_ONCE = """
if not (FOLDER / 'raised').exists():
    await asyncio.sleep(0.2)
    (FOLDER / 'raised').touch()
    raise KeyError('verdict')
"""
WAITS = """
(FOLDER / 'begun').touch()
try:
    while not (FOLDER / 'open').exists(): await asyncio.sleep(0.02)
except asyncio.CancelledError:
    (FOLDER / 'cancelled').touch()
    raise
"""


@pytest.fixture
def put(broker: Broker, keys: Keys) -> Callable[..., Any]:
    """Append samples whose texts are run as code."""

    async def put(*texts: str) -> None:
        await append(
            broker, keys.trajectories(), *(make_trajectory(0, i, text=t) for i, t in enumerate(texts))
        )

    return put


@pytest.fixture
def reward(tmp_path: Path) -> dict[str, Any]:
    return {"function": f"{obedient_functions(tmp_path)}:awaited"}


@pytest.fixture
def tasks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the first attempts began for which the lane started a task; 0 where there was none."""
    started: list[float] = []
    start_task = RewardLane._start_task

    def noting(lane: RewardLane, delivery: Any, began_at: float = 0.0) -> Any:
        started.append(began_at)
        return start_task(lane, delivery, began_at)

    monkeypatch.setattr(RewardLane, "_start_task", noting)
    return started


async def test_a_first_attempt_needs_no_task_and_gives_the_same_score(put, reward, tasks, broker, keys):
    await put("await asyncio.sleep(0.01)", "pass")
    async with worker(broker, keys, **reward):
        both = await scores(broker, keys, 2)
    assert [(score.status, score.value, score.attempts, score.tries) for score in both] == [
        (ScoreStatus.OK, 1.0, 1, ())
    ] * 2
    assert both[0].tokens_digest and both[0].latency_s > 0.01 and both[0].components["pid"]
    assert tasks == [] and await num_pending(broker, keys) == 0


async def test_a_first_attempt_that_fails_is_one_of_all_attempts(put, reward, tasks, broker, keys):
    await put(RAISES_ONCE)
    async with worker(broker, keys, **reward, max_attempts=3):
        (score,) = await scores(broker, keys, 1)
    assert (score.status, score.attempts, len(score.tries)) == (ScoreStatus.OK, 2, 2)
    (_, first_s, _, reason), (_, _, _, second_reason) = score.tries
    assert "KeyError: 'verdict'" in reason and second_reason == ""
    assert first_s >= 0.2 and score.latency_s >= first_s, "its time counts"
    assert len(tasks) == 1 and tasks[0] > 0


async def test_all_attempts_may_fail(put, reward, broker, keys):
    await put("raise KeyError('verdict')", "await asyncio.sleep(3600)")
    async with worker(broker, keys, **reward, max_attempts=2, timeout_s=1.0) as context:
        failed, late = await scores(broker, keys, 2)
        failures = beat_of(context).failures
    assert (failed.status, failed.attempts, len(failed.tries)) == (ScoreStatus.FAILED, 2, 2)
    assert "KeyError: 'verdict'" in failed.error and failed.is_code_error
    assert (late.status, late.attempts) == (ScoreStatus.TIMEOUT, 2) and "no result within 1 s" in late.error
    assert sum(failure.count for failure in failures) == 4, "each attempt is counted"


async def test_a_call_that_ends_its_process_fails_alone(put, reward, tasks, broker, keys):
    death = "await asyncio.sleep(0.1); os._exit(3)"
    await put(*["await asyncio.sleep(0.3)"] * 5, death, *["await asyncio.sleep(0.3)"] * 5)
    async with worker(broker, keys, **reward, max_attempts=2):
        published = await scores(broker, keys, 11)
    assert [score.index for score in published if score.status is not ScoreStatus.OK] == [5]
    assert "exit code 3" in published[5].error and published[5].attempts == 2
    assert all(score.attempts == 1 for score in published if score.index != 5), "nobody else's fault"
    assert len(tasks) == 11


async def test_a_lost_lease_ends_a_first_attempt_and_publishes_nothing(put, reward, broker, keys, tmp_path):
    await put(WAITS)
    async with worker(broker, keys, **reward) as context:
        await wait_until((tmp_path / "begun").exists)
        reply = await broker.execute("XPENDING", keys.trajectories(), REWARD_GROUP, "-", "+", 10)
        command = ("XCLAIM", keys.trajectories(), REWARD_GROUP, "thief", 0, *(row[0] for row in reply))
        await broker.execute(*command, "JUSTID")
        await wait_until((tmp_path / "cancelled").exists)
        await wait_until(lambda: context.activity.state == "wait:trajectories")
    assert await broker.execute("XLEN", keys.scores()) == 0
    assert await num_pending(broker, keys) == 1, "the thief's"


async def test_a_stop_waits_for_first_attempts_and_their_further_ones(put, reward, broker, keys, tmp_path):
    await put(WAITS, WAITS + RAISES_ONCE)
    async with worker(broker, keys, **reward, max_attempts=2):
        await wait_until((tmp_path / "begun").exists)
        asyncio.get_running_loop().call_later(0.5, (tmp_path / "open").touch)
    published = await scores(broker, keys, 2)
    assert [score.attempts for score in published] == [1, 2] and await num_pending(broker, keys) == 0


async def test_a_stop_ends_and_hands_back_what_does_not_end_in_time(put, reward, broker, keys, tmp_path):
    await put(WAITS)
    async with worker(broker, keys, drain_s=0.05, **reward):
        await wait_until((tmp_path / "begun").exists)
    *_, holders = await broker.execute("XPENDING", keys.trajectories(), REWARD_GROUP)
    assert [name.decode() for name, _ in holders] == [NOBODY], "nobody waits for a lease to end"
    assert await broker.execute("XLEN", keys.scores()) == 0


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples the worker holds after each call that publishes."""
    counts: list[int] = []
    complete = Consumer.complete

    async def noting(self: Any, *args: Any) -> list[bool]:
        flags = await complete(self, *args)
        counts.append(len(self.held))
        return flags

    monkeypatch.setattr(Consumer, "complete", noting)
    return counts


async def test_a_full_lane_holds_some_more_and_never_runs_them(put, reward, held, broker, keys):
    await put(*["await asyncio.sleep(0.05)"] * 200)
    async with worker(broker, keys, **reward, max_in_flight=20):
        published = await scores(broker, keys, 200)
    assert peak(published) == 20 and max(held) == 22, "the share of its slots that begins soon"
    assert {score.attempts for score in published} == {1}


async def test_a_lane_whose_rewards_take_long_holds_no_more_than_it_runs(
    put, reward, held, broker, keys, monkeypatch
):
    monkeypatch.setattr("tidemill.services.reward.worker.AHEAD_S", 0.0001)
    await put(*["await asyncio.sleep(0.05)"] * 60)
    async with worker(broker, keys, **reward, max_in_flight=20):
        await scores(broker, keys, 60)
    assert max(held) == 20
