"""What one outage, or one mistake of an operator, must not do to a run."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from redis.exceptions import RedisError

from tests.support.consumers import fall_silent, make_consumer, publish
from tests.support.preloaded import REPO
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.errors import OutageError, UnreachableError
from tidemill.common.files import LockedError
from tidemill.common.redis import blocking_client
from tidemill.common.redis import broker as broker_module
from tidemill.common.redis.blocking_client import make_blocking_client
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.wire import codec
from tidemill.common.wire.keys import REWARD_GROUP, Keys


def test_two_servers_never_write_the_same_data(any_redis, tmp_path):
    with pytest.raises(LockedError, match="another Redis serves"):
        EmbeddedRedis(tmp_path / "redis").start()
    any_redis.kill()
    any_redis.start()  # one that was killed leaves no lock behind
    any_redis.stop()
    again = EmbeddedRedis(tmp_path / "redis")
    again.start()
    again.stop()


async def test_a_worker_may_be_told_to_wait_for_a_server(any_redis, monkeypatch):
    any_redis.kill()
    with pytest.raises(UnreachableError):
        await Broker.connect(any_redis.url)
    monkeypatch.setenv("TIDEMILL_REDIS_WAIT_S", "0.1")
    with pytest.raises(OutageError) as waited:  # no mistake: a Job of Kubernetes is not given up
        await Broker.connect(any_redis.url)
    assert waited.value.exit_code == 1
    monkeypatch.setenv("TIDEMILL_REDIS_WAIT_S", "60")
    connecting = asyncio.create_task(Broker.connect(any_redis.url))
    await asyncio.to_thread(any_redis.start)
    broker = await connecting
    await broker.close()


def test_a_blocking_call_to_a_server_that_hangs_comes_back(any_redis, monkeypatch):
    monkeypatch.setattr(blocking_client, "BLOCKING_TIMEOUT_S", 0.2)
    client = make_blocking_client(any_redis.url)
    assert client.ping()
    os.kill(any_redis.pid, signal.SIGSTOP)
    try:
        with pytest.raises(RedisError):
            client.get("x")
    finally:
        os.kill(any_redis.pid, signal.SIGCONT)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems name these options otherwise")
def test_a_blocking_connection_is_probed_by_the_kernel():
    with socket.create_server(("127.0.0.1", 0)) as listener:  # connecting says nothing to the server
        connection = make_blocking_client(
            f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        ).connection_pool.get_connection()
        assert connection._sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert connection._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        connection.disconnect()


async def test_who_must_stop_does_not_wait_for_a_server_for_ever(any_redis, monkeypatch):
    broker = await Broker.connect(any_redis.url)
    any_redis.kill()
    reading = asyncio.create_task(broker.execute("GET", "x"))
    await wait_until(lambda: broker.waited_s > 0)
    assert not reading.done()
    monkeypatch.setattr(broker_module, "STOP_PATIENCE_S", 0.1)
    broker.is_stopping = True
    with pytest.raises(OutageError, match="asked to stop"):
        await reading
    await broker.close()


async def test_after_an_outage_nobody_takes_what_another_could_not_renew(broker, keys):
    """All leases look expired then: each worker first gets one lease to renew its own."""
    await publish(broker, keys, 3)
    healthy = make_consumer(broker, keys, "healthy")
    rival = make_consumer(broker, keys, "rival")
    held = await healthy.fetch(3, 0)
    ids = [delivery.entry_id for delivery in held]
    await fall_silent(broker, keys, "healthy", ids)
    broker.waited_s += 1.0
    broker.num_interruptions += 1
    assert await rival.fetch(3, 0) == []
    assert await healthy.fetch(3, 0) == []
    assert set(healthy.held) == set(ids)


async def test_lost_deliveries_are_found_behind_others_that_were_trimmed(broker, keys):
    key = keys.trajectories()
    ids = await publish(broker, keys, 8)
    consumer = make_consumer(broker, keys)
    await broker.execute(*delivery_of(keys, 7))  # the answer is lost
    await broker.execute("XDEL", key, *ids[:2], *ids[3:5])
    for lost in ([ids[2], ids[5]], [ids[6]]):
        broker.num_interruptions += 1
        assert [delivery.entry_id for delivery in await consumer.fetch(2, 0)] == lost
    assert [delivery.attempts for delivery in consumer.held.values()] == [1] * 3
    rows = await broker.execute("XPENDING", key, REWARD_GROUP, "-", "+", 9)
    assert [row[0].decode() for row in rows] == list(consumer.held)


async def test_who_starts_after_an_outage_leaves_others_a_lease_to_renew(broker, keys):
    """Three outages, and a worker started after each: nothing is taken from the one that lives."""
    await publish(broker, keys, 3)
    healthy = make_consumer(broker, keys, "healthy")
    held = await healthy.fetch(3, 0)
    for number in range(3):
        await fall_silent(broker, keys, "healthy", [delivery.entry_id for delivery in held])
        async with make_consumer(broker, keys, f"new{number}") as starting:
            assert await starting.fetch(3, 0) == []
            await healthy.renew()
    rows = await broker.execute("XPENDING", keys.trajectories(), REWARD_GROUP, "-", "+", 9)
    assert [(row[1], row[3]) for row in rows] == [(b"healthy", 1)] * 3


async def test_a_look_that_an_outage_cut_short_takes_nothing_when_redis_is_back(broker, keys, monkeypatch):
    """It was asked before the outage, and would be answered after it, when all leases look expired."""
    await publish(broker, keys, 1)
    healthy = make_consumer(broker, keys, "healthy")
    rival = make_consumer(broker, keys, "rival")
    held = await healthy.fetch(1, 0)
    await fall_silent(broker, keys, "healthy", [delivery.entry_id for delivery in held])
    execute = broker.redis.execute_command
    refusals = [ConnectionError("away")] * 3

    async def away(*command, **options):
        if refusals:
            raise refusals.pop()
        return await execute(*command, **options)

    monkeypatch.setattr(broker.redis, "execute_command", away)
    for _ in range(3):
        assert await rival.fetch(1, 0) == []
    assert broker.waited_s > 0
    await healthy.renew()
    assert healthy.holds(held[0])


async def test_who_starts_takes_at_once_what_was_given_back(broker, keys):
    await publish(broker, keys, 3)
    leaving = make_consumer(broker, keys, "leaving")
    silent = make_consumer(broker, keys, "silent")
    given_back = await leaving.fetch(2, 0)
    kept = await silent.fetch(1, 0)
    await leaving.leave()
    await fall_silent(broker, keys, "silent", [delivery.entry_id for delivery in kept])
    async with make_consumer(broker, keys, "new") as starting:
        taken_over = [(held.entry_id, held.attempts) for held in await starting.fetch(3, 0)]
        assert taken_over == [(delivery.entry_id, 1) for delivery in given_back]
        starting.takeover.next_at = 0.0
        starting.takeover.patient_until = 0.0
        assert [held.attempts for held in await starting.fetch(3, 0)] == [2]


def delivery_of(keys: Keys, count: int) -> tuple[Any, ...]:
    """The command by which Redis delivers entries to consumer a, which does not see them."""
    stream = keys.trajectories()
    return ("XREADGROUP", "GROUP", REWARD_GROUP, "a", "COUNT", count, "STREAMS", stream, ">")


async def has_waiting_client(broker: Broker) -> bool:
    return (await broker.info("clients"))["blocked_clients"] == "1"


async def test_a_connection_that_is_back_at_once_costs_no_lease(any_redis, keys):
    """The server is never away: only the answer of one call is lost with its connection."""
    broker = await Broker.connect(any_redis.url)
    second = await Broker.connect(any_redis.url)
    await publish(broker, keys, 0)
    consumer = make_consumer(broker, keys, "a")
    fetching = asyncio.create_task(consumer.fetch(1, 0.2))
    await wait_until(partial(has_waiting_client, second))
    fields = [word for pair in codec.encode(make_trajectory()).items() for word in pair]
    add = ("XADD", keys.trajectories(), "1-0", *fields)
    kill = ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await second.pipeline([add, delivery_of(keys, 1), kill], atomic=True)
    assert await fetching == []
    assert broker.waited_s == 0.0
    assert [held.entry_id for held in await consumer.fetch(1, 0)] == ["1-0"]
    await asyncio.gather(broker.close(), second.close())


async def test_a_connection_that_is_lost_while_nothing_is_under_way_is_noticed(any_redis, keys):
    """A server that was started again may have lost an acknowledgement: its entry is pending once more."""
    broker = await Broker.connect(any_redis.url)
    second = await Broker.connect(any_redis.url)
    await publish(broker, keys, 1)
    consumer = make_consumer(broker, keys, "a")
    assert await consumer.takeover.look(1) == []  # the next one is due in half a lease
    await second.pipeline([delivery_of(keys, 1), ("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")])
    line = broker.redis._shared
    assert line is not None
    await wait_until(lambda: line.error is not None)
    assert [*await consumer.fetch(1, 0), *await consumer.fetch(1, 0)] == [*consumer.held.values()] != []
    assert (broker.num_interruptions, broker.waited_s) == (1, 0.0)
    await asyncio.gather(broker.close(), second.close())


async def test_what_an_answer_brought_that_was_lost_with_the_connection_is_begun_at_once(broker, keys):
    """Redis has it as held by a consumer that never saw it; nobody else would look before its lease ends."""
    await publish(broker, keys, 4)
    consumer = make_consumer(broker, keys, "a")
    rival = make_consumer(broker, keys, "b")
    (held,) = await consumer.fetch(1, 0)
    ((_, entries),) = await broker.execute(*delivery_of(keys, 2))
    unseen = [entry_id.decode() for entry_id, _ in entries]
    broker.waited_s += 1.0
    broker.num_interruptions += 1
    deliveries = await consumer.fetch(5, 0)
    assert [delivery.entry_id for delivery in deliveries] == unseen
    assert set(consumer.held) == {held.entry_id, *unseen} and consumer.holds(held)
    assert [delivery.attempts for delivery in deliveries] == [1, 1], "nobody has begun them"
    rows = await broker.execute("XPENDING", keys.trajectories(), REWARD_GROUP, "-", "+", 9)
    assert [row[3] for row in rows] == [1] * 3, "what is worked on does not count as delivered again"
    assert len(await consumer.fetch(5, 0)) == 1, "then what is new"
    assert await rival.fetch(5, 0) == []
    ids = await publish(broker, keys, 3)
    await broker.execute(*delivery_of(keys, 3))
    broker.num_interruptions += 1
    assert [(await consumer.fetch(1, 0))[0].entry_id for _ in ids] == ids, "each free slot gets one"


async def test_a_consumer_whose_renewal_died_says_so(broker, keys):
    consumer = make_consumer(broker, keys, "a")

    async def fail():
        raise PermissionError("no XCLAIM for this user")

    async with consumer:
        assert consumer._renewal is not None
        consumer._renewal.cancel()
        consumer._renewal = asyncio.create_task(fail())
        await asyncio.wait({consumer._renewal})
        with pytest.raises(PermissionError, match="no XCLAIM"):
            await consumer.fetch(1, 0)
        consumer._renewal = None


CROWDED = """
import asyncio, resource
from tidemill.common.redis.broker import Broker

def fill():
    while True:
        try: held.append(open('/dev/null'))
        except OSError: break

async def main():
    broker = await Broker.connect()
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    fill()
    broker.redis.disconnect()
    await asyncio.sleep(0)
    fill()
    work = asyncio.ensure_future(broker.execute('PING'))
    await asyncio.wait({work}, timeout=2)
    for file in held[:8]: file.close()
    print(await work)
    fill()
    await Broker.connect()

held = []
asyncio.run(main())
"""


def test_a_process_that_may_open_no_more_files_says_that_and_not_that_redis_is_away(any_redis):
    """With the limit, and how to raise it: at the start, and when it happens later."""
    environment = {**os.environ, "TIDEMILL_REDIS_URL": any_redis.url, "TIDEMILL_REDIS_WAIT_S": "60"}
    command = [sys.executable, "-c", CROWDED]
    done = subprocess.run(command, env=environment, cwd=REPO, capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert "b'PONG'" in said, "it goes on when there is room again"
    assert "no connection to Redis can be opened" in said and "64 files" in said and "ulimit -n" in said
    assert "waiting for Redis" not in said
    assert done.returncode == 1 and "BrokerError: no connection to Redis at" in said
