"""Streams as queues: a result exists exactly when its input is acknowledged; only the holder publishes."""

import asyncio
import random
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.consumers import (
    LEASE_S,
    fall_silent,
    fetched,
    make_consumer,
    make_rollout,
    make_score,
    pending,
    publish,
    samples_of,
    scored,
    take_ticket,
)
from tests.support.letters import make_ticket
from tests.support.numbered import append_numbered
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common import streams
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Delivery, append
from tidemill.common.streams.consumer import Consumer
from tidemill.common.wire.keys import REWARD_GROUP


async def test_a_result_exists_exactly_when_its_input_is_acknowledged(broker, keys):
    ids = await publish(broker, keys, 5)
    consumer = make_consumer(broker, keys)
    held = await fetched(consumer, 5)
    assert [delivery.message.ticket for delivery in held] == [0, 1, 2, 3, 4]
    assert await pending(broker, keys) == ids
    results = [(held[1], make_score(1)), (held[3], make_score(3))]
    assert await consumer.complete(results, keys.scores()) == [True] * 2
    assert await scored(broker, keys) == [1, 3]
    assert await pending(broker, keys) == [ids[0], ids[2], ids[4]]
    assert await consumer.complete([(held[0], None)], keys.scores()) == [True]
    assert await scored(broker, keys) == [1, 3]
    assert await pending(broker, keys) == [ids[2], ids[4]]
    assert list(consumer.held) == [ids[2], ids[4]]


async def test_results_complete_in_any_order_and_more_of_them_than_one_call_takes(broker, keys):
    await publish(broker, keys, 1100)
    consumer = make_consumer(broker, keys)
    held = await fetched(consumer, 1100)
    chosen = random.Random(3).sample(range(1100), 1017)
    done = await consumer.complete([(held[n], make_score(n)) for n in chosen], keys.scores())
    assert done == [True] * 1017
    assert await scored(broker, keys) == chosen
    assert len(await pending(broker, keys)) == 83
    assert await consumer.complete([], keys.scores()) == []


async def test_an_input_completed_twice_is_published_once(broker, keys):
    await publish(broker, keys, 2)
    consumer = make_consumer(broker, keys)
    first, second = await fetched(consumer, 2)
    both = [(first, make_score(0)), (second, make_score(1)), (first, make_score(0))]
    assert await consumer.complete(both, keys.scores()) == [True, True, False]
    # As after a reply that was lost: the script has run, and the call is repeated.
    assert await consumer.complete(both[:1], keys.scores()) == [False]
    assert await scored(broker, keys) == [0, 1]


async def test_a_lost_lease_cannot_publish(broker, keys):
    ids = await publish(broker, keys, 3)
    slow = make_consumer(broker, keys, "slow")
    rival = make_consumer(broker, keys, "rival")
    held = await fetched(slow, 3)
    await fall_silent(broker, keys, "slow", ids[1:2])
    (delivery,) = await fetched(rival, 1)
    assert delivery.entry_id == ids[1]
    done = await slow.complete([(d, make_score(d.message.ticket)) for d in held], keys.scores())
    assert done == [True, False, True]
    assert [delivery.is_lost for delivery in held] == [False, True, False]
    assert await scored(broker, keys) == [0, 2]
    assert await rival.complete([(delivery, make_score(1))], keys.scores()) == [True]
    assert await scored(broker, keys) == [0, 2, 1]


async def test_a_rival_gets_what_fell_silent_first_and_each_attempt_is_counted(broker, keys):
    ids = await publish(broker, keys, 2)
    names = ["a", "b", "c"]
    (first,) = await fetched(make_consumer(broker, keys, "a"), 1)
    assert first.attempts == 1
    for attempt in (1, 2):
        await fall_silent(broker, keys, names[attempt - 1], ids[:1])
        (delivery,) = await fetched(make_consumer(broker, keys, names[attempt]), 1)
        assert (delivery.entry_id, delivery.attempts) == (ids[0], attempt + 1)
    assert delivery.message == first.message
    (fresh,) = await fetched(make_consumer(broker, keys, "d"), 1)
    assert (fresh.entry_id, fresh.attempts) == (ids[1], 1)


async def test_a_renewal_keeps_the_lease_counts_no_attempt_and_notices_what_is_lost(broker, keys):
    ids = await publish(broker, keys, 3)
    slow = make_consumer(broker, keys, "slow")
    rival = make_consumer(broker, keys, "rival")
    held = await fetched(slow, 3)
    assert await make_consumer(broker, keys, "other").fetch(10, 0) == [], "leases are held"
    await slow.complete([(held[0], None)], keys.scores())
    await fall_silent(broker, keys, "slow", ids[1:])
    for _ in range(5):
        await slow.renew()
    assert await rival.fetch(10, 0) == []
    await fall_silent(broker, keys, "slow", ids[1:2])
    rival.takeover.next_at = 0.0
    (delivery,) = await fetched(rival, 1)
    assert (delivery.entry_id, delivery.attempts) == (ids[1], 2)
    await slow.renew()
    assert [delivery.is_lost for delivery in held] == [False, True, False]
    assert list(slow.held) == ids[2:]
    assert await slow.complete([(held[2], make_score(1))], keys.scores()) == [True]


async def test_leases_are_renewed_in_the_background(broker, keys):
    ids = await publish(broker, keys, 1)
    consumer = make_consumer(broker, keys, lease_s=0.2)

    async def is_renewed():
        ((_, _, idle_ms, _),) = await broker.execute("XPENDING", consumer.key, REWARD_GROUP, "-", "+", 1)
        return int(idle_ms) < 1000 * LEASE_S

    async with consumer:
        await consumer.fetch(1, 0)
        await fall_silent(broker, keys, "a", ids)
        await wait_until(is_renewed)


async def test_a_consumer_that_renewed_too_late_holds_its_messages_and_no_delivery_is_counted(broker, keys):
    """It gets no CPU for a lease, looks for abandoned messages, and finds its own. Nobody has died."""
    ids = await publish(broker, keys, 3)
    slow = make_consumer(broker, keys, "slow")
    rival = make_consumer(broker, keys, "rival")
    held = await fetched(slow, 3)
    await slow.park(held[2:])
    for _ in range(5):
        await fall_silent(broker, keys, "slow", ids)
        slow.takeover.next_at = 0.0
        assert await slow.fetch(10, 0) == []
    rows = await broker.execute("XPENDING", slow.key, REWARD_GROUP, "-", "+", 10)
    assert [(row[1], row[3]) for row in rows] == [(b"slow", 1), (b"slow", 1), (b"slow", 0)]
    assert all(row[2] < 1000 * LEASE_S for row in rows), "its leases begin again"
    assert [delivery.is_lost for delivery in held] == [False] * 3
    await fall_silent(broker, keys, "slow", ids)
    rival.takeover.next_at = 0.0
    assert [delivery.attempts for delivery in await fetched(rival, 3)] == [2, 2, 1]


async def test_a_message_that_its_consumer_no_longer_works_on_is_delivered_once_more(broker, keys):
    """A consumer that has lost sight of a message must not get it again and again without an end."""
    ids = await publish(broker, keys, 1)
    consumer = make_consumer(broker, keys, "forgetful")
    await fetched(consumer, 1)
    for attempts in (2, 3):
        consumer.held.clear()
        await fall_silent(broker, keys, "forgetful", ids)
        consumer.takeover.next_at = 0.0
        assert [delivery.attempts for delivery in await fetched(consumer, 1)] == [attempts]


async def test_all_that_a_dead_consumer_held_is_taken_over_once(broker, keys):
    ids = await publish(broker, keys, 300)
    dead = make_consumer(broker, keys, "dead")
    living = make_consumer(broker, keys, "living")
    await fetched(dead, 150)
    await fetched(living, 150)
    abandoned = [entry_id for number, entry_id in enumerate(ids[:150]) if number % 3]
    await fall_silent(broker, keys, "dead", abandoned)
    rival = make_consumer(broker, keys, "rival")
    entry_ids: list[str] = []
    while deliveries := await rival.fetch(7, 0):
        entry_ids += [delivery.entry_id for delivery in deliveries]
    assert entry_ids == abandoned


async def test_one_look_finds_what_is_abandoned_behind_all_that_others_hold(broker, keys):
    *_, last = await publish(broker, keys, 400)
    await fetched(make_consumer(broker, keys, "living"), 399)
    await fetched(make_consumer(broker, keys, "dead"), 1)
    await fall_silent(broker, keys, "dead", [last])
    (delivery,) = await make_consumer(broker, keys, "rival").fetch(1, 0)
    assert (delivery.entry_id, delivery.attempts) == (last, 2)


async def test_what_is_handed_back_is_there_for_others_at_once_and_not_counted(broker, keys):
    ids = await publish(broker, keys, 3)
    leaving = make_consumer(broker, keys, "leaving")
    held = await fetched(leaving, 3)
    await leaving.hand_back(held[:2])
    assert list(leaving.held) == ids[2:]
    deliveries = await fetched(make_consumer(broker, keys, "next"), 2)
    assert [(delivery.entry_id, delivery.attempts) for delivery in deliveries] == [(ids[0], 1), (ids[1], 1)]
    await leaving.hand_back([])


async def test_a_renewal_that_was_on_its_way_does_not_undo_a_hand_back(broker, keys):
    ids = await publish(broker, keys, 1)
    leaving = make_consumer(broker, keys, "leaving")
    held = await fetched(leaving, 1)
    await leaving.hand_back(held)
    late = await broker.script("renew", [keys.trajectories()], [REWARD_GROUP, "leaving", *ids])
    assert [entry_id.decode() for entry_id in late] == ids
    (delivery,) = await fetched(make_consumer(broker, keys, "next"), 1)
    assert (delivery.entry_id, delivery.attempts) == (ids[0], 1)


@pytest.mark.parametrize("call", ["hand_back", "park", "unpark"])
async def test_what_another_holds_cannot_be_handed_back_or_parked(broker, keys, call):
    ids = await publish(broker, keys, 1)
    slow = make_consumer(broker, keys, "slow")
    rival = make_consumer(broker, keys, "rival")
    held = await fetched(slow, 1)
    await fall_silent(broker, keys, "slow", ids)
    (reclaimed,) = await fetched(rival, 1)
    await getattr(slow, call)(held)
    assert await make_consumer(broker, keys, "third").fetch(10, 0) == []
    assert await rival.complete([(reclaimed, make_score(0))], keys.scores()) == [True]


async def test_a_consumer_that_leaves_hands_back_and_is_forgotten_when_nothing_is_left(broker, keys):
    await publish(broker, keys, 1)
    leaving = make_consumer(broker, keys, "leaving")
    staying = make_consumer(broker, keys, "staying")
    await fetched(leaving, 1)
    await leaving.leave()
    (reclaimed,) = await fetched(staying, 1)
    await staying.complete([(reclaimed, None)], keys.scores())
    for consumer in (leaving, staying):
        await consumer.leave()
    status = await streams.group_status(broker, keys.trajectories(), REWARD_GROUP)
    assert status is not None
    assert (status.pending, status.consumers) == (0, 0)


async def test_a_waiting_consumer_is_woken_by_the_next_message(broker, keys):
    await publish(broker, keys, 0)
    waiting = asyncio.create_task(make_consumer(broker, keys).fetch(10, 5.0))
    await streams.append(broker, keys.trajectories(), make_trajectory(7))
    (delivery,) = await waiting
    assert isinstance(delivery, Delivery)
    assert delivery.message.ticket == 7


async def test_scripts_work_after_the_server_forgot_them(broker, keys):
    await publish(broker, keys, 2)
    consumer = make_consumer(broker, keys)
    first, second = await fetched(consumer, 2)
    assert await consumer.complete([(first, make_score(0))], keys.scores()) == [True]
    await broker.execute("SCRIPT", "FLUSH")
    assert await consumer.complete([(second, make_score(1))], keys.scores()) == [True]
    assert await scored(broker, keys) == [0, 1]


async def test_a_publisher_waits_while_redis_is_full_and_goes_on_when_it_is_not(broker, keys):
    await publish(broker, keys, 2)
    await append_numbered(broker, keys.prompts(), [(0, make_ticket(0, group_size=2))])
    consumer = make_consumer(broker, keys)
    rollout, ticket = await take_ticket(broker, keys)
    held = await fetched(consumer, 2)
    sample = make_trajectory(0, 1, group_size=2)
    try:
        await broker.execute("CONFIG", "SET", "maxmemory", 1)
        numbered = [(number, make_ticket(number)) for number in range(1, 4)]
        results = [(delivery, make_score(delivery.message.ticket)) for delivery in held]
        calls = (
            consumer.complete(results, keys.scores()),
            rollout.publish_sample(ticket, keys.trajectories(), keys.progress(0), sample),
            append_numbered(broker, keys.prompts(), numbered),
            streams.append(broker, keys.commits, make_score(5)),
        )
        work = list(map(asyncio.ensure_future, calls))
        before = broker.waited_s

        async def is_waiting():  # servers count such errors since 6.2
            return broker.waited_s > before and "errorstat_OOM" in await broker.info("errorstats")

        await wait_until(is_waiting)
        assert not any(task.done() for task in work)
    finally:
        await broker.execute("CONFIG", "SET", "maxmemory", 0)
    assert await asyncio.gather(*work[:3]) == [[True, True], False, 3]
    assert len(await work[3]) == 1
    assert await scored(broker, keys) == [0, 1]
    assert await pending(broker, keys) == []
    assert await streams.length(broker, keys.prompts()) == 4
    assert await samples_of(broker, keys) == [0, 0, 1]


@pytest.fixture
def late_answers(monkeypatch):
    """Answers to a script arrive only when the test says so; what the script did is done."""

    def late_answers(consumer, name):
        arrived = asyncio.Event()
        script = consumer.broker.script

        async def delayed(called, *arguments):
            answer = await script(called, *arguments)
            if called == name:
                await arrived.wait()
            return answer

        monkeypatch.setattr(consumer.broker, "script", delayed)
        return arrived

    return late_answers


async def acknowledged(consumer: Consumer[Any]) -> bool:
    """Nothing is pending for it."""
    command = ("XPENDING", consumer.key, consumer.group, "-", "+", 10, consumer.name)
    return not await consumer.broker.execute(*command)


async def assert_nothing_is_called_lost(consumer, delivery, arrived, work):
    working = asyncio.ensure_future(work)
    await wait_until(lambda: acknowledged(consumer))
    with capture_logs() as lines:
        await consumer.renew()
        arrived.set()
        await working
    assert not delivery.is_lost
    assert [line for line in lines if "lease lost" in line["event"]] == []
    assert consumer.held == {}


async def test_the_last_sample_of_a_group(broker, keys, late_answers):
    await append_numbered(broker, keys.prompts(), [(0, make_ticket(0, group_size=1))])
    async with make_rollout(broker, keys) as consumer:
        (delivery,) = await consumer.fetch(1, 1.0)
        arrived = late_answers(consumer, "publish_sample")
        sample = make_trajectory(0, 0, group_size=1)
        work = consumer.publish_sample(delivery, keys.trajectories(), keys.progress(0), sample)
        await assert_nothing_is_called_lost(consumer, delivery, arrived, work)


@pytest.mark.parametrize("script", ["complete", "hand_back"])
async def test_a_score_and_what_is_handed_back(broker, keys, late_answers, script):
    await append(broker, keys.trajectories(), make_trajectory(0, 0))
    async with make_consumer(broker, keys) as consumer:
        (delivery,) = await consumer.fetch(1, 1.0)
        arrived = late_answers(consumer, script)
        if script == "complete":
            work = consumer.complete([(delivery, make_score(0))], keys.scores())
        else:
            work = consumer.hand_back([delivery])
        await assert_nothing_is_called_lost(consumer, delivery, arrived, work)


async def test_what_another_worker_has_taken_is_still_called_lost(broker, keys):
    await append(broker, keys.trajectories(), make_trajectory(0, 0))
    async with make_consumer(broker, keys) as consumer:
        (delivery,) = await consumer.fetch(1, 1.0)
        await broker.execute("XCLAIM", consumer.key, consumer.group, "other", 0, delivery.entry_id)
        await consumer.renew()
        assert delivery.is_lost


async def test_another_sample_of_the_group_that_was_answered_before(broker, keys, monkeypatch):
    """Two samples settle one ticket side by side; the one answered first does not speak for the other."""
    await append_numbered(broker, keys.prompts(), [(0, make_ticket(0, group_size=2))])
    async with make_rollout(broker, keys) as consumer:
        (delivery,) = await consumer.fetch(1, 1.0)
        arrived = [asyncio.Event(), asyncio.Event()]
        script = consumer.broker.script
        calls = iter(arrived)

        async def delayed(called, *arguments):
            event = next(calls) if called == "publish_sample" else None
            answer = await script(called, *arguments)
            if event:
                await event.wait()
            return answer

        monkeypatch.setattr(consumer.broker, "script", delayed)
        where = (keys.trajectories(), keys.progress(0))
        samples = [make_trajectory(0, index, group_size=2) for index in range(2)]
        works = (consumer.publish_sample(delivery, *where, sample) for sample in samples)
        first, last = map(asyncio.ensure_future, works)
        await wait_until(lambda: acknowledged(consumer))
        arrived[0].set()
        await first
        await assert_nothing_is_called_lost(consumer, delivery, arrived[1], last)


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
    second = make_consumer(broker, keys, "b")
    deliveries: Any = await second.fetch(3, 0)
    assert [(delivery.entry_id, delivery.attempts) for delivery in deliveries] == [
        (ids[1], 1),
        (ids[2], 1),
    ], "not counted"
    assert await consumer.fetch(3, 0) == [], "what was handed back is given to nobody here"


async def test_what_was_lost_while_it_waited_is_not_given(broker, keys):
    ids = await publish(broker, keys, 3)
    consumer = make_consumer(broker, keys)
    second = make_consumer(broker, keys, "b")
    (first,) = await fetched(consumer, 1)
    assert await consumer.complete([(first, None)], keys.scores(), ahead=2) == [True]
    await fall_silent(broker, keys, "a", ids[1:2])
    assert [delivery.entry_id for delivery in await second.fetch(1, 0)] == ids[1:2]
    await consumer.renew()
    assert [delivery.entry_id for delivery in await fetched(consumer, 1)] == ids[2:]


async def test_a_look_for_abandoned_messages_holds_no_more_than_was_asked_for(broker, keys):
    ids = await publish(broker, keys, 4)
    consumer = make_consumer(broker, keys)
    dead = make_consumer(broker, keys, "dead")
    (abandoned,) = await fetched(dead, 1)
    (first,) = await fetched(consumer, 1)
    assert await consumer.complete([(first, None)], keys.scores(), ahead=1) == [True]
    await wait_until(lambda: consumer.num_ahead == 1)
    await fall_silent(broker, keys, "dead", [abandoned.entry_id])
    # As where the time of a look comes between the two calls.
    consumer.takeover.next_at = 0.0
    (second,) = await fetched(consumer, 1)
    assert [second.entry_id] == list(consumer.held) == ids[2:3], "what came ahead"
    assert await consumer.complete([(second, None)], keys.scores(), ahead=1) == [True]
    assert list(consumer.held) == [], "nothing new before what was abandoned"
    assert [delivery.entry_id for delivery in await fetched(consumer, 1)] == [abandoned.entry_id]


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
