"""Groups between real streams and an engine that the test controls: nothing twice, nothing too early; also
where Redis comes back without its tail, or the run without its newest versions."""

import asyncio
import contextlib
import math
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.rollout_worker import SIZE, Worker, has_samples, is_settled, issue, samples_of, take_over
from tests.support.training import lose_tail, messages
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.errors import ConfigError, EnvironmentFaultError, LeaseLostError
from tidemill.common.redis.broker import Broker
from tidemill.common.store import ClaimStore
from tidemill.common.streams import START, entry_id_of, read_range
from tidemill.common.wire.choices import ROUTES, ROUTES_FAULT, Rows
from tidemill.common.wire.keys import ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import LOGPROBS_FAULT, DeadLetter, Trajectory, fault_of
from tidemill.services.rollout.engines.engine import EngineReport, Generation, GenerationRequest
from tidemill.services.rollout.sessions.parts import new_play
from tidemill.services.rollout.sessions.player import SingleTurn
from tidemill.services.rollout.worker import RolloutWorker


class TestOneWorker:
    async def test_a_group_is_published_whole_and_its_ticket_acknowledged(self, make, broker, keys):
        await issue(broker, keys)
        async with make() as worker:
            delivery = await worker.fetch()
            await worker.lane.generate(delivery)
        samples = await samples_of(broker, keys)
        ticket = delivery.message
        assert sorted(sample.index for sample in samples) == [0, 1, 2, 3]
        for sample in samples:
            assert (sample.step, sample.group_size, sample.worker) == (0, SIZE, "w1")
            assert sample.spans == ((0, 0),)
            assert sample.prompt_ids.tolist() == ticket.prompt_ids.tolist()
            assert sample.ground_truth == ticket.ground_truth
        assert await is_settled(broker, keys)

    async def test_a_sample_that_the_claim_store_does_not_take_goes_through_the_stream(
        self, make, broker, keys, tmp_path
    ):
        (tmp_path / "run").write_text("a file where the run's folder should be")
        broker.claims = ClaimStore(tmp_path / "run", 1)
        await issue(broker, keys)
        async with make() as worker:
            await worker.lane.generate(await worker.fetch())
        samples = await samples_of(broker, keys)
        assert [sample.claim for sample in samples] == [None] * SIZE and all(
            len(sample.completion_ids) for sample in samples
        )

    async def test_choices_wait_for_a_store_that_takes_nothing_and_never_go_through_the_stream(
        self, make, broker, keys, tmp_path, capfd
    ):
        (tmp_path / "run").write_text("a file where the run's folder should be")
        store = ClaimStore(tmp_path / "run")
        broker.claims = store
        await issue(broker, keys, rollout__sampling={"max_tokens": 8, "top_k": 2})
        async with make() as worker:
            task = asyncio.ensure_future(worker.lane.generate(await worker.fetch()))
            await wait_until(lambda: "waiting for the store of choices" in capfd.readouterr().out)
            assert not await samples_of(broker, keys)
            (tmp_path / "run").unlink()
            (tmp_path / "run").mkdir()
            await task
        store.reads_choices = False
        samples = await samples_of(broker, keys)
        assert len(samples) == SIZE and all(sample.lacks_choices for sample in samples)
        store.reads_choices = True
        for sample in map(store.resolve, samples):
            kept = sample.choices.rows["kept"]
            assert [ids[0] for ids in kept.values.reshape(-1, 2)] == sample.completion_ids.tolist()
            assert sample.logprobs.tolist() == pytest.approx([-math.log(2.0)] * len(kept))

    async def test_a_sample_whose_routes_no_router_chose_is_published_as_failed(
        self, make, broker, keys, tmp_path
    ):
        store = ClaimStore(tmp_path)
        broker.claims = store
        await issue(broker, keys)
        async with make() as worker:
            generate = worker.engine.generate

            async def with_routes(request: GenerationRequest) -> Generation:
                """As an engine that records no experts for the last token of sample 2."""
                generation = await generate(request)
                num_rows = len(request.prompt_ids) + len(generation.token_ids) - 1
                experts = np.tile(np.array([[[3, 1]]], dtype=np.uint8), (num_rows, 2, 1))
                if request.request_id.startswith("train-0-2"):
                    experts[-1] = 0
                return replace(generation, choices={ROUTES: Rows(experts)})

            worker.engine.generate = with_routes
            await worker.lane.generate(await worker.fetch())
        samples = {sample.index: sample for sample in await samples_of(broker, keys)}
        assert len(samples) == SIZE
        assert [index for index, sample in samples.items() if sample.fault] == [2]
        assert samples[2].fault.startswith(ROUTES_FAULT) and samples[2].choices is None
        store.reads_choices = True
        assert ROUTES in store.resolve(samples[1]).choices.rows
        assert await is_settled(broker, keys)

    async def test_a_sample_whose_logprobs_are_nan_is_published_as_failed(self, make, broker, keys):
        await issue(broker, keys)
        async with make() as worker:
            generate = worker.engine.generate

            async def with_nan(request: GenerationRequest) -> Generation:
                generation = await generate(request)
                if request.request_id.startswith("train-0-1"):
                    generation.logprobs[-1] = math.nan
                return generation

            worker.engine.generate = with_nan
            await worker.lane.generate(await worker.fetch())
        faults = {sample.index: sample.fault for sample in await samples_of(broker, keys)}
        assert [index for index, fault in sorted(faults.items()) if fault] == [1]
        assert faults[1].startswith(LOGPROBS_FAULT)
        assert await is_settled(broker, keys)

    async def test_a_baseline_is_generated_greedily_and_says_so(self, make, broker, keys):
        await issue(broker, keys)
        async with make(algorithm={"advantage": "remax"}) as worker:
            await worker.lane.generate(await worker.fetch())
        assert worker.engine.temperatures == {0: 0.0, 1: 1.0, 2: 1.0, 3: 1.0}
        greedy = {sample.index: sample.is_greedy for sample in await samples_of(broker, keys)}
        assert greedy == {0: True, 1: False, 2: False, 3: False}

    async def test_nothing_starts_before_the_engine_holds_the_min_version(self, make, broker, keys, announce):
        await issue(broker, keys, version=2)  # tickets of steps 0 to 3: the last is for min_version 2
        async with make() as worker:
            deliveries = [await worker.fetch() for _ in range(8)]
            assert deliveries[-1].message.min_version == 2
            task = asyncio.ensure_future(worker.lane.generate(deliveries[-1]))
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
            task = asyncio.ensure_future(first.lane.generate(delivery))
            await wait_until(lambda: has_samples(broker, keys, 2))
            redelivered = await take_over(broker, keys, delivery, second)
            await second.lane.generate(redelivered)
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
            task = asyncio.ensure_future(worker.lane.generate(await worker.fetch()))
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
            task = asyncio.ensure_future(worker.lane.generate(await worker.fetch()))
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
            task = asyncio.ensure_future(worker.lane.generate(await worker.fetch()))
            await wait_until(lambda: worker.engine.asked)
            assert await broker.execute("HGET", keys.progress(0), "version") == b"0"
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def test_a_worker_that_thaws_after_its_group_is_done_leaves_nothing(
        self, make, broker, keys, monkeypatch
    ):
        """It read the progress, was frozen, and the group was generated and settled by another one."""
        await issue(broker, keys)
        async with make("w1") as frozen, make("w2") as running:
            delivery = await frozen.fetch()

            async def reach(version: int) -> int:
                await running.lane.generate(await take_over(broker, keys, delivery, running))
                assert await broker.execute("EXISTS", keys.progress(0)) == 0
                return version

            monkeypatch.setattr(frozen.follower, "reach", reach)
            with pytest.raises(LeaseLostError):
                await frozen.lane.generate(delivery)
        assert frozen.engine.asked == []
        assert await broker.execute("EXISTS", keys.progress(0)) == 0

    async def test_deliveries_do_not_count_where_samples_were_published(self, make, broker, keys):
        """A node that is taken away again and again: each worker publishes one sample, and is killed."""
        await issue(broker, keys)
        async with make("w0", streams__max_attempts=2) as worker:
            delivery = await worker.fetch()
            for index in range(SIZE - 1):
                sample = make_trajectory(0, index, group_size=SIZE)
                await worker.consumer.publish_sample(delivery, keys.trajectories(), keys.progress(0), sample)
                delivery = await take_over(broker, keys, delivery, worker)
                assert delivery.attempts == 1
            delivery = await take_over(broker, keys, delivery, worker)
            assert delivery.attempts == 2


class TestWorkerLoop:
    @contextlib.asynccontextmanager
    async def running(self, worker: Worker) -> AsyncIterator[RolloutWorker]:
        loop = worker.new_lane()
        task = asyncio.ensure_future(loop.run())
        try:
            yield loop
            worker.context.stopping.set()
            await asyncio.wait_for(task, 120)
        finally:
            task.cancel()

    async def test_a_group_that_the_engine_refuses_is_dead_lettered_and_leaves_nothing(
        self, make, broker, keys
    ):
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
        assert all([await is_settled(broker, keys, ticket) for ticket in range(4)])

    async def test_a_ticket_delivered_too_often_is_dead_lettered_unopened(self, make, broker, keys):
        await issue(broker, keys)
        async with make(streams__max_attempts=1, streams__lease_s=2.0) as worker:
            delivery = await worker.fetch()
            args = (keys.prompts(), ROLLOUT_GROUP, "gone", 0, delivery.entry_id, "IDLE", 10**6)
            await broker.execute("XCLAIM", *args)
            async with self.running(worker):
                await wait_until(lambda: _has_length(broker, keys.dead, 1))
                await wait_until(lambda: has_samples(broker, keys, 3 * SIZE, None))
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
            (redelivered,) = await second.consumer.fetch(10, 0.0)
            assert redelivered.message.ticket == 0

    async def test_while_requests_wait_in_the_engine_groups_that_end_are_not_replaced(
        self, make, broker, keys, monkeypatch
    ):
        await issue(broker, keys)
        monkeypatch.setattr("tidemill.services.rollout.worker.START", 3)
        async with make(rollout__max_groups_in_flight="auto") as worker:
            assert worker.lane.num_free == 64, "an engine that reports nothing"
            worker.engine.is_reporting = True
            worker.engine.held = {1, 2, 3}
            async with self.running(worker) as loop:
                await wait_until(lambda: _has_length(broker, keys.trajectories(), 3))
                assert (len(loop.running), loop.num_free) == (3, 0)
                worker.engine.on_report(EngineReport(0.95, 2))
                worker.engine.released.set()
                await wait_until(lambda: _has_length(broker, keys.trajectories(), 16))
            # Two were left after the first end; nothing was reported since.
            assert loop.slots.limit == 2

    async def test_slots_that_the_first_report_adds_are_used_at_once(self, make, broker, keys, monkeypatch):
        await issue(broker, keys)
        monkeypatch.setattr("tidemill.services.rollout.worker.START", 3)
        async with make(rollout__max_groups_in_flight="auto") as worker:
            worker.engine.is_reporting = True
            worker.engine.held = {0, 1, 2, 3}
            async with self.running(worker) as loop:
                await wait_until(lambda: len(worker.engine.asked) == 3 * SIZE)
                assert loop.num_free == 0
                worker.engine.on_report(EngineReport(0.01, 0, num_tokens=1 << 20))
                await wait_until(lambda: len(worker.engine.asked) == 4 * SIZE)
                worker.engine.released.set()

    async def test_slots_hear_how_much_of_a_history_has_left_the_cache(self, make, broker, keys, monkeypatch):
        """Where it goes on, with the same weights, and the engine has not slept: else nothing of it could be
        there."""
        turns = [
            ([3], 0, 0, 0),
            ([3, 4], 0, 32, 0),
            ([3, 4, 5], 0, 64, 0),
            ([3, 4, 5, 6], 0, 0, 0),
            ([3, 4, 5, 6, 7], 0, 96, 0),
        ]
        turns += [([8], 0, 16, 0), ([8, 9], 1, 0, 0), ([8, 9, 9], 1, 32, 0), ([8, 9, 9, 9], 1, 32, 0)]
        turns += [([8, 9, 9, 9, 9], 1, 0, 1)]
        remaining = iter(turns)
        heard = []

        class Heard:
            def turn(self, num_had: int, num_cached: int) -> None:
                heard.append((num_had, num_cached))

        class Turns(SingleTurn):
            async def play(self, ticket: Any, name: str, ask: Any) -> Any:
                for ids, *_ in turns:
                    await ask(ids, ticket.sampling)
                raise EnvironmentFaultError("the script has ended")

        async def generate(request: Any) -> Generation:
            ids, version, num_cached, worker.engine.num_sleeps = next(remaining)
            assert request.prompt_ids == ids
            return Generation([1], [-1.0], ((version, 0),), "stop", num_cached)

        await issue(broker, keys)
        async with make() as worker:
            monkeypatch.setattr(worker.engine, "generate", generate)
            worker.lane.player = Turns(worker.config, worker.engine.decode, pytest.fail)
            worker.lane.slots = Heard()
            delivery = await worker.fetch()
            play = new_play(delivery.message.prompt_ids)
            await worker.lane._generate_sample(delivery, play, 0, worker.follower.history, {}, ())
        assert heard == [(32, 64), (64, 0), (64, 96), (32, 32)]


async def _has_length(broker: Broker, key: str, count: int) -> bool:
    return int(await broker.execute("XLEN", key)) == count


class FailingPlayer(SingleTurn):
    """A player whose environment fails for some samples, or for all."""

    def __init__(self, worker: Worker, *failing: str) -> None:
        super().__init__(worker.config, worker.engine.decode, pytest.fail)
        self.failing = failing

    async def play(self, ticket: Any, name: str, ask: Any) -> Any:
        if not self.failing or name.split("-")[2] in self.failing:
            raise EnvironmentFaultError("the board is broken")
        return await super().play(ticket, name, ask)


async def test_a_group_whose_environment_fails_is_handed_on_and_counts_and_is_dead_lettered_at_last(
    make, broker, keys
):
    await issue(broker, keys)
    async with make(streams__max_attempts=2) as worker:
        worker.lane.player = FailingPlayer(worker)
        delivery = await worker.fetch()
        await worker.lane._work(delivery)
        assert not await messages(broker, keys.dead, DeadLetter)
        ((_, _, _, attempts),) = await broker.execute("XPENDING", keys.prompts(), ROLLOUT_GROUP, "-", "+", 1)
        assert attempts == 1
        await worker.lane._work(await take_over(broker, keys, delivery, worker))
        (letter,) = await messages(broker, keys.dead, DeadLetter)
    assert "the board is broken" in letter.error


async def test_a_run_stops_after_many_faults_in_a_row_and_loses_no_ticket(make, broker, keys):
    await issue(broker, keys)
    async with make(rollout__environment={"max_faults": 2}, streams__max_attempts=9) as worker:
        worker.lane.player = FailingPlayer(worker)
        await worker.lane._work(await worker.fetch())
        # A sample that is published ends the row.
        worker.lane.player = FailingPlayer(worker, "0")
        await worker.lane._work(await worker.fetch())
        assert worker.context.failure is None
        worker.lane.player = FailingPlayer(worker)
        await worker.lane._work(await worker.fetch())
    assert isinstance(worker.context.failure, ConfigError)
    for said in ("single_turn", "2 tickets in a row", "max_faults", "the board is broken"):
        assert said in str(worker.context.failure)
    assert not await messages(broker, keys.dead, DeadLetter)


@pytest.mark.parametrize("least", [3, 4])
async def test_a_sample_whose_environment_fails_ends_no_other_and_the_least_group_decides(
    make, broker, keys, least
):
    await issue(broker, keys)
    async with make(streams__max_attempts=2, reward__min_group_size=least) as worker:
        worker.lane.player = FailingPlayer(worker, "2")
        delivery = await worker.fetch()
        await worker.lane._work(delivery)
        assert {sample.index for sample in await samples_of(broker, keys)} == {0, 1, 3}
        worker.engine.asked.clear()
        await worker.lane._work(await take_over(broker, keys, delivery, worker))
        assert worker.engine.asked == []
    letters = await messages(broker, keys.dead, DeadLetter)
    failed = [sample for sample in await samples_of(broker, keys) if sample.index == 2]
    assert [letter.ticket for letter in letters] == ([0] if least == 4 else [])
    assert [fault_of(sample) != "" for sample in failed] == ([] if least == 4 else [True])
    assert await is_settled(broker, keys)


async def test_a_sample_that_no_reader_would_take_is_not_published_and_its_ticket_dead_lettered(
    make, broker, keys
):
    await issue(broker, keys)
    async with make() as worker:
        delivery = await worker.fetch()
        worker.consumer.max_bytes = 100
        await worker.lane._work(delivery)
    assert await samples_of(broker, keys) == []
    (letter,) = await messages(broker, keys.dead, DeadLetter)
    assert (letter.ticket, letter.origin) == (0, "prompts") and "max_message_mb" in letter.error


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
            publish = worker.consumer.publish_sample
            num_losses = 0
            one_at_a_time = asyncio.Lock()

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
            engine = worker.engine
            load = worker.engine.load
            engine.held = set(range(SIZE))

            async def load_late(*arguments: Any) -> Any:
                engine.released.set()
                await wait_until(lambda: worker.follower.num_waiting == 1)
                worker.consumer.lease_s = 0.1  # as above; once the weights are there, it is read at once
                return await load(*arguments)

            engine.load = load_late
            task = asyncio.ensure_future(worker.lane.generate(await worker.fetch()))
            await wait_until(lambda: len(engine.asked) == SIZE)
            await lose_tail(broker, keys.weights, START)
            await announce(1, term=2)
            await wait_until(lambda: engine.version == 1)
            await asyncio.wait_for(task, 120)
        samples = await samples_of(broker, keys)
        assert {(sample.max_version, sample.index) for sample in samples} == {(1, i) for i in range(SIZE)}
        assert len(engine.asked) == 2 * SIZE, "nothing is begun that would be dropped"

    @pytest.mark.parametrize("ends", ["in the load", "after it"])
    async def test_what_begins_while_other_weights_are_loaded_is_not_published(
        self, make, broker, keys, announce, ends
    ):
        await issue(broker, keys)
        async with make() as worker:
            await announce(3)
            await wait_until(lambda: worker.engine.version == 3)
            engine = worker.engine
            load = worker.engine.load
            delivery = await worker.fetch()
            begun: list[asyncio.Task[None]] = []

            def begin() -> asyncio.Task[None]:
                """Begin a sample whose group passed the wait for its version before the load."""
                play = new_play(delivery.message.prompt_ids)
                history = worker.follower.history
                return asyncio.create_task(worker.lane._generate_sample(delivery, play, 0, history, {}, ()))

            async def load_late(*arguments: Any) -> Any:
                begun.append(begin())
                await wait_until(lambda: engine.asked)
                if ends == "in the load":
                    await begun[0]
                return await load(*arguments)

            engine.load = load_late
            engine.held = {0} if ends == "after it" else set()
            await lose_tail(broker, keys.weights, START)
            await announce(1, term=2)
            await wait_until(lambda: engine.version == 1 and not worker.follower._is_leaving)
            engine.released.set()
            await begun[0]
            assert not await samples_of(broker, keys)
            await begin()
            assert [sample.max_version for sample in await samples_of(broker, keys)] == [1]

    async def test_a_sample_that_waited_for_its_store_until_the_trainer_went_back_is_generated_again(
        self, make, broker, keys, announce, tmp_path, monkeypatch
    ):
        store = ClaimStore(tmp_path, 1)
        broker.claims = store
        is_stored = threading.Event()
        check_in = store.check_in

        def check_in_late(sample: Trajectory) -> Trajectory:
            assert is_stored.wait(60)
            return check_in(sample)

        await issue(broker, keys)
        async with make() as worker:
            await announce(3)
            await wait_until(lambda: worker.engine.version == 3)
            monkeypatch.setattr(store, "check_in", check_in_late)
            task = asyncio.ensure_future(worker.lane.generate(await worker.fetch()))
            await wait_until(lambda: len(worker.engine.asked) == SIZE and not worker.lane.num_playing)
            await lose_tail(broker, keys.weights, START)
            await announce(1, term=2)
            await wait_until(lambda: worker.engine.version == 1)
            is_stored.set()
            worker.consumer.lease_s = 0.1  # as above
            await asyncio.wait_for(task, 120)
        samples = [store.resolve(sample) for sample in await samples_of(broker, keys)]
        assert sorted(sample.index for sample in samples) == list(range(SIZE))
        assert {sample.max_version for sample in samples} == {1}


async def lose_samples(broker: Broker, keys: Keys, num_kept: int, ticket: int = 0) -> None:
    """As a Redis does that comes back without its last second: samples and progress go together."""
    for entry in (await read_range(broker, keys.trajectories(), Trajectory))[num_kept:]:
        await broker.execute("XDEL", keys.trajectories(), entry.entry_id)
        await broker.execute("HDEL", keys.progress(ticket), entry.message.index)
