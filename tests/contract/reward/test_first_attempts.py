"""First attempts of an async function, for which no task of the worker waits: what fails, dies, is late, is
lost or is stopped ends as it does where a task waits for it."""

import asyncio
import errno
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.rewards import beat_of, num_pending, obedient_functions, peak, scores, worker
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.process.heartbeats import FAILING_SHARE, FAILURES
from tidemill.common.process.shortage import make_fault
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import append
from tidemill.common.streams.consumer import Consumer
from tidemill.common.streams.entries import NOBODY
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import ScoreStatus
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.worker import AHEAD_SHARE, RewardLane, Scorer

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


async def test_a_death_that_fails_no_attempt_is_in_the_heartbeat_and_no_attempt(
    put, reward, broker, keys, tmp_path
):
    marker = f"__import__('pathlib').Path({str(tmp_path / 'has died')!r})"
    death = f"await asyncio.sleep(0.1)\nif not {marker}.exists():\n    {marker}.touch(); os._exit(0)"
    await put(*["await asyncio.sleep(0.3)"] * 5, death, *["await asyncio.sleep(0.3)"] * 5)
    async with worker(broker, keys, **reward, max_attempts=1) as context:
        published = await scores(broker, keys, 11)
        beat = beat_of(context)
    assert {(score.status, score.attempts) for score in published} == {(ScoreStatus.OK, 1)}
    (failure,) = beat.failures
    assert failure.what.startswith("a process of reward ") and (failure.kind, failure.count) == ("died", 1)
    assert "exit code 0" in failure.reason and "run again" in failure.reason
    assert beat.counts[FAILING_SHARE] == 0.0
    assert not any(name.startswith(FAILURES) for name in beat.counts)


async def test_after_a_call_that_ended_its_process_first_attempts_need_no_task_again(
    put, reward, tasks, broker, keys
):
    await put("os._exit(3)")
    async with worker(broker, keys, **reward, max_attempts=1):
        await scores(broker, keys, 1)
        # The first sample starts a process; the second one is that which counts.
        await append(broker, keys.trajectories(), make_trajectory(1, 0, text="pass"))
        await scores(broker, keys, 2)
        tasks.clear()
        await append(broker, keys.trajectories(), make_trajectory(2, 0, text="pass"))
        *_, last = await scores(broker, keys, 3)
    assert last.status is ScoreStatus.OK and tasks == []


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
    """How many samples the worker holds after each call that publishes or fetches."""
    counts: list[int] = []

    def note(name: str) -> None:
        call = getattr(Consumer, name)

        async def noting(self: Any, *args: Any) -> Any:
            reply = await call(self, *args)
            counts.append(len(self.held))
            return reply

        monkeypatch.setattr(Consumer, name, noting)

    note("complete")
    note("fetch")
    return counts


MOST_HELD = 20 + int(20 * AHEAD_SHARE)
"""With 20 slots: 26, as docs promise up to a third more."""


async def test_a_full_lane_holds_some_more_and_never_runs_them(put, reward, held, broker, keys):
    await put(*["await asyncio.sleep(0.05)"] * 200)
    async with worker(broker, keys, **reward, max_in_flight=20):
        published = await scores(broker, keys, 200)
    assert peak(published) == 20 and max(held) == MOST_HELD, "the share of its slots that begins soon"
    assert {score.attempts for score in published} == {1}


async def test_a_slot_that_a_call_fetches_for_is_not_fetched_for_by_the_lane(
    put, reward, held, broker, keys, monkeypatch
):
    """A call ends and wakes the lane, which has no free slot: it may hold fewer samples now. Before the lane
    looks, the next call begins with more slots again, and asks for them all."""
    shares_s = itertools.cycle([3600.0, 0.0])
    set_extra_slots = RewardLane._set_extra_slots

    def alternating(lane: RewardLane, batch: Any) -> None:
        monkeypatch.setattr("tidemill.services.reward.worker.AHEAD_S", next(shares_s))
        set_extra_slots(lane, batch)

    monkeypatch.setattr(RewardLane, "_set_extra_slots", alternating)
    monkeypatch.setattr("tidemill.services.reward.worker.MAX_BATCH", 1)
    await put(*["await asyncio.sleep(0.05)"] * 100)
    async with worker(broker, keys, **reward, max_in_flight=20):
        await scores(broker, keys, 100)
    assert max(held) == MOST_HELD


async def test_a_lane_whose_rewards_take_long_holds_no_more_than_it_runs(
    put, reward, held, broker, keys, monkeypatch
):
    monkeypatch.setattr("tidemill.services.reward.worker.AHEAD_S", 0.0001)
    await put(*["await asyncio.sleep(0.05)"] * 60)
    async with worker(broker, keys, **reward, max_in_flight=20):
        await scores(broker, keys, 60)
    assert max(held) == 20


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[RewardLane]:
    """The lanes of the worker."""
    all_lanes: list[RewardLane] = []
    make = RewardLane.__init__

    def noting(lane: RewardLane, *args: Any) -> None:
        make(lane, *args)
        all_lanes.append(lane)

    monkeypatch.setattr(RewardLane, "__init__", noting)
    return all_lanes


@pytest.fixture
def running(lanes: list[RewardLane], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tasks each lane still runs when it hands back what it holds."""
    counts: list[int] = []
    leave = Consumer.leave

    async def noting(self: Any) -> None:
        counts.extend(len(lane.running) for lane in lanes if lane.consumer is self)
        await leave(self)

    monkeypatch.setattr(Consumer, "leave", noting)
    return counts


def fail_first_attempts(lane: RewardLane) -> None:
    """What a reply of the child does that tells of a failure."""
    for break_off in list(lane._first_attempts.values()):
        break_off.__self__.set_exception(AttemptError("it failed"))  # type: ignore[attr-defined]


@pytest.mark.parametrize("when", ["_drain", "end_work"], ids=["as the drain begins", "as its time is over"])
async def test_a_stop_ends_what_a_reply_begins(
    when, put, reward, lanes, running, broker, keys, tmp_path, monkeypatch
):
    method = getattr(RewardLane, when)

    async def failing(lane: RewardLane) -> None:
        # Comes before the first step of any task that the method creates.
        asyncio.get_running_loop().call_soon(fail_first_attempts, lane)
        if when == "end_work":
            fail_first_attempts(lane)
        await method(lane)

    monkeypatch.setattr(RewardLane, when, failing)
    await put(WAITS)
    async with worker(broker, keys, drain_s=0.05, **reward, max_attempts=2, timeout_s=5.0):
        await wait_until((tmp_path / "begun").exists)
    assert running == [0, 0], "two workers must not work on a sample at once"
    *_, holders = await broker.execute("XPENDING", keys.trajectories(), REWARD_GROUP)
    assert [name.decode() for name, _ in holders] == [NOBODY]
    assert await broker.execute("XLEN", keys.scores()) == 0


def note_drain(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set when a lane waits for its work to end."""
    waiting = asyncio.Event()
    until_idle = RewardLane.until_idle

    async def noting(lane: RewardLane) -> None:
        waiting.set()
        await until_idle(lane)

    monkeypatch.setattr(RewardLane, "until_idle", noting)
    return waiting


async def test_a_lease_that_is_lost_in_the_drain_is_not_waited_for(
    put, reward, broker, keys, tmp_path, monkeypatch
):
    waiting = note_drain(monkeypatch)
    await put(WAITS)
    async with worker(broker, keys, drain_s=3600.0, **reward) as context:
        await wait_until((tmp_path / "begun").exists)
        context.stopping.set()
        await wait_until(waiting.is_set)
        reply = await broker.execute("XPENDING", keys.trajectories(), REWARD_GROUP, "-", "+", 10)
        command = ("XCLAIM", keys.trajectories(), REWARD_GROUP, "thief", 0, *(row[0] for row in reply))
        await broker.execute(*command, "JUSTID")
    assert await num_pending(broker, keys) == 1, "the thief's"


async def test_a_lease_that_is_lost_after_the_drain_is_no_error(
    put, reward, broker, keys, tmp_path, monkeypatch
):
    lost: list[str] = []
    leave = Consumer.leave

    async def losing(self: Any) -> None:
        for entry_id in list(self.held):  # as a renewal does that comes now
            lost.append(entry_id)
            self._lose(entry_id)
        await leave(self)

    monkeypatch.setattr(Consumer, "leave", losing)
    await put(WAITS)
    async with worker(broker, keys, drain_s=0.05, **reward):
        await wait_until((tmp_path / "begun").exists)
    assert len(lost) == 1


async def test_an_error_as_a_first_attempt_ends_is_the_workers(put, reward, broker, keys, monkeypatch):
    tried: list[float] = []

    def fail(*args: Any) -> Any:
        tried.append(args[-1])
        raise ZeroDivisionError("of the worker")

    monkeypatch.setattr(Scorer, "score_of_outcome", fail)
    await put("await asyncio.sleep(0.05)")
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with worker(broker, keys, **reward):
            await wait_until(lambda: tried)
    assert await broker.execute("XLEN", keys.scores()) == 0


async def test_an_error_in_the_last_moment_of_a_drain_is_the_workers(
    put, reward, broker, keys, tmp_path, monkeypatch
):
    """The last score ends the wait for it, and its call fails, in one turn of the loop."""

    async def fail(*_: Any) -> Any:
        raise ZeroDivisionError("of the worker")

    waiting = note_drain(monkeypatch)
    monkeypatch.setattr(Consumer, "complete", fail)
    await put(WAITS)
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with asyncio.timeout(30), worker(broker, keys, drain_s=3600.0, **reward) as context:
            await wait_until((tmp_path / "begun").exists)
            context.stopping.set()
            # Not before: the error of a score that comes while the lane still fetches ends it anyway.
            await wait_until(waiting.is_set)
            (tmp_path / "open").touch()


SHORT = make_fault(errno.EAGAIN, "a process could not be started", "no")


async def test_a_worker_that_is_short_asks_for_nothing(
    put, reward, lanes, broker, keys, tmp_path, monkeypatch
):
    asked: list[int] = []
    complete = Consumer.complete

    async def noting(self: Any, batch: Any, key: str, ahead: int = 0) -> list[bool]:
        asked.append(ahead)
        return await complete(self, batch, key, ahead)

    monkeypatch.setattr(Consumer, "complete", noting)
    await put(*[WAITS] * 6)
    async with worker(broker, keys, **reward, max_in_flight=2) as context:
        monkeypatch.setattr(context.shortage, "_probe", lambda: SHORT)
        await wait_until(lambda: any(lane.num_held == 2 for lane in lanes))
        context.shortage.note(SHORT)
        (tmp_path / "open").touch()
        await scores(broker, keys, 2)
        await wait_until(lambda: len(asked) > 0)
    assert set(asked) == {0}


async def test_what_came_as_a_worker_became_short_is_handed_back(
    put, reward, lanes, broker, keys, tmp_path, monkeypatch
):
    asked: list[int] = []
    complete = Consumer.complete

    async def becoming_short(self: Any, batch: Any, key: str, ahead: int = 0) -> list[bool]:
        asked.append(ahead)
        (lane,) = (lane for lane in lanes if lane.consumer is self)
        # As where another sample is handed back during this call: its slot is free, and the lane waits.
        lane.context.shortage.note(SHORT)
        lane.num_held -= 1
        lane.free_slot()
        await wait_until(lambda: lane.context.shortage._trying is not None)
        lane.num_held += 1
        self.takeover.next_at = math.inf  # messages are asked for: no look comes first
        return await complete(self, batch, key, ahead)

    monkeypatch.setattr(Consumer, "complete", becoming_short)
    await put(*[WAITS] * 6)
    async with worker(broker, keys, **reward, max_in_flight=2) as context:
        monkeypatch.setattr(context.shortage, "_probe", lambda: SHORT)
        await wait_until(lambda: any(lane.num_held == 2 for lane in lanes))
        (tmp_path / "open").touch()
        await scores(broker, keys, 2)
        await wait_until(lambda: all(not lane.consumer.held for lane in lanes))
    assert max(asked) > 0, "messages came with the scores"
