"""Samples that one worker has begun and another one finishes, between real streams."""

import asyncio
from typing import Any

import pytest

from tests.support.rollout_worker import Worker, is_settled, issue, samples_of, take_over
from tests.support.waiting import wait_until
from tidemill.common.errors import LeaseLostError
from tidemill.common.redis.broker import Broker
from tidemill.common.store import ClaimStore
from tidemill.common.wire.keys import Keys
from tidemill.services.rollout.engines import simulated
from tidemill.services.rollout.sessions.parts import RecordedPlay, read_play

LONG = {"rollout__simulated": {"tokens": 12, "group_s": 0.6}, "rollout__sampling": {"max_tokens": 12}}
"""Twelve tokens, of which two make a part."""


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "PART_TOKENS", 2)


async def plays(broker: Broker, keys: Keys, worker: Worker, delivery: Any) -> list[RecordedPlay]:
    raw = await broker.execute("HGETALL", keys.parts(keys.progress(0)))
    fields = dict(zip(raw[::2], raw[1::2], strict=True))
    ticket = delivery.message
    return [
        read_play(fields, index, ticket.prompt_ids, worker.lane._read_claim, ticket.images)
        for index in range(ticket.group_size)
    ]


async def left_by(
    worker: Worker, broker: Broker, keys: Keys, num_parts: int = 2
) -> tuple[Any, list[RecordedPlay]]:
    """The delivery of a worker that died after two parts of each sample, and these."""
    delivery = await worker.fetch()
    keep = worker.lane._keep_part
    enough = asyncio.Event()

    async def keep_two(held: Any, index: int, name: bytes, number: int, payload: Any) -> bool:
        if number >= num_parts:
            await enough.wait()
        return await keep(held, index, name, number, payload)

    worker.lane._keep_part = keep_two  # the turn waits for its parts, so it does not end
    task = asyncio.ensure_future(worker.lane.generate(delivery))

    async def are_there() -> bool:
        return all(len(p.parts) >= num_parts for p in await plays(broker, keys, worker, delivery))

    await wait_until(are_there)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    worker.lane._keep_part = keep
    return delivery, await plays(broker, keys, worker, delivery)


def tokens_of(play: RecordedPlay) -> list[int]:
    return [token for piece in play.parts for token in piece.token_ids.tolist()]


@pytest.mark.parametrize("claims", [False, True])
async def test_a_sample_begins_with_what_its_first_worker_has_left(make, broker, keys, tmp_path, claims):
    if claims:
        (tmp_path / "run").mkdir()
        broker.claims = ClaimStore(tmp_path / "run", 1)
    await issue(broker, keys)
    async with (
        make("w1", **LONG) as first,
        make("w2", **LONG | {"rollout__simulated": {"tokens": 3}}) as second,
    ):
        delivery, parts = await left_by(first, broker, keys)
        redelivered = await take_over(broker, keys, delivery, second)
        assert redelivered.attempts == 1, "a part is progress"
        await second.lane.generate(redelivered)
        first_names = set(first.engine.request_ids)
        assert first_names.isdisjoint(second.engine.request_ids), "other numbers are drawn from here on"
    broker_claims = broker.claims
    for sample in await samples_of(broker, keys):
        whole = broker_claims.resolve(sample) if broker_claims else sample
        before = tokens_of(parts[sample.index])
        assert len(before) >= 4 and whole.completion_ids[: len(before)].tolist() == before
        assert len(whole.completion_ids) == len(before) + 3
        assert whole.spans == ((0, 0),) and sample.worker == "w2"
    assert await is_settled(broker, keys)
    assert await broker.execute("EXISTS", keys.parts(keys.progress(0))) == 0


async def test_who_was_frozen_adds_nothing_after_it_was_taken_over(make, broker, keys):
    await issue(broker, keys)
    async with make("w1", **LONG) as first, make("w2", **LONG) as second:
        delivery, _ = await left_by(first, broker, keys)
        ticket = delivery.message
        play = (await plays(broker, keys, first, delivery))[0]
        await take_over(broker, keys, delivery, second)
        with pytest.raises(LeaseLostError):
            await first.lane._keep_part(delivery, 0, play.name, len(play.parts), play.parts[-1])
        assert (await plays(broker, keys, second, delivery))[0] == play
        assert ticket.group_size == 4


@pytest.mark.parametrize("is_lost", [True, False])
async def test_tokens_of_weights_that_the_run_has_lost_are_generated_again(
    make, broker, keys, announce, is_lost
):
    """Another trainer process has begun: nobody can say whether its version 1 is the same."""
    await issue(broker, keys)
    await announce(1)
    async with make("w1", **LONG) as first:
        await wait_until(lambda: first.engine.version == 1)
        delivery, parts = await left_by(first, broker, keys)
    if is_lost:
        await broker.execute("DEL", keys.weights)
        await announce(1, term=2)
    async with make("w2", **LONG | {"rollout__simulated": {"tokens": 3}}) as second:
        await wait_until(lambda: second.engine.version == 1)
        await second.lane.generate(await take_over(broker, keys, delivery, second))
    for sample in await samples_of(broker, keys):
        before = tokens_of(parts[sample.index])
        assert (sample.completion_ids[: len(before)].tolist() == before) is not is_lost
        assert len(sample.completion_ids) == 3 + (0 if is_lost else len(before))


async def test_a_group_that_is_dead_lettered_leaves_no_parts(make, broker, keys):
    await issue(broker, keys)
    async with make("w1", **LONG) as worker:
        delivery, _ = await left_by(worker, broker, keys)
        assert await worker.lane.dead_letter(delivery, "enough")
    progress = keys.progress(0)
    assert await broker.execute("EXISTS", progress, keys.parts(progress)) == 0
