"""Samples of a group stream one by one; the last one acknowledges the ticket, whoever publishes it."""

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
from tidemill.common.wire.keys import ROLLOUT_GROUP, Keys


@pytest.mark.parametrize("seed", range(3))
async def test_the_last_sample_acknowledges_the_ticket_whatever_the_order(
    broker: Broker, keys: Keys, seed: int
) -> None:
    await append_numbered(broker, keys.prompts(), [(0, make_ticket(0, group_size=16))])
    consumer, delivery = await take_ticket(broker, keys)
    order = random.Random(seed).sample(range(16), 16)

    async def publish_one(index: int) -> bool:
        sample = make_trajectory(0, index, group_size=16)
        return await consumer.publish_sample(delivery, keys.trajectories(), keys.progress(0), sample)

    complete = await asyncio.gather(*(publish_one(index) for index in order))
    assert sum(complete) == 1
    assert sorted(await samples_of(broker, keys)) == list(range(16))
    assert await streams.pending_ids(broker, keys.prompts(), ROLLOUT_GROUP, "-", "+", 10) == []
    assert await broker.execute("EXISTS", keys.progress(0)) == 0
    assert consumer.held == {}


async def test_a_duplicate_sample_is_dropped_and_does_not_complete_the_group(
    broker: Broker, keys: Keys
) -> None:
    await append_numbered(broker, keys.prompts(), [(0, make_ticket(0, group_size=2))])
    consumer, delivery = await take_ticket(broker, keys)
    await broker.execute("HSET", keys.progress(0), "version", 3)  # it counts as no sample
    first, second = (make_trajectory(0, index, group_size=2) for index in range(2))
    for sample, is_last in ((first, False), (first, False), (second, True)):
        result = await consumer.publish_sample(delivery, keys.trajectories(), keys.progress(0), sample)
        assert result == is_last
    assert await samples_of(broker, keys) == [0, 1]
    with pytest.raises(LeaseLostError):
        await consumer.publish_sample(delivery, keys.trajectories(), keys.progress(0), second)
    assert await samples_of(broker, keys) == [0, 1]
