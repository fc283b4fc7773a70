"""The reward worker against a real Redis: one score for each trajectory, whatever is in the stream."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.rewards import beat_of, num_pending, scorer_of
from tests.support.training import messages
from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.config import RunConfig
from tidemill.common.process.activity import Activity
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Delivery, append, ensure_group, group_status, read_range
from tidemill.common.streams.consumer import Consumer
from tidemill.common.streams.entries import NOBODY
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import (
    FIRST_DEMONSTRATION,
    DeadLetter,
    Lane,
    Score,
    ScoreStatus,
    Trajectory,
)
from tidemill.services.reward.outcome import Reward, RewardOutcome
from tidemill.services.reward.rewards.groups import PostProcessing
from tidemill.services.reward.sample import RewardSample
from tidemill.services.reward.worker import RewardLane, Scorer, WorkerMetrics, serve


class GatedReward(Reward):
    """A reward whose samples wait until the test lets them go, where it is not open from the start."""

    def __init__(self, is_open: bool = False) -> None:
        self.started: Counter[tuple[int, int]] = Counter()
        self.cancelled: Counter[tuple[int, int]] = Counter()
        self.gate = asyncio.Event()
        if is_open:
            self.gate.set()

    async def score(self, sample: RewardSample) -> RewardOutcome:
        self.started[sample.key] += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled[sample.key] += 1
            raise
        return RewardOutcome(float(sample.key[0]))

    async def close(self) -> None: ...


def make_context(broker: Broker, keys: Keys, config: RunConfig, name: str = "w1") -> ServiceContext:
    return ServiceContext("reward", name, keys, config, broker, Path(), Activity("reward"))


@contextlib.asynccontextmanager
async def running(main: Awaitable[None], context: ServiceContext) -> AsyncIterator["asyncio.Task[None]"]:
    """Run a worker for the length of a block, then stop it in good order."""
    task = asyncio.ensure_future(main)
    try:
        yield task
        context.stopping.set()
        await asyncio.wait_for(task, 120)
    finally:
        task.cancel()


async def scores(broker: Broker, keys: Keys, lane: Lane = Lane.TRAIN) -> list[Score]:
    return await messages(broker, keys.scores(lane), Score)


async def dead_entries(broker: Broker, keys: Keys) -> list[DeadLetter]:
    return await messages(broker, keys.dead, DeadLetter)


def make_lane(context: ServiceContext, lane: Lane, scorer: Scorer) -> RewardLane:
    reward = context.config.reward
    counts = WorkerMetrics(context.activity, reward, scorer.reward)
    return RewardLane(context, lane, scorer, counts, PostProcessing(reward, scorer.reward))


@pytest.fixture
def start(broker: Broker, keys: Keys) -> Callable[..., Any]:
    """Start one lane of a worker with a reward of the test's own."""

    def start(scored_by: Any, name: str = "w1", lane: Lane = Lane.TRAIN, **sections: Any) -> Any:
        config = make_config(**sections)
        context = make_context(broker, keys, config, name)
        return running(make_lane(context, lane, scorer_of(scored_by, config.reward, name)).run(), context)

    return start


@pytest.fixture
def put(broker: Broker, keys: Keys) -> Callable[..., Any]:
    """Append trajectories of these tickets."""

    async def put(*tickets: int, lane: Lane = Lane.TRAIN, **fields: Any) -> None:
        await append(broker, keys.trajectories(lane), *(make_trajectory(t, **fields) for t in tickets))

    return put


async def test_every_trajectory_of_both_lanes_gets_exactly_one_score(broker: Broker, keys: Keys) -> None:
    wanted = [(ticket, index) for ticket in range(25) for index in range(4)]
    texts = {key: f"#### {(key[0] + key[1]) % 2}" for key in wanted}
    trajectories = [make_trajectory(*key, text=texts[key]) for key in wanted]
    for lane in Lane:
        await append(broker, keys.trajectories(lane), *trajectories)
    context = make_context(broker, keys, make_config(reward={"function": "gsm8k", "max_in_flight": 16}))
    async with running(serve(context), context):
        for lane in Lane:
            await wait_until(lambda lane=lane: _has(broker, keys, len(wanted), lane))
    for lane in Lane:
        published = await scores(broker, keys, lane)
        assert sorted(score.key for score in published) == wanted
        assert {score.key: score.value for score in published} == {k: float(k[0] + k[1] & 1) for k in wanted}
        assert {(score.status, score.worker, score.attempts) for score in published} == {
            (ScoreStatus.OK, "w1", 1)
        }
        assert {score.tokens_digest for score in published} == {trajectories[0].tokens_digest} != {""}
        assert await num_pending(broker, keys, lane) == 0


async def test_demonstrations_are_acknowledged_and_get_no_score(put, broker, keys):
    await put(0, FIRST_DEMONSTRATION, 1, FIRST_DEMONSTRATION + 1, FIRST_DEMONSTRATION + 2)
    context = make_context(broker, keys, make_config(reward={"function": "gsm8k"}))
    async with running(serve(context), context):
        await wait_until(lambda: _has(broker, keys, 2, Lane.TRAIN))
    assert [score.ticket for score in await scores(broker, keys)] == [0, 1]
    assert await num_pending(broker, keys) == 0


async def test_a_heartbeat_counts_what_became_of_the_trajectories(put, broker, keys):
    await put(0)
    await put(1, ground_truth="not a number")
    context = make_context(broker, keys, make_config(reward={"function": "gsm8k"}))
    async with running(serve(context), context):
        await wait_until(lambda: _has(broker, keys, 2))
        await wait_until(lambda: context.activity.state == "wait:trajectories")
        counts = beat_of(context).counts
    expected = {"in_flight": 0, "scored": 2, "failed": 1, "timeout": 0}
    assert {name: counts[name] for name in expected} == expected and counts["per_s"] > 0
    failed = next(score for score in await scores(broker, keys) if score.ticket == 1)
    assert (failed.status, failed.value) == (ScoreStatus.FAILED, None) and "ground truth" in failed.error


async def test_entries_that_cannot_be_decoded_are_dead_lettered_and_the_rest_goes_on(
    put, start, broker, keys
):
    stream = keys.trajectories()
    garbage = {b"v": b"1.0", b"p": b"\xc1 not msgpack"}
    await broker.execute("XADD", stream, "*", *[word for pair in garbage.items() for word in pair])
    await put(1)
    await broker.execute("XADD", stream, "*", "nothing", "known")
    await broker.execute("XADD", stream, "*", "v", "9.0", "p", "x")
    await put(2)
    async with start(GatedReward(is_open=True)):
        await wait_until(lambda: _has(broker, keys, 2))
        await wait_until(lambda: _are_dead(broker, keys, 3))
    dead = await dead_entries(broker, keys)
    assert [score.key for score in await scores(broker, keys)] == [(1, 0), (2, 0)]
    assert {entry.origin for entry in dead} == {"trajectories"}
    assert dead[0].fields == {"v": garbage[b"v"], "p": garbage[b"p"]}
    assert "not msgpack" in dead[0].error and "schema 9.0" in dead[2].error
    assert await num_pending(broker, keys) == 0


async def test_a_trajectory_that_killed_too_many_workers_is_dead_lettered(put, start, broker, keys):
    stream = keys.trajectories()
    await put(1, 2)
    await ensure_group(broker, stream, REWARD_GROUP)
    group = (stream, REWARD_GROUP)
    await broker.execute("XREADGROUP", "GROUP", REWARD_GROUP, "dead", "COUNT", 1, "STREAMS", stream, ">")
    first = (await read_range(broker, stream, Trajectory))[0].entry_id
    # Two workers have died with the first trajectory in hand, long ago.
    await broker.execute("XCLAIM", *group, "dead", 0, first, "IDLE", 3_600_000, "RETRYCOUNT", 2)

    async with start(GatedReward(is_open=True), streams={"max_attempts": 2, "lease_s": 2.0}):
        await wait_until(lambda: _has(broker, keys, 1))
        (entry,) = await wait_until(lambda: dead_entries(broker, keys))
    assert [score.key for score in await scores(broker, keys)] == [(2, 0)]
    assert (entry.ticket, entry.index, entry.attempts) == (1, 0, 2)
    assert "delivered 2 times" in entry.error
    assert await num_pending(broker, keys) == 0


async def test_a_worker_that_lost_its_lease_stops_and_publishes_nothing(put, start, broker, keys):
    reward = GatedReward()
    await put(1)
    async with start(reward, streams={"lease_s": 0.3}):
        await wait_until(lambda: reward.started[1, 0])
        await _steal_all(broker, keys)
        await wait_until(lambda: reward.cancelled[1, 0])
        reward.gate.set()
    assert await scores(broker, keys) == []
    assert await num_pending(broker, keys) == 1  # the thief's


@pytest.mark.parametrize("is_early", [False, True])
async def test_a_sample_that_is_cancelled_gives_its_slot_back(put, broker, keys, is_early):
    """Also one that is cancelled before its task has begun."""
    reward = GatedReward()
    config = make_config(reward={"max_in_flight": 1})
    context = make_context(broker, keys, config)
    lane = make_lane(context, Lane.TRAIN, scorer_of(reward, config.reward))
    start = lane.start

    def start_and_lose(delivery: Delivery[Trajectory]) -> None:
        start(delivery)
        if is_early and delivery.message.ticket == 1:
            lane.consumer._lose(delivery.entry_id)

    lane.start = start_and_lose  # type: ignore[method-assign]
    await put(1)
    async with running(lane.run(), context):
        if not is_early:
            await wait_until(lambda: reward.started[1, 0])
            await _steal_all(broker, keys)
            await lane.consumer.renew()
            await wait_until(lambda: reward.cancelled[1, 0])
        reward.gate.set()
        await put(2)
        await wait_until(lambda: _has(broker, keys, 1))
        await wait_until(lambda: lane.num_free == 1)
        assert (lane.num_held, lane.counts._in_flight[Lane.TRAIN]) == (0, 0)
        assert lane.quarantine._num_running == 0, "suspects would wait for ever until nothing else runs"
    assert [score.key for score in await scores(broker, keys)] == [(2, 0)]


async def test_a_lease_lost_just_before_publishing_publishes_nothing(put, start, broker, keys, monkeypatch):
    reward = GatedReward()
    counted = []
    monkeypatch.setattr(WorkerMetrics, "published", lambda _, lane, score: counted.append(score.key))
    await put(1)
    async with start(reward, streams={"lease_s": 60.0}, reward={"max_in_flight": 1}):
        await wait_until(lambda: reward.started[1, 0])
        await _steal_all(broker, keys)  # no renewal is due that could notice
        reward.gate.set()
        await put(2)
        await wait_until(lambda: _has(broker, keys, 1))  # and the slot is free again
    assert [score.key for score in await scores(broker, keys)] == counted == [(2, 0)]


async def test_no_more_is_fetched_than_there_are_free_slots(put, start, broker, keys):
    reward = GatedReward()
    open_reward = GatedReward(is_open=True)
    await put(*range(10))
    async with start(reward, reward={"max_in_flight": 3}):
        await wait_until(lambda: len(reward.started) == 3)
        assert await num_pending(broker, keys) == 3
        async with start(open_reward, name="w2"):  # what the first has no slots for is free for a second
            await wait_until(lambda: len(open_reward.started) == 7)
        reward.gate.set()
        await wait_until(lambda: _has(broker, keys, 10))
    assert not set(reward.started) & set(open_reward.started)


async def test_evaluation_is_scored_while_every_training_slot_is_taken(put, broker, keys):
    held = GatedReward()
    config = make_config(reward={"max_in_flight": 2})
    context = make_context(broker, keys, config)

    class TrainingHangs(GatedReward):
        async def score(self, sample: RewardSample) -> RewardOutcome:
            return RewardOutcome(1.0) if sample.is_evaluation else await held.score(sample)

    scorer = scorer_of(TrainingHangs(), config.reward)
    await put(*range(5))
    lanes = [make_lane(context, lane, scorer).run() for lane in Lane]
    async with running(asyncio.gather(*lanes), context):  # type: ignore[arg-type]
        await wait_until(lambda: len(held.started) == 2)
        await put(*range(5), lane=Lane.EVAL)
        await wait_until(lambda: _has(broker, keys, 5, Lane.EVAL))
        assert await scores(broker, keys) == []
        held.gate.set()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Of each call that publishes: how many scores, how many samples it asks for, how many it then holds."""
    calls: list[tuple[int, int, int]] = []
    complete = Consumer.complete

    async def noting(self: Any, results: Any, out_key: str, ahead: int) -> list[bool]:
        flags = await complete(self, results, out_key, ahead)
        calls.append((len(results), ahead, len(self.held)))
        return flags

    monkeypatch.setattr(Consumer, "complete", noting)
    return calls


async def test_scores_that_finish_together_are_published_in_few_calls(put, start, calls, broker, keys):
    reward = GatedReward()
    await put(*range(50))
    async with start(reward):
        await wait_until(lambda: len(reward.started) == 50)
        reward.gate.set()
        await wait_until(lambda: _has(broker, keys, 50))
    assert sum(num_scores for num_scores, _, _ in calls) == 50 and len(calls) <= 3
    assert {ahead for _, ahead, _ in calls} == {0}, "there are free slots: the lane asks anyway"


async def test_a_full_lane_gets_its_next_samples_with_the_acknowledgement(put, start, calls, broker, keys):
    reward = GatedReward()
    await put(*range(7))
    async with start(reward, reward={"max_in_flight": 3}):
        await wait_until(lambda: len(reward.started) == 3)
        reward.gate.set()
        await wait_until(lambda: _has(broker, keys, 7))
    assert calls[0][1:] == (3, 3), "the freed slots are taken already"
    assert sorted(score.key[0] for score in await scores(broker, keys)) == list(range(7))
    assert await num_pending(broker, keys) == 0


async def test_stopping_hands_back_what_does_not_finish_in_time(put, start, broker, keys):
    stuck = GatedReward()
    await put(*range(3))
    async with start(stuck, streams={"lease_s": 1.0, "drain_s": 0.05}):
        await wait_until(lambda: len(stuck.started) == 3)
    assert stuck.cancelled.total() == 3
    *_, holders = await broker.execute("XPENDING", keys.trajectories(), REWARD_GROUP)
    assert [name.decode() for name, _ in holders] == [NOBODY], "nobody waits for a lease to end"

    async with start(GatedReward(is_open=True), name="w2", streams={"lease_s": 1.0, "max_attempts": 1}):
        await wait_until(lambda: _has(broker, keys, 3))  # at once, and the hand-back was no failed attempt
    assert await dead_entries(broker, keys) == []


async def test_stopping_finishes_what_does_and_leaves_the_group(put, start, broker, keys, monkeypatch):
    # Scores are still gathered when the lane no longer fetches: it must not leave before they are published.
    monkeypatch.setattr("tidemill.services.reward.worker.GATHER_S", 1.0)
    reward = GatedReward()
    await put(*range(3))
    async with start(reward) as worker:
        await wait_until(lambda: len(reward.started) == 3)
        asyncio.get_running_loop().call_later(0.1, reward.gate.set)
    assert worker.done() and len(await scores(broker, keys)) == 3
    status = await group_status(broker, keys.trajectories(), REWARD_GROUP)
    assert status is not None and (status.pending, status.consumers) == (0, 0)


async def test_an_error_nobody_expected_ends_the_worker_instead_of_one_lane(put, broker, keys, monkeypatch):
    async def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Scorer, "score", broken)
    await put(1)
    context = make_context(broker, keys, make_config(reward={"function": "gsm8k"}))
    with pytest.raises(ExceptionGroup):
        await asyncio.wait_for(serve(context), 120)


async def _has(broker: Broker, keys: Keys, count: int, lane: Lane = Lane.TRAIN) -> bool:
    return len(await scores(broker, keys, lane)) >= count


async def _are_dead(broker: Broker, keys: Keys, count: int) -> bool:
    return len(await dead_entries(broker, keys)) >= count


async def _steal_all(broker: Broker, keys: Keys) -> None:
    """Have another worker take over whatever is pending, as after a lease that ran out."""
    reply = await broker.execute("XPENDING", keys.trajectories(), REWARD_GROUP, "-", "+", 100)
    ids = [row[0] for row in reply]
    await broker.execute("XCLAIM", keys.trajectories(), REWARD_GROUP, "thief", 0, *ids, "JUSTID")
