"""New messages come in the round trip of an acknowledgement, and are held like all others."""

import asyncio
from typing import Any

from tests.support.consumers import fall_silent, fetched, make_consumer, make_score, pending, publish
from tests.support.waiting import wait_until
from tidemill.common.redis.broker import Broker


async def num_reads(broker: Broker) -> int:
    """How often the server has read from a socket so far."""
    return int((await broker.info("stats"))["total_reads_processed"])


async def test_one_record_a_call_takes_one_round_trip(broker, keys):
    await publish(broker, keys, 20)
    consumer = make_consumer(broker, keys)
    await broker.keep_scripts(keys.state)
    (held,) = await fetched(consumer, 1)
    tickets = [held.message.ticket]
    before = await num_reads(broker)
    for _ in range(19):
        assert await consumer.complete([(held, make_score(tickets[-1]))], keys.scores(), ahead=1) == [True]
        (held,) = await fetched(consumer, 1)
        tickets.append(held.message.ticket)
    assert await num_reads(broker) - before == 19 + 1, "the last one is the question"
    assert tickets == list(range(20))
    assert await pending(broker, keys) == list(consumer.held) == [held.entry_id]
    assert await consumer.complete([(held, None)], keys.scores(), ahead=1) == [True]
    assert await consumer.fetch(1, 0) == []


async def test_what_came_ahead_is_held_although_its_caller_was_cancelled(broker, keys):
    ids = await publish(broker, keys, 3)
    consumer = make_consumer(broker, keys)
    (first,) = await fetched(consumer, 1)
    call = asyncio.create_task(consumer.complete([(first, None)], keys.scores(), ahead=2))
    await asyncio.sleep(0)
    call.cancel()
    await wait_until(lambda: list(consumer.held)[-2:] == ids[1:])
    await consumer.leave()
    other = make_consumer(broker, keys, "b")
    found: Any = await other.fetch(3, 0)
    assert [(one.entry_id, one.attempts) for one in found] == [(ids[1], 1), (ids[2], 1)], "not counted"
    assert await consumer.fetch(3, 0) == [], "what was handed back is given to nobody here"


async def test_what_was_lost_while_it_waited_is_not_given(broker, keys):
    ids = await publish(broker, keys, 3)
    consumer, other = make_consumer(broker, keys), make_consumer(broker, keys, "b")
    (first,) = await fetched(consumer, 1)
    assert await consumer.complete([(first, None)], keys.scores(), ahead=2) == [True]
    await fall_silent(broker, keys, "a", ids[1:2])
    assert [one.entry_id for one in await other.fetch(1, 0)] == ids[1:2]
    await consumer.renew()
    assert [one.entry_id for one in await fetched(consumer, 1)] == ids[2:]


async def test_a_request_that_fails_is_left_to_the_next_fetch(broker, keys, monkeypatch):
    await publish(broker, keys, 2)
    consumer = make_consumer(broker, keys)
    (first,) = await fetched(consumer, 1)
    monkeypatch.setattr(consumer, "_read", ("NO_SUCH_COMMAND",))
    assert await consumer.complete([(first, None)], keys.scores(), ahead=1) == [True]
    monkeypatch.undo()
    broker.redis.disconnect()  # no connection is open: nothing can be asked ahead
    (second,) = await fetched(consumer, 1)
    broker.redis.disconnect()
    assert await consumer.complete([(second, None)], keys.scores(), ahead=1) == [True]
    assert await pending(broker, keys) == []
