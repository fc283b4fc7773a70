"""Streams as logs: numbered appends, reading by offset and size, trimming, runs that share one Redis."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis import exceptions as redis_errors

from tests.support.consumers import make_consumer
from tests.support.numbered import append_numbered
from tests.support.trajectories import make_commit, make_trajectory
from tidemill.common import streams
from tidemill.common.history import History, StreamName
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import read_state, update_state
from tidemill.common.streams import (
    Delivery,
    Entry,
    Garbled,
    OffsetReader,
    ReadSize,
    append,
    ensure_group,
    log,
    scan,
)
from tidemill.common.streams.consumer import Consumer
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import Commit, Lane, Score, ScoreStatus, Trajectory


def messages_of(entries: list[Any]) -> list[Any]:
    assert all(isinstance(entry, Entry) for entry in entries)
    return [entry.message for entry in entries]


async def append_raw(broker: Broker, key: str, **fields: bytes) -> str:
    pairs = (word for pair in fields.items() for word in pair)
    return str((await broker.execute("XADD", key, "*", *pairs)).decode())


@contextlib.asynccontextmanager
async def full_redis(broker: Broker) -> AsyncIterator[None]:
    """A Redis that has no memory left, for the length of a block."""
    await broker.execute("CONFIG", "SET", "maxmemory", 1)
    try:
        yield
    finally:
        await broker.execute("CONFIG", "SET", "maxmemory", 0)


async def test_readers_by_offset_have_the_limit_that_workers_have(broker, keys):
    key = keys.trajectories()
    await streams.append(broker, key, make_trajectory(0, text="x" * 500), make_trajectory(1))
    broker.max_bytes = 500
    await streams.ensure_group(broker, key, REWARD_GROUP)
    for large, small in [
        await OffsetReader(broker, key, Trajectory).read(),
        await streams.read_range(broker, key, Trajectory),
        (await streams.read_back(broker, key, Trajectory))[::-1],
        await make_consumer(broker, keys).fetch(2, 0),
    ]:
        assert isinstance(large, Garbled) and isinstance(small, Entry | Delivery)


async def test_many_and_large_messages_are_appended_in_order(broker, keys):
    sent = [
        make_trajectory(ticket, text="x" * (400_000 if ticket % 50 == 7 else 10)) for ticket in range(1500)
    ]
    ids = await streams.append(broker, keys.trajectories(), *sent)
    assert len(set(ids)) == 1500
    read = [entry.message.ticket async for entry in streams.scan(broker, keys.trajectories(), Trajectory)]
    assert read == list(range(1500))


async def test_a_numbered_append_happens_once_however_often_it_is_repeated(broker, keys):
    first = [(step, make_commit(step, digest="a")) for step in range(3)]
    again = [(step, make_commit(step, digest="b")) for step in range(1, 5)]
    appended = [await append_numbered(broker, keys.commits, commits) for commits in (first, first, again)]
    assert appended == [3, 0, 2]
    read = await streams.read_range(broker, keys.commits, Commit)
    assert "".join(commit.digest for commit in messages_of(read)) == "aaabb"
    assert [entry.entry_id for entry in read] == [streams.entry_id_of(step) for step in range(5)]
    assert await append_numbered(broker, keys.commits, []) == 0
    await streams.trim_before(broker, keys.commits, streams.entry_id_of(5))
    assert await append_numbered(broker, keys.commits, again) == 0, "nor after a trim"
    writers = []
    for writer in "abcd":
        writers.append([(step, make_commit(step, digest=writer)) for step in range(5, 25)])
    await asyncio.gather(*(append_numbered(broker, keys.commits, commits) for commits in writers))
    read = await streams.read_range(broker, keys.commits, Commit)
    assert [commit.step for commit in messages_of(read)] == list(range(5, 25)), "of several writers one wins"


async def test_an_append_that_can_never_work_is_an_error(broker, keys):
    await broker.execute("SET", keys.commits, "not a stream")
    for call in (
        append_numbered(broker, keys.commits, [(0, make_commit(0))]),
        append_numbered(broker, keys.commits, [(0, make_commit(0)), (1, make_commit(1))]),
        streams.append(broker, keys.commits, make_commit(0)),
    ):
        with pytest.raises(redis_errors.ResponseError, match="WRONGTYPE"):
            await call


async def test_a_transaction_that_redis_refuses_for_lack_of_memory_leaves_nothing(broker, keys):
    commands = [("XADD", keys.commits, streams.entry_id_of(n), "v", "1.0", "p", b"x") for n in range(3)]
    async with full_redis(broker):
        with pytest.raises(redis_errors.ResponseError):
            await broker.redis.exchange(commands, is_atomic=True)
    assert await streams.length(broker, keys.commits) == 0


async def test_a_full_redis_is_trimmed(broker, keys):
    ids = await streams.append(broker, keys.trajectories(), *map(make_trajectory, range(5)))
    mark = streams.Mark(keys.state, "trimming", b'"m"')
    async with full_redis(broker):
        await broker.script("mark", [mark.key], [mark.field, mark.value])
        assert await streams.trim_before(broker, keys.trajectories(), ids[3], mark) == 3
    assert await streams.trimmed_below(broker, keys.state, keys.trajectories()) == ids[3]


async def test_a_reader_resumes_at_its_position(broker, keys):
    await streams.append(broker, keys.trajectories(), *map(make_trajectory, range(5)))
    reader = OffsetReader(broker, keys.trajectories(), Trajectory)
    assert [m.ticket for m in messages_of(await reader.read(count=2))] == [0, 1]
    resumed = OffsetReader(broker, keys.trajectories(), Trajectory, reader.position)
    assert [m.ticket for m in messages_of(await resumed.read())] == [2, 3, 4]
    before = resumed.position
    assert await resumed.read() == []
    assert resumed.position == before
    await streams.append(broker, keys.trajectories(), make_trajectory(5))
    assert [m.ticket for m in messages_of(await resumed.read())] == [5]


async def test_a_range_has_both_its_ends_and_a_scan_every_entry_once(broker, keys):
    await append_numbered(broker, keys.commits, [(step, make_commit(step)) for step in range(7)])
    first = streams.entry_id_of(2)
    last = streams.entry_id_of(4)
    read = await streams.read_range(broker, keys.commits, Commit, first, last)
    assert [c.step for c in messages_of(read)] == [2, 3, 4]
    read = await streams.read_range(broker, keys.commits, Commit, first, count=2)
    assert [c.step for c in messages_of(read)] == [2, 3]
    before = OffsetReader(broker, keys.commits, Commit, streams.id_before(first))
    assert [c.step for c in messages_of(await before.read(count=1))] == [2]
    for batch in (1, 3, 7, 256):
        seen = [entry async for entry in streams.scan(broker, keys.commits, Commit, batch=batch)]
        assert [c.step for c in messages_of(seen)] == list(range(7))


async def test_the_newest_entry_is_the_last_that_can_be_decoded(broker, keys):
    assert await streams.read_newest(broker, keys.commits, Commit) is None
    await streams.append(broker, keys.commits, make_commit(0), make_commit(1))
    await append_raw(broker, keys.commits, v=b"1.0", p=b"torn")
    newest = await streams.read_newest(broker, keys.commits, Commit)
    assert newest is not None and newest.message.step == 1


async def test_an_entry_that_cannot_be_decoded_comes_back_with_its_bytes(broker, keys):
    await streams.append(broker, keys.trajectories(), make_trajectory(0))
    entry_id = await append_raw(broker, keys.trajectories(), v=b"1.0", p=b"\x93\x01")
    await append_raw(broker, keys.trajectories(), other=b"field")
    await streams.append(broker, keys.trajectories(), make_trajectory(1))
    good, torn, foreign, last = await OffsetReader(broker, keys.trajectories(), Trajectory).read()
    assert isinstance(good, Entry) and isinstance(last, Entry) and isinstance(torn, Garbled)
    assert (torn.entry_id, torn.fields) == (entry_id, {b"v": b"1.0", b"p": b"\x93\x01"})
    assert "trajectory: the payload is not msgpack" in torn.error
    assert isinstance(foreign, Garbled) and foreign.fields == {b"other": b"field"}


async def test_trimming_removes_what_lies_below_an_id_and_nothing_else(broker, keys):
    await append_numbered(broker, keys.commits, [(step, make_commit(step)) for step in range(300)])
    assert await streams.trim_before(broker, keys.commits, streams.entry_id_of(123)) == 123
    commits = messages_of(await streams.read_range(broker, keys.commits, Commit))
    assert [c.step for c in commits] == list(range(123, 300))
    assert await streams.trim_before(broker, keys.commits, streams.entry_id_of(123)) == 0
    assert await streams.trim_before(broker, keys.scores(), "5-0") == 0


async def test_a_group_is_created_once_and_tells_where_it_stands(broker, keys):
    key = keys.trajectories()
    assert await streams.group_status(broker, key, REWARD_GROUP) is None
    await streams.ensure_group(broker, key, REWARD_GROUP)
    await streams.ensure_group(broker, key, REWARD_GROUP)
    assert await streams.group_status(broker, key, "other") is None
    ids = await streams.append(broker, key, *map(make_trajectory, range(3)))
    await make_consumer(broker, keys).fetch(2, 0)
    status = await streams.group_status(broker, key, REWARD_GROUP)
    assert status is not None
    assert (status.pending, status.last_delivered, status.consumers) == (2, ids[1], 1)
    assert await streams.pending_ids(broker, key, REWARD_GROUP, "-", "+", 10) == ids[:2]
    assert await streams.pending_ids(broker, key, REWARD_GROUP, ids[1], ids[2], 10) == ids[1:2]


async def dump(broker: Broker, keys: Keys) -> dict[bytes, bytes]:
    names = await broker.execute("KEYS", f"*{keys.run_id}*")
    return {name: await broker.execute("DUMP", name) for name in names}


async def use_everything(broker: Broker, keys: Keys) -> None:
    """Whatever a run does with streams."""
    for lane in Lane:
        await streams.append(broker, keys.trajectories(lane), *map(make_trajectory, range(4)))
        name = (keys.trajectories(lane), REWARD_GROUP, "w", Trajectory)
        consumer = Consumer(broker, *name, lease_s=0.2, dead_key=keys.dead)
        async with consumer:
            held = [delivery for delivery in await consumer.fetch(4, 0) if not isinstance(delivery, Garbled)]
            score = Score(ticket=0, index=0, status=ScoreStatus.FAILED)
            await consumer.complete([(held[0], score), (held[1], None)], keys.scores(lane))
            where = (keys.scores(lane), keys.progress(2, lane))
            await consumer.publish_sample(held[2], *where, make_trajectory(2))
            await consumer.leave()
        await streams.trim_before(broker, keys.trajectories(lane), held[3].entry_id)
    await append_numbered(broker, keys.commits, [(0, make_commit(0))])
    await update_state(broker, keys, version=3)


async def test_two_runs_on_one_redis_never_touch_each_other(broker, keys):
    other_keys = Keys(f"{keys.run_id}.b")
    await streams.append(broker, other_keys.trajectories(), make_trajectory(9))
    await streams.ensure_group(broker, other_keys.trajectories(), REWARD_GROUP)
    await update_state(broker, other_keys, version=7)
    prefix = f"{{{other_keys.run_id}}}".encode()
    before = {name: data for name, data in (await dump(broker, other_keys)).items() if prefix in name}
    names = set(await broker.execute("KEYS", "*"))
    await use_everything(broker, keys)
    after = {name: data for name, data in (await dump(broker, other_keys)).items() if prefix in name}
    assert len(before) == 2
    assert after == before
    assert await read_state(broker, keys) == {"version": 3}
    new = set(await broker.execute("KEYS", "*")) - names
    assert len(new) >= 6
    assert all(f"{{{keys.run_id}}}".encode() in name for name in new)


MIB = 1 << 20
LIMIT_BYTES = 64 << 10


@pytest.fixture
def answers(broker, monkeypatch):
    """How many entries each answer had."""
    counts: list[int] = []
    execute = broker.execute

    async def counting(*command):
        reply = await execute(*command)
        if command[0] in ("XREAD", "XREADGROUP", "XRANGE") and reply:
            counts.append(len(reply if command[0] == "XRANGE" else reply[0][1]))
        return reply

    monkeypatch.setattr(broker, "execute", counting)
    monkeypatch.setattr(broker, "max_bytes", LIMIT_BYTES)
    monkeypatch.setattr(log, "READ_BYTES", LIMIT_BYTES)
    return counts


async def by_offset(broker: Broker, keys: Keys) -> list[int]:
    reader = OffsetReader(broker, keys.trajectories(), Trajectory)
    indices = []
    while entries := await reader.read():
        indices += [entry.message.index for entry in entries]
    return indices


async def by_lease(broker: Broker, keys: Keys) -> list[int]:
    consumer = make_consumer(broker, keys)
    indices = []
    while entries := await consumer.fetch(256, 0):
        indices += [entry.message.index for entry in entries]
    return indices


async def by_scan(broker: Broker, keys: Keys) -> list[int]:
    return [e.message.index async for e in scan(broker, keys.trajectories(), Trajectory)]


async def by_history(broker: Broker, keys: Keys) -> list[int]:
    history = History(keys.run_id, None, broker)
    return [e.message.index async for e in history.scan(StreamName.TRAJECTORIES)]


@pytest.mark.parametrize("read", [by_offset, by_lease, by_scan, by_history])
async def test_answers_have_no_more_bytes_than_fit(broker, keys, answers, read):
    """Small ones, then others of which three fit: one answer goes by what was seen before."""
    await ensure_group(broker, keys.trajectories(), REWARD_GROUP)
    texts = ["x" * size for size, count in ((10, 40), (20_000, 120)) for _ in range(count)]
    samples = [make_trajectory(0, n, text=text, group_size=160) for n, text in enumerate(texts)]
    await append(broker, keys.trajectories(), *samples)
    assert await read(broker, keys) == list(range(160))
    assert answers[0] == log.UNSEEN_SHARE
    assert max(answers) > 16
    assert max(answers[-10:]) <= 3


def test_an_entry_that_is_larger_than_all_that_fits_is_read_alone_and_then_more_again():
    size = ReadSize(64 * MIB)
    assert size.limit(256) == 8 and size.limit(0) == 0
    size.saw([(b"p", b"x" * (log.READ_BYTES + 1))])
    assert size.limit(256) == 1
    for expected in (1, 4, 8):
        size.saw([(b"p", b"x")])
        assert size.limit(256) == expected
    assert ReadSize(None).limit(256) == 256
