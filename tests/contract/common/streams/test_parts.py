"""Samples of a group stream one by one, and before them, under a lease, parts of those that are generated.

The last sample acknowledges the ticket, whoever publishes it; parts are kept in order until then."""

import asyncio
import random

import pytest

from tests.support.consumers import samples_of, take_ticket
from tests.support.letters import make_ticket
from tests.support.numbered import append_numbered
from tests.support.trajectories import make_trajectory
from tidemill.common import streams
from tidemill.common.errors import LeaseLostError
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Delivery
from tidemill.common.streams.consumer import Consumer
from tidemill.common.wire.keys import ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Ticket

SIZE = 2
ONE = b"1" * 16
OTHER = b"2" * 16
"""The names of two plays."""


@pytest.fixture
async def held(broker, keys):
    """A worker with the only ticket."""
    await append_numbered(broker, keys.prompts(), [(0, make_ticket(0, group_size=SIZE))])
    await streams.ensure_group(broker, keys.prompts(), ROLLOUT_GROUP)
    return await take_ticket(broker, keys)


async def parts_of(broker: Broker, keys: Keys) -> dict[str, bytes]:
    raw = await broker.execute("HGETALL", keys.parts(keys.progress(0)))
    return {name.decode(): value for name, value in zip(raw[::2], raw[1::2], strict=True)}


async def take_over(broker: Broker, keys: Keys, name: str, count: int) -> None:
    entry_id = streams.entry_id_of(0)
    command = ("XCLAIM", keys.prompts(), ROLLOUT_GROUP, name, 0, entry_id, "RETRYCOUNT", count)
    await broker.execute(*command)


async def deliveries(broker: Broker, keys: Keys) -> int:
    ((_, _, _, count),) = await broker.execute("XPENDING", keys.prompts(), ROLLOUT_GROUP, "-", "+", 1)
    return int(count)


async def test_parts_are_kept_in_order_and_go_with_their_sample_and_with_the_group(broker, keys, held):
    consumer, delivery = held
    progress = keys.progress(0)
    assert await consumer.append_part(delivery, progress, 0, 0, ONE + b"a")
    assert await consumer.append_part(delivery, progress, 0, 1, ONE + b"b")
    assert await consumer.append_part(delivery, progress, 0, 1, ONE + b"b"), "its answer was lost"
    assert await consumer.append_part(delivery, progress, 1, 0, OTHER + b"c")
    assert await parts_of(broker, keys) == {"0:0": ONE + b"a", "0:1": ONE + b"b", "1:0": OTHER + b"c"}
    first = make_trajectory(0, 0, group_size=SIZE)
    second = make_trajectory(0, 1, group_size=SIZE)
    await consumer.publish_sample(delivery, keys.trajectories(), progress, first)
    assert await parts_of(broker, keys) == {"1:0": OTHER + b"c"}
    assert not await consumer.append_part(delivery, progress, 0, 2, ONE + b"d"), "the sample is published"
    assert await consumer.publish_sample(delivery, keys.trajectories(), progress, second)
    assert await broker.execute("EXISTS", progress, keys.parts(progress)) == 0


async def test_no_part_is_kept_of_a_lease_that_is_lost_and_who_took_it_over_goes_on(broker, keys, held):
    consumer, delivery = held
    progress = keys.progress(0)
    await consumer.append_part(delivery, progress, 0, 0, ONE + b"a")
    await take_over(broker, keys, "second", 1)
    with pytest.raises(LeaseLostError):
        await consumer.append_part(delivery, progress, 0, 1, ONE + b"late")
    # Taken over once more: of two workers that go on from one part, the one that holds the ticket is heard.
    second = Consumer(
        broker, keys.prompts(), ROLLOUT_GROUP, "second", Ticket, lease_s=60.0, dead_key=keys.dead
    )
    again = Delivery(delivery.entry_id, delivery.fields, delivery.message, 1)
    second.held[again.entry_id] = again
    assert await second.append_part(again, progress, 0, 1, ONE + b"second")
    await take_over(broker, keys, "third", 1)
    with pytest.raises(LeaseLostError):
        await second.append_part(again, progress, 0, 2, ONE + b"late")
    assert await parts_of(broker, keys) == {"0:0": ONE + b"a", "0:1": ONE + b"second"}


async def test_a_part_after_one_that_redis_has_lost_or_of_another_play_is_not_kept(broker, keys, held):
    consumer, delivery = held
    progress = keys.progress(0)
    assert not await consumer.append_part(delivery, progress, 0, 1, ONE + b"b")
    await consumer.append_part(delivery, progress, 0, 0, ONE + b"a")
    assert not await consumer.append_part(delivery, progress, 0, 1, OTHER + b"b")
    assert await consumer.append_part(delivery, progress, 0, 0, OTHER + b"a"), "it begins again"
    assert await consumer.append_part(delivery, progress, 0, 1, OTHER + b"b")
    assert await parts_of(broker, keys) == {"0:0": OTHER + b"a", "0:1": OTHER + b"b"}


async def test_deliveries_count_only_since_a_part_that_nobody_had_before(broker, keys, held):
    consumer, delivery = held
    progress = keys.progress(0)
    await take_over(broker, keys, consumer.name, 3)
    delivery.attempts = 3
    await consumer.append_part(delivery, progress, 0, 0, ONE + b"a")
    assert (await deliveries(broker, keys), delivery.attempts) == (0, 1)
    await take_over(broker, keys, consumer.name, 3)
    delivery.attempts = 3
    await consumer.append_part(delivery, progress, 0, 0, OTHER + b"a")
    assert (await deliveries(broker, keys), delivery.attempts) == (3, 3), "begun again: no progress"
    await consumer.append_part(delivery, progress, 0, 1, OTHER + b"b")
    assert (await deliveries(broker, keys), delivery.attempts) == (0, 1)


async def test_what_followed_a_part_that_could_not_be_read_does_not_follow_the_one_in_its_place(
    broker, keys, held
):
    consumer, delivery = held
    progress = keys.progress(0)
    for number, payload in enumerate((b"a", b"b", b"c", b"d")):
        await consumer.append_part(delivery, progress, 0, number, ONE + payload)
    await take_over(broker, keys, consumer.name, 3)
    # Who takes over could read the first part only, and goes on from there with the same play.
    assert await consumer.append_part(delivery, progress, 0, 1, ONE + b"B")
    assert await parts_of(broker, keys) == {"0:0": ONE + b"a", "0:1": ONE + b"B", "0:2": b"", "0:3": b""}
    assert await consumer.append_part(delivery, progress, 0, 2, ONE + b"C")
    assert await deliveries(broker, keys) == 3, "no further than before"
    first = make_trajectory(0, 0, group_size=SIZE)
    await consumer.publish_sample(delivery, keys.trajectories(), progress, first)
    assert await parts_of(broker, keys) == {}


@pytest.mark.parametrize("seed", range(3))
async def test_the_last_sample_acknowledges_the_ticket_whatever_the_order(broker, keys, seed):
    await append_numbered(broker, keys.prompts(), [(0, make_ticket(0, group_size=16))])
    consumer, delivery = await take_ticket(broker, keys)
    order = random.Random(seed).sample(range(16), 16)

    async def publish_one(index):
        sample = make_trajectory(0, index, group_size=16)
        return await consumer.publish_sample(delivery, keys.trajectories(), keys.progress(0), sample)

    complete = await asyncio.gather(*(publish_one(index) for index in order))
    assert sum(complete) == 1
    assert sorted(await samples_of(broker, keys)) == list(range(16))
    assert await streams.pending_ids(broker, keys.prompts(), ROLLOUT_GROUP, "-", "+", 10) == []
    assert await broker.execute("EXISTS", keys.progress(0)) == 0
    assert consumer.held == {}


async def test_a_duplicate_sample_is_dropped_and_does_not_complete_the_group(broker, keys):
    await append_numbered(broker, keys.prompts(), [(0, make_ticket(0, group_size=2))])
    consumer, delivery = await take_ticket(broker, keys)
    await broker.execute("HSET", keys.progress(0), "version", 3)  # it counts as no sample
    first = make_trajectory(0, 0, group_size=2)
    second = make_trajectory(0, 1, group_size=2)
    for sample, is_last in ((first, False), (first, False), (second, True)):
        result = await consumer.publish_sample(delivery, keys.trajectories(), keys.progress(0), sample)
        assert result == is_last
    assert await samples_of(broker, keys) == [0, 1]
    with pytest.raises(LeaseLostError):
        await consumer.publish_sample(delivery, keys.trajectories(), keys.progress(0), second)
    assert await samples_of(broker, keys) == [0, 1]
