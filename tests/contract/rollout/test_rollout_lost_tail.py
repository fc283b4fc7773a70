"""Redis comes back without its tail, or the run without its newest versions, and the worker lives on."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.rollout_worker import SIZE, has_samples, is_settled, issue, samples_of
from tests.support.training import lose_tail
from tests.support.waiting import wait_until
from tidemill.common.errors import LeaseLostError
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import START, entry_id_of, read_range
from tidemill.common.wire.keys import ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Trajectory


class TestLostTail:
    """Redis comes back without the last of what it held, and the worker lives on."""

    @pytest.mark.parametrize("num_kept", [0, 1, 2])
    async def test_samples_that_redis_has_lost_are_generated_again(self, make, broker, keys, num_kept):
        """Else the ticket would stay with a worker that renews it for ever and generates nothing."""
        await issue(broker, keys)
        async with make() as worker:
            worker.engine.held = {3}
            delivery = await worker.fetch()
            task = asyncio.ensure_future(worker.lane.generate(delivery))
            await wait_until(lambda: has_samples(broker, keys, 3))
            await lose_samples(broker, keys, num_kept)
            worker.engine.released.set()
            await asyncio.wait_for(task, 120)
        samples = await samples_of(broker, keys)
        assert sorted(sample.index for sample in samples) == [0, 1, 2, 3]
        assert len(worker.engine.asked) == 2 * SIZE - num_kept - 1
        assert await is_settled(broker, keys)
        assert not worker.consumer.held

    async def test_samples_are_generated_as_often_as_they_are_lost(self, make, broker, keys):
        await issue(broker, keys)
        async with make() as worker:
            publish, num_losses, one_at_a_time = worker.consumer.publish_sample, 0, asyncio.Lock()

            async def publish_and_lose(*args: Any) -> bool:
                nonlocal num_losses
                async with one_at_a_time:
                    is_complete = await publish(*args)
                    if not is_complete and num_losses < 6:
                        num_losses += 1
                        await lose_samples(broker, keys, 0)
                return is_complete

            worker.consumer.publish_sample = publish_and_lose
            await asyncio.wait_for(worker.lane.generate(await worker.fetch()), 120)
        assert sorted(sample.index for sample in await samples_of(broker, keys)) == [0, 1, 2, 3]

    async def test_a_ticket_whose_samples_are_all_there_is_acknowledged(self, make, broker, keys):
        await issue(broker, keys)
        await broker.execute(
            "HSET", keys.progress(0), "version", 0, *(x for i in range(SIZE) for x in (i, ""))
        )
        async with make() as worker:
            await asyncio.wait_for(worker.lane.generate(await worker.fetch()), 120)
            assert worker.engine.asked == []
            assert not worker.consumer.held
        assert await is_settled(broker, keys)

    async def test_a_ticket_that_is_delivered_again_to_its_own_worker_is_generated_once(
        self, make, broker, keys
    ):
        """The delivery itself was lost: what was begun under it is worth nothing."""
        await issue(broker, keys)
        async with make() as worker:
            worker.engine.held = set(range(SIZE))
            first = await worker.fetch()
            task = asyncio.ensure_future(worker.lane.generate(first))
            await wait_until(lambda: len(worker.engine.asked) == SIZE)
            await broker.execute("XACK", keys.prompts(), ROLLOUT_GROUP, first.entry_id)
            await broker.execute("XGROUP", "SETID", keys.prompts(), ROLLOUT_GROUP, "0")
            second = await worker.fetch()
            assert second.entry_id == first.entry_id
            assert first.is_lost
            again = asyncio.ensure_future(worker.lane.generate(second))
            await wait_until(lambda: len(worker.engine.asked) == 2 * SIZE)
            assert len(set(worker.engine.request_ids)) == 2 * SIZE
            worker.engine.released.set()
            await asyncio.wait_for(again, 120)
            with pytest.raises(ExceptionGroup) as lost:
                await task
        assert lost.group_contains(LeaseLostError)
        assert sorted(sample.index for sample in await samples_of(broker, keys)) == [0, 1, 2, 3]


async def reach_3(worker: Any, announce: Callable[..., Any]) -> None:
    for version in (1, 2, 3):
        await announce(version)
    await wait_until(lambda: worker.engine.version == 3)


class TestLostHistory:
    """Redis loses versions that a worker holds, and the trainer dies: the run goes on from an older one."""

    @pytest.mark.parametrize("newest", [1, 3])
    async def test_a_worker_comes_to_what_the_next_trainer_stands_at_also_if_the_number_is_the_same(
        self, make, broker, keys, announce, newest
    ):
        async with make() as worker:
            await reach_3(worker, announce)
            await lose_tail(broker, keys.weights, entry_id_of(0))
            for version in range(1, newest + 1):
                await announce(version, term=2)
            await wait_until(lambda: worker.follower._held.term == 2 and worker.engine.version == newest)
            assert worker.follower.history

    async def test_a_worker_waits_for_its_trainer_where_only_redis_has_lost_something(
        self, make, broker, keys, announce
    ):
        async with make() as worker:
            await reach_3(worker, announce)
            await lose_tail(broker, keys.weights, entry_id_of(2))
            newest = await worker.follower._newest()
            assert newest.message.version == 2
            assert not worker.follower._is_to_load(newest.message)
            await announce(3)
            await announce(4)
            await wait_until(lambda: worker.engine.version == 4)
            assert worker.follower.history == 0

    async def test_what_was_begun_with_lost_weights_is_generated_again(self, make, broker, keys, announce):
        await issue(broker, keys)
        async with make() as worker:
            await announce(3)
            await wait_until(lambda: worker.engine.version == 3)
            worker.engine.held = {1, 2}
            task = asyncio.ensure_future(worker.lane.generate(await worker.fetch()))
            await wait_until(lambda: has_samples(broker, keys, 2))
            await lose_samples(broker, keys, 0)
            await lose_tail(broker, keys.weights, START)
            await announce(1, term=2)
            await wait_until(lambda: worker.engine.version == 1)
            worker.engine.released.set()
            worker.consumer.lease_s = 0.1  # for the version that the group began with, which never comes
            await asyncio.wait_for(task, 120)
        samples = await samples_of(broker, keys)
        assert sorted(sample.index for sample in samples) == [0, 1, 2, 3]
        assert {sample.max_version for sample in samples} == {1}

    async def test_what_ends_while_other_weights_are_loaded_is_generated_again(
        self, make, broker, keys, announce
    ):
        await issue(broker, keys)
        async with make() as worker:
            await announce(3)
            await wait_until(lambda: worker.engine.version == 3)
            engine, load = worker.engine, worker.engine.load
            engine.held = set(range(SIZE))

            async def load_late(*given: Any) -> Any:
                begun, engine.released = engine.released, asyncio.Event()
                begun.set()
                await wait_until(lambda: len(engine.asked) == 2 * SIZE)
                return await load(*given)

            engine.load = load_late
            task = asyncio.ensure_future(worker.lane.generate(await worker.fetch()))
            await wait_until(lambda: len(engine.asked) == SIZE)
            await lose_tail(broker, keys.weights, START)
            await announce(1, term=2)
            await wait_until(lambda: engine.version == 1)
            engine.released.set()
            worker.consumer.lease_s = 0.1  # as above
            await asyncio.wait_for(task, 120)
        samples = await samples_of(broker, keys)
        assert {(sample.max_version, sample.index) for sample in samples} == {(1, i) for i in range(SIZE)}


async def lose_samples(broker: Broker, keys: Keys, num_kept: int, ticket: int = 0) -> None:
    """As a Redis does that comes back without its last second: samples and progress go together."""
    for entry in (await read_range(broker, keys.trajectories(), Trajectory))[num_kept:]:
        await broker.execute("XDEL", keys.trajectories(), entry.entry_id)
        await broker.execute("HDEL", keys.progress(ticket), entry.message.index)
