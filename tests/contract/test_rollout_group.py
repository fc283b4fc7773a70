"""Groups between real streams and an engine that the test controls: nothing twice, nothing too early."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from common.activity import Activity
from common.broker import Broker
from common.errors import LeaseLostError
from common.keys import ROLLOUT_GROUP, Keys
from common.messages import DeadLetter, Lane, Ticket, Trajectory
from common.service import ServiceContext
from common.streams import (
    START,
    Consumer,
    Delivery,
    append_numbered,
    entry_id_of,
    group_status,
    read_range,
)
from services.rollout.engine import Generation, GenerationRequest
from services.rollout.engines.simulated import SimulatedEngine
from services.rollout.follower import WeightFollower
from services.rollout.group import GroupGenerator
from services.rollout.worker import RolloutWorker
from services.trainer.simulated_policy import SimulatedPolicy
from services.trainer.weights import WeightStore
from tests.training import lose_tail, make_parts, messages, trainer_config
from tests.waiting import wait_until

SIZE = 4


class GatedEngine(SimulatedEngine):
    """Notes what it is asked for; indices in `held` wait until the test lets them go."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.asked: list[int] = []
        self.request_ids: list[str] = []
        self.held: set[int] = set()
        self.refused: set[int] = set()
        self.released = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> Generation:
        index = int(request.request_id.split("-")[2])
        self.asked.append(index)
        self.request_ids.append(request.request_id)
        if index in self.refused:
            raise ValueError("the prompt is too long")
        if index in self.held:
            await self.released.wait()
        return await super().generate(request)


class Worker:
    """One rollout worker's parts, without its loop."""

    def __init__(self, broker: Broker, keys: Keys, folder: Path, name: str, **config: Any) -> None:
        settings = {
            "group_size": SIZE,
            "rollout__simulated": {"tokens": 4},
            "streams__lease_s": 60.0,
        } | config
        self.config = trainer_config(**settings)
        self.context = ServiceContext("rollout", name, keys, self.config, broker, folder, Activity("rollout"))
        self.engine = GatedEngine(self.config)
        self.follower = WeightFollower(self.context, self.engine)
        self.consumer: Consumer[Ticket] = Consumer(
            broker, keys.prompts(), ROLLOUT_GROUP, name, Ticket, lease_s=60.0, dead_key=keys.dead
        )
        self.generator = GroupGenerator(
            broker, keys, Lane.TRAIN, self.consumer, self.engine, self.follower, name
        )

    async def fetch(self) -> Delivery[Ticket]:
        (delivery,) = await self.consumer.fetch(1, 1.0)
        assert isinstance(delivery, Delivery)
        return delivery


@pytest.fixture
def make(broker: Broker, keys: Keys, tmp_path: Path) -> Callable[..., Any]:
    """Start a worker, its follower included, for the length of a block."""

    @contextlib.asynccontextmanager
    async def make(name: str = "w1", **config: Any) -> AsyncIterator[Worker]:
        worker = Worker(broker, keys, tmp_path, name, **config)
        await worker.engine.start()
        following = asyncio.ensure_future(worker.follower.run())
        try:
            async with worker.consumer:
                yield worker
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    return make


@pytest.fixture
def announce(broker: Broker, keys: Keys, tmp_path: Path) -> Callable[..., Any]:
    async def announce(version: int, term: int = 1) -> None:
        policy = SimulatedPolicy(trainer_config())
        manifest = await asyncio.to_thread(WeightStore(tmp_path).write, version, policy)
        manifest = manifest.model_copy(update={"term": term, "digest": f"{term:032x}"})
        await append_numbered(broker, keys.weights, [(version, manifest)])

    return announce


async def issue(broker: Broker, keys: Keys, version: int = 0) -> None:
    """Tickets of all steps up to `version + 1`, two groups each."""
    scheduler, _ = make_parts(broker, keys, trainer_config(group_size=SIZE))
    await scheduler.admit(version)


async def samples_of(broker: Broker, keys: Keys, ticket: int = 0) -> list[Trajectory]:
    found = await messages(broker, keys.trajectories(), Trajectory)
    return [sample for sample in found if sample.ticket == ticket]


async def take_over(
    broker: Broker, keys: Keys, delivery: Delivery[Ticket], worker: Worker
) -> Delivery[Ticket]:
    """Give a held ticket to another worker, as XAUTOCLAIM does when the lease has expired."""
    name = worker.consumer.name
    await broker.execute("XCLAIM", keys.prompts(), ROLLOUT_GROUP, name, 0, delivery.entry_id)
    taken = Delivery(delivery.entry_id, delivery.fields, delivery.message, delivery.attempts + 1)
    worker.consumer.held[delivery.entry_id] = taken
    return taken


class TestOneWorker:
    async def test_a_group_is_published_whole_and_its_ticket_acknowledged(self, make, broker, keys):
        await issue(broker, keys)
        async with make() as worker:
            delivery = await worker.fetch()
            await worker.generator.generate(delivery)
        samples = await samples_of(broker, keys)
        ticket = delivery.message
        assert sorted(sample.index for sample in samples) == [0, 1, 2, 3]
        for sample in samples:
            assert (sample.step, sample.group_size, sample.worker) == (0, SIZE, "w1")
            assert sample.spans == ((0, 0),)
            assert sample.prompt_ids.tolist() == ticket.prompt_ids.tolist()
            assert sample.ground_truth == ticket.ground_truth
        assert (await group_status(broker, keys.prompts(), ROLLOUT_GROUP)).pending == 0
        assert await broker.execute("EXISTS", keys.progress(0)) == 0

    async def test_each_sample_is_published_when_it_is_finished(self, make, broker, keys):
        await issue(broker, keys)
        async with make() as worker:
            worker.engine.held = {1}
            task = asyncio.ensure_future(worker.generator.generate(await worker.fetch()))
            await wait_until(lambda: _has_samples(broker, keys, 3))
            assert (await group_status(broker, keys.prompts(), ROLLOUT_GROUP)).pending == 1
            worker.engine.released.set()
            await task
        assert [sample.index for sample in await samples_of(broker, keys)][-1] == 1

    async def test_nothing_starts_before_the_engine_holds_the_min_version(self, make, broker, keys, announce):
        await issue(broker, keys, version=2)  # tickets of steps 0 to 3: the last is for min_version 2
        async with make() as worker:
            deliveries = [await worker.fetch() for _ in range(8)]
            assert deliveries[-1].message.min_version == 2
            task = asyncio.ensure_future(worker.generator.generate(deliveries[-1]))
            await announce(1)
            await wait_until(lambda: worker.engine.version == 1)
            assert worker.engine.asked == []
            await announce(2)
            await task
        samples = await samples_of(broker, keys, deliveries[-1].message.ticket)
        assert {sample.min_version for sample in samples} == {2}
        assert len(samples) == SIZE


class TestTakeover:
    async def test_only_the_missing_indices_are_generated(self, make, broker, keys):
        await issue(broker, keys)
        async with make("w1") as first, make("w2") as second:
            first.engine.held = {1, 3}
            delivery = await first.fetch()
            task = asyncio.ensure_future(first.generator.generate(delivery))
            await wait_until(lambda: _has_samples(broker, keys, 2))
            taken = await take_over(broker, keys, delivery, second)
            await second.generator.generate(taken)
            assert sorted(second.engine.asked) == [1, 3]
            first.engine.released.set()
            with pytest.raises(ExceptionGroup) as lost:
                await task
        assert lost.group_contains(LeaseLostError)
        samples = await samples_of(broker, keys)
        assert sorted((sample.index, sample.worker) for sample in samples) == [
            (0, "w1"), (1, "w2"), (2, "w1"), (3, "w2"),
        ]  # fmt: skip
        assert await broker.execute("EXISTS", keys.progress(0)) == 0

    async def test_the_rest_of_a_group_is_no_older_than_its_start(self, make, broker, keys, announce):
        await issue(broker, keys)
        await broker.execute("HSET", keys.progress(0), "version", 2, "0", "")
        async with make() as worker:
            task = asyncio.ensure_future(worker.generator.generate(await worker.fetch()))
            await announce(1)
            await wait_until(lambda: worker.engine.version == 1)
            assert worker.engine.asked == []
            await announce(2)
            await task
        samples = await samples_of(broker, keys)
        assert [(s.index, s.min_version) for s in sorted(samples, key=lambda s: s.index)] == [
            (1, 2), (2, 2), (3, 2),
        ]  # fmt: skip

    async def test_the_version_of_the_start_is_known_before_the_first_token(
        self, make, broker, keys, announce
    ):
        await issue(broker, keys)
        await announce(3)
        async with make() as worker:
            await wait_until(lambda: worker.engine.version == 3)
            worker.engine.held = set(range(SIZE))
            task = asyncio.ensure_future(worker.generator.generate(await worker.fetch()))
            await wait_until(lambda: worker.engine.asked)
            assert await broker.execute("HGET", keys.progress(0), "version") == b"3"
            worker.engine.released.set()
            await task

    async def test_a_worker_that_comes_late_does_not_make_the_start_look_newer(
        self, make, broker, keys, monkeypatch
    ):
        """It read the progress, fell asleep, and lost the group to one that started at version 0."""
        await issue(broker, keys)
        async with make() as worker:
            worker.engine.held = set(range(SIZE))

            async def reach(version: int) -> int:
                await broker.execute("HSETNX", keys.progress(0), "version", 0)
                return 5

            monkeypatch.setattr(worker.follower, "reach", reach)
            task = asyncio.ensure_future(worker.generator.generate(await worker.fetch()))
            await wait_until(lambda: worker.engine.asked)
            assert await broker.execute("HGET", keys.progress(0), "version") == b"0"
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class TestLostTail:
    """Redis comes back without the last of what it held, and the worker lives on."""

    @pytest.mark.parametrize("num_kept", [0, 1, 2])
    async def test_samples_that_redis_has_lost_are_generated_again(self, make, broker, keys, num_kept):
        """Else the ticket would stay with a worker that renews it for ever and generates nothing."""
        await issue(broker, keys)
        async with make() as worker:
            worker.engine.held = {3}
            delivery = await worker.fetch()
            task = asyncio.ensure_future(worker.generator.generate(delivery))
            await wait_until(lambda: _has_samples(broker, keys, 3))
            await lose_samples(broker, keys, num_kept)
            worker.engine.released.set()
            await asyncio.wait_for(task, 20)
        samples = await samples_of(broker, keys)
        assert sorted(sample.index for sample in samples) == [0, 1, 2, 3]
        assert len(worker.engine.asked) == 2 * SIZE - num_kept - 1
        assert (await group_status(broker, keys.prompts(), ROLLOUT_GROUP)).pending == 0
        assert await broker.execute("EXISTS", keys.progress(0)) == 0
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
            await asyncio.wait_for(worker.generator.generate(await worker.fetch()), 20)
        assert sorted(sample.index for sample in await samples_of(broker, keys)) == [0, 1, 2, 3]

    async def test_a_ticket_whose_samples_are_all_there_is_acknowledged(self, make, broker, keys):
        await issue(broker, keys)
        await broker.execute("HSET", keys.progress(0), "version", 0, *(x for i in range(SIZE) for x in (i, "")))
        async with make() as worker:
            await asyncio.wait_for(worker.generator.generate(await worker.fetch()), 20)
            assert worker.engine.asked == []
            assert not worker.consumer.held
        assert (await group_status(broker, keys.prompts(), ROLLOUT_GROUP)).pending == 0
        assert await broker.execute("EXISTS", keys.progress(0)) == 0

    async def test_a_ticket_that_is_delivered_again_to_its_own_worker_is_generated_once(
        self, make, broker, keys
    ):
        """The delivery itself was lost: what was begun under it is another worker's, which happens to be us."""
        await issue(broker, keys)
        async with make() as worker:
            worker.engine.held = set(range(SIZE))
            first = await worker.fetch()
            task = asyncio.ensure_future(worker.generator.generate(first))
            await wait_until(lambda: len(worker.engine.asked) == SIZE)
            await broker.execute("XACK", keys.prompts(), ROLLOUT_GROUP, first.entry_id)
            await broker.execute("XGROUP", "SETID", keys.prompts(), ROLLOUT_GROUP, "0")
            second = await worker.fetch()
            assert second.entry_id == first.entry_id
            assert first.lost.is_set()
            again = asyncio.ensure_future(worker.generator.generate(second))
            await wait_until(lambda: len(worker.engine.asked) == 2 * SIZE)
            assert len(set(worker.engine.request_ids)) == 2 * SIZE
            worker.engine.released.set()
            await asyncio.wait_for(again, 20)
            with pytest.raises(ExceptionGroup) as lost:
                await task
        assert lost.group_contains(LeaseLostError)
        assert sorted(sample.index for sample in await samples_of(broker, keys)) == [0, 1, 2, 3]


class TestLostHistory:
    """Redis loses versions that a worker holds, and the trainer dies: the run goes on from an older one."""

    async def test_a_worker_comes_back_to_the_version_that_the_next_trainer_stands_at(
        self, make, broker, keys, announce
    ):
        async with make() as worker:
            for version in (1, 2, 3):
                await announce(version)
            await wait_until(lambda: worker.engine.version == 3)
            await lose_tail(broker, keys.weights, entry_id_of(0))
            await announce(1, term=2)
            await wait_until(lambda: worker.engine.version == 1)

    async def test_a_version_of_the_same_number_is_loaded_again(self, make, broker, keys, announce):
        async with make() as worker:
            for version in (1, 2, 3):
                await announce(version)
            await wait_until(lambda: worker.engine.version == 3)
            await lose_tail(broker, keys.weights, entry_id_of(0))
            for version in (1, 2, 3):
                await announce(version, term=2)
            await wait_until(lambda: worker.follower.history)
            await wait_until(lambda: worker.follower._held.term == 2)
            assert worker.engine.version == 3

    async def test_a_worker_waits_for_its_trainer_where_only_redis_has_lost_something(
        self, make, broker, keys, announce
    ):
        async with make() as worker:
            for version in (1, 2, 3):
                await announce(version)
            await wait_until(lambda: worker.engine.version == 3)
            await lose_tail(broker, keys.weights, entry_id_of(2))
            newest = await worker.follower._newest()
            assert newest.message.version == 2
            assert not worker.follower._is_news(newest.message)
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
            task = asyncio.ensure_future(worker.generator.generate(await worker.fetch()))
            await wait_until(lambda: _has_samples(broker, keys, 2))
            await lose_samples(broker, keys, 0)
            await lose_tail(broker, keys.weights, START)
            await announce(1, term=2)
            await wait_until(lambda: worker.engine.version == 1)
            worker.engine.released.set()
            worker.consumer.lease_s = 0.1  # for the version that the group began with, which never comes
            await asyncio.wait_for(task, 20)
        samples = await samples_of(broker, keys)
        assert sorted(sample.index for sample in samples) == [0, 1, 2, 3]
        assert {sample.max_version for sample in samples} == {1}


async def lose_samples(broker: Broker, keys: Keys, num_kept: int, ticket: int = 0) -> None:
    """As a Redis does that comes back without its last second: samples and progress go together."""
    for entry in (await read_range(broker, keys.trajectories(), Trajectory))[num_kept:]:
        await broker.execute("XDEL", keys.trajectories(), entry.entry_id)
        await broker.execute("HDEL", keys.progress(ticket), entry.message.index)


class TestWorkerLoop:
    @contextlib.asynccontextmanager
    async def running(self, worker: Worker) -> AsyncIterator[RolloutWorker]:
        loop = RolloutWorker(worker.context, Lane.TRAIN, worker.engine, worker.follower)
        task = asyncio.ensure_future(loop.run())
        try:
            yield loop
            worker.context.stopping.set()
            await asyncio.wait_for(task, 20)
        finally:
            task.cancel()

    async def test_a_group_that_the_engine_refuses_is_buried_and_leaves_nothing(self, make, broker, keys):
        await issue(broker, keys)
        async with make() as worker:
            worker.engine.refused = {2}
            async with self.running(worker):
                await wait_until(lambda: _has_length(broker, keys.dead, 4))
        letters = await messages(broker, keys.dead, DeadLetter)
        assert sorted(letter.ticket for letter in letters) == [0, 1, 2, 3]
        assert {(letter.origin, letter.error, letter.attempts) for letter in letters} == {
            ("prompts", "ValueError: the prompt is too long", 1)
        }
        assert (await group_status(broker, keys.prompts(), ROLLOUT_GROUP)).pending == 0
        for ticket in range(4):
            assert await broker.execute("EXISTS", keys.progress(ticket)) == 0

    async def test_a_ticket_delivered_too_often_is_buried_unopened(self, make, broker, keys):
        await issue(broker, keys)
        async with make(streams__max_attempts=1) as worker:
            delivery = await worker.fetch()
            args = (keys.prompts(), ROLLOUT_GROUP, "gone", 0, delivery.entry_id, "IDLE", 10**6)
            await broker.execute("XCLAIM", *args)
            async with self.running(worker):
                await wait_until(lambda: _has_length(broker, keys.dead, 1))
                await wait_until(lambda: _has_samples(broker, keys, 3 * SIZE, None))
        (letter,) = await messages(broker, keys.dead, DeadLetter)
        assert (letter.ticket, letter.fields) == (0, {k.decode(): v for k, v in delivery.fields.items()})
        assert "given up after" in letter.error

    async def test_what_arrives_while_stopping_is_handed_back_at_once(self, make, broker, keys, monkeypatch):
        """A read that was broken off by the stop would leave its tickets pending for a whole lease."""
        await issue(broker, keys)
        execute = broker.execute
        async with make("w1") as first, make("w2") as second:

            async def stop_while_reading(*command: Any) -> Any:
                reply = await execute(*command)
                if command[0] == "XREADGROUP" and reply:
                    first.context.stopping.set()
                    for _ in range(20):
                        await asyncio.sleep(0)
                return reply

            monkeypatch.setattr(broker, "execute", stop_while_reading)
            async with self.running(first):
                await first.context.stopping.wait()
            monkeypatch.undo()
            assert first.engine.asked == []
            (taken,) = await second.consumer.fetch(10, 0.0)
            assert taken.message.ticket == 0

    async def test_running_groups_are_finished_before_the_worker_leaves(self, make, broker, keys):
        await issue(broker, keys)
        async with make() as worker:
            worker.engine.held = {0}
            async with self.running(worker) as loop:
                await wait_until(lambda: len(loop.groups) == 4)
                await wait_until(lambda: _has_samples(broker, keys, 4 * (SIZE - 1), None))
                worker.context.stopping.set()
                worker.engine.released.set()
        assert len(await messages(broker, keys.trajectories(), Trajectory)) == 4 * SIZE
        status = await group_status(broker, keys.prompts(), ROLLOUT_GROUP)
        assert status.pending == 0


async def _has_samples(broker: Broker, keys: Keys, count: int, ticket: int | None = 0) -> bool:
    found = await messages(broker, keys.trajectories(), Trajectory)
    return sum(ticket is None or sample.ticket == ticket for sample in found) == count


async def _has_length(broker: Broker, key: str, count: int) -> bool:
    return int(await broker.execute("XLEN", key)) == count
