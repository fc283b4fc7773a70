"""Streams as queues: what cannot be decoded is dead-lettered, and what has vanished is made again."""

from itertools import chain

import pytest

from tests.support.consumers import (
    fall_silent,
    fetched,
    make_consumer,
    make_dead_letter,
    make_rollout,
    make_score,
    pending,
    publish,
    scored,
)
from tests.support.letters import make_ticket
from tests.support.numbered import append_numbered
from tests.support.trajectories import make_trajectory
from tidemill.common import streams
from tidemill.common.errors import LeaseLostError
from tidemill.common.streams import DeadLetterWriter, Delivery, Entry, Garbled, append, length
from tidemill.common.wire import codec
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP
from tidemill.common.wire.messages import DeadLetter, Lane


async def test_an_entry_that_cannot_be_decoded_is_dead_lettered_with_its_bytes(broker, keys):
    await publish(broker, keys, 1)
    payload = b"\x80\x04\x95pickled"
    await broker.execute("XADD", keys.trajectories(), "*", "v", "1.0", "p", payload)
    consumer = make_consumer(broker, keys)
    good, garbled = await consumer.fetch(10, 0)
    assert isinstance(good, Delivery)
    assert isinstance(garbled, Garbled)
    assert await consumer.dead_letter(garbled, make_dead_letter(garbled))
    (entry,) = await streams.read_range(broker, keys.dead, DeadLetter)
    assert isinstance(entry, Entry)
    assert entry.message.fields == {"v": b"1.0", "p": payload}
    assert entry.message.entry_id == garbled.entry_id
    assert await pending(broker, keys) == [good.entry_id]
    assert not await consumer.dead_letter(garbled, make_dead_letter(garbled))
    assert await streams.length(broker, keys.dead) == 1


async def test_a_garbled_entry_of_a_dead_consumer_is_dead_lettered_by_the_next_only(broker, keys):
    await streams.ensure_group(broker, keys.trajectories(), REWARD_GROUP)
    await broker.execute("XADD", keys.trajectories(), "*", "v", "1.0", "p", b"torn")
    dead = make_consumer(broker, keys, "dead")
    rival = make_consumer(broker, keys, "rival")
    (lost,) = await dead.fetch(10, 0)
    assert isinstance(lost, Garbled)
    await fall_silent(broker, keys, "dead", [lost.entry_id])
    (garbled,) = await rival.fetch(10, 0)
    assert isinstance(garbled, Garbled)
    assert not await dead.dead_letter(lost, make_dead_letter(lost, "dead"))
    assert await rival.dead_letter(garbled, make_dead_letter(garbled, "rival"))
    assert await streams.length(broker, keys.dead) == 1


@pytest.mark.parametrize("lane", Lane)
async def test_a_ticket_that_is_trimmed_while_it_is_held_leaves_no_progress(broker, keys, lane):
    """Two tickets are held; the first goes, and its holder publishes nothing more."""
    prompts = keys.prompts(lane)
    first = keys.progress(0, lane)
    second = keys.progress(1, lane)
    await streams.ensure_group(broker, prompts, ROLLOUT_GROUP)
    await append_numbered(broker, prompts, [(number, make_ticket(number)) for number in range(2)])
    consumer = make_rollout(broker, keys, lane=lane)
    held = [delivery for delivery in await consumer.fetch(2, 0) if isinstance(delivery, Delivery)]
    for progress, delivery in zip((first, second), held, strict=True):
        await consumer.start_group(delivery, progress, 0)
    mark = streams.Mark(keys.state, "trimming", b"m")
    await broker.execute("HSET", mark.key, mark.field, mark.value)
    of_tickets = streams.HeldTickets(ROLLOUT_GROUP, *keys.progress_around(lane))
    assert await streams.trim_before(broker, prompts, held[1].entry_id, mark, of_tickets) == 1
    assert [await broker.execute("EXISTS", progress) for progress in (first, second)] == [0, 1]
    assert await streams.pending_ids(broker, prompts, ROLLOUT_GROUP, "-", "+", 10) == [held[1].entry_id]
    with pytest.raises(LeaseLostError):
        await consumer.publish_sample(held[0], keys.trajectories(lane), first, make_trajectory(0))


async def test_entries_trimmed_while_they_were_held_do_not_stay_pending(broker, keys):
    ids = await publish(broker, keys, 4)
    await fetched(make_consumer(broker, keys, "dead"), 4)
    await fall_silent(broker, keys, "dead", ids)
    await streams.trim_before(broker, keys.trajectories(), ids[3])
    (delivery,) = await make_consumer(broker, keys, "rival").fetch(10, 0)
    assert delivery.entry_id == ids[3]
    assert await pending(broker, keys) == ids[3:]


async def test_a_group_that_vanished_is_created_again(broker, keys):
    ids = await publish(broker, keys, 2)
    consumer = make_consumer(broker, keys)
    async with consumer:
        held = await fetched(consumer, 1)
        await broker.execute("XGROUP", "DESTROY", keys.trajectories(), REWARD_GROUP)
        await consumer.renew()
        assert held[0].is_lost
        assert await consumer.complete([(held[0], make_score(0))], keys.scores()) == [False]
        await consumer.hand_back(held)
        await consumer.leave()
        assert await consumer.fetch(10, 0) == []
        again = await fetched(consumer, 2)
        assert [delivery.entry_id for delivery in again] == ids
    assert await scored(broker, keys) == []


async def test_a_lost_delivery_does_not_complete_the_entry_that_has_its_id_now(broker, keys):
    (entry_id,) = await publish(broker, keys, 1)
    consumer = make_consumer(broker, keys)
    (held,) = await fetched(consumer, 1)
    await broker.execute("DEL", keys.trajectories())
    await consumer.renew()
    await streams.ensure_group(broker, keys.trajectories(), REWARD_GROUP)
    fields = chain.from_iterable(codec.encode(make_trajectory(1)).items())
    await broker.execute("XADD", keys.trajectories(), entry_id, *fields)
    group = ("GROUP", REWARD_GROUP, consumer.name)  # given to it, and the answer not read yet
    await broker.execute("XREADGROUP", *group, "COUNT", 1, "STREAMS", keys.trajectories(), ">")
    assert await consumer.complete([(held, make_score(0))], keys.scores()) == [False]
    assert await scored(broker, keys) == []
    assert await pending(broker, keys) == [entry_id]


@pytest.mark.parametrize("lost", [[0], [1], [2], [0, 2], [0, 1, 2]])
async def test_a_result_goes_to_its_own_message_when_others_of_the_call_are_left_out(broker, keys, lost):
    ids = await publish(broker, keys, 3)
    consumer = make_consumer(broker, keys)
    held = await fetched(consumer, 3)
    await fall_silent(broker, keys, "rival", [ids[number] for number in lost])
    await consumer.renew()
    remaining = [number for number in range(3) if number not in lost]
    results = [(delivery, make_score(delivery.message.ticket)) for delivery in held]
    assert await consumer.complete(results, keys.scores()) == [number in remaining for number in range(3)]
    assert await scored(broker, keys) == remaining
    assert await pending(broker, keys) == [ids[number] for number in lost]


async def test_reading_what_is_pending_counts_as_no_delivery(broker, keys):
    """Its answer may be lost as the first one was, again and again, and nobody has begun the entry."""
    await publish(broker, keys, 2)
    consumer = make_consumer(broker, keys, "w1")
    await broker.execute(
        "XREADGROUP", "GROUP", REWARD_GROUP, "w1", "COUNT", 2, "STREAMS", keys.trajectories(), ">"
    )
    for _ in range(3):
        assert len(await consumer._read_unanswered(10)) == 2
    consumer.takeover.ask_again()
    deliveries = await consumer.fetch(10, 0)
    assert [delivery.attempts for delivery in deliveries] == [1, 1]
    rows = await broker.execute("XPENDING", keys.trajectories(), REWARD_GROUP, "-", "+", 10)
    assert [row[3] for row in rows] == [1, 1]


async def test_a_stream_that_vanished_is_created_again(broker, keys):
    await publish(broker, keys, 1)
    rollout = make_rollout(broker, keys)
    consumer = make_consumer(broker, keys)
    await streams.ensure_group(broker, keys.prompts(), ROLLOUT_GROUP)
    await append_numbered(broker, keys.prompts(), [(0, make_ticket(0))])
    (ticket,) = await rollout.fetch(1, 0)
    assert isinstance(ticket, Delivery)
    (held,) = await fetched(consumer, 1)
    await broker.execute("DEL", keys.trajectories(), keys.prompts())
    assert await consumer.complete([(held, make_score(0))], keys.scores()) == [False]
    with pytest.raises(LeaseLostError):
        sample = make_trajectory(group_size=4)
        await rollout.publish_sample(ticket, keys.trajectories(), keys.progress(0), sample)
    await rollout.leave()
    assert await consumer.fetch(1, 0) == []
    await publish(broker, keys, 1)
    await fetched(consumer, 1)


NUM = 40


async def test_a_burst_of_them_reads_each_letter_once(broker, keys, monkeypatch):
    earlier = [DeadLetter(origin="prompts", entry_id=f"{n}-0", error="") for n in range(NUM)]
    await append(broker, keys.dead, *earlier)
    num_read = 0
    execute = broker.execute

    async def counted(*command):
        nonlocal num_read
        reply = await execute(*command)
        num_read += len(reply) if command[:2] == ("XRANGE", keys.dead) else 0
        return reply

    monkeypatch.setattr(broker, "execute", counted)
    letters = DeadLetterWriter(broker, keys, keys.scores())
    for _ in range(2):
        for n in range(NUM):
            await letters.append_unread(Garbled(f"{n}-0", {b"p": b"?"}, "no msgpack"), "trainer")
    assert await length(broker, keys.dead) == 2 * NUM, "one letter for each"
    assert num_read == 2 * NUM


async def test_letters_of_others_are_seen_whenever_they_come(broker, keys):
    letters = DeadLetterWriter(broker, keys, keys.scores())
    assert not await letters.has("1-0")
    for origin in ("scores:eval", "scores"):
        await append(broker, keys.dead, DeadLetter(origin=origin, entry_id="1-0", error=""))
        assert await letters.has("1-0") is (origin == "scores")
