"""The address of Sentinels leads to the master, and to the next one when it dies."""

import asyncio

import pytest

from tests.support.consumers import make_consumer
from tests.support.servers import SentinelPair, newest_server
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.errors import BrokerError, UnreachableError
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import append, length

SECRET = "correct-horse"

pytestmark = pytest.mark.skipif(not newest_server(), reason="no redis-server")


@pytest.fixture
def pair(tmp_path):
    with SentinelPair(tmp_path) as pair:
        yield pair


async def test_commands_and_scripts_follow_the_master(pair, keys):
    broker = await Broker.connect(pair.url)
    await append(broker, keys.trajectories(), make_trajectory(1))
    async with make_consumer(broker, keys) as consumer:
        held = await consumer.fetch(1, 0.1)
        await wait_until(pair.is_replicated)
        pair.master.kill()
        # The new master does not know the script yet.
        assert await consumer.complete([(delivery, make_trajectory(2)) for delivery in held], keys.scores())
    assert await length(broker, keys.scores()) == 1
    assert (await broker.info("replication"))["role"] == "master"
    assert (await broker.info("server"))["tcp_port"] == str(pair.replica.port)
    await broker.close()


async def test_an_orderly_failover_moves_everybody_while_the_old_master_lives(pair, keys):
    """The old master goes on as a replica: writes and blocking reads must not stay with it."""
    broker = await Broker.connect(pair.url)
    async with make_consumer(broker, keys) as consumer:
        waiting = asyncio.create_task(consumer.fetch(1, 5.0))
        await wait_until(pair.is_replicated)
        await wait_until(pair.fails_over)

        async def has_moved():
            return (await broker.info("server"))["tcp_port"] == str(pair.replica.port)

        await wait_until(has_moved)
        await append(broker, keys.trajectories(), make_trajectory(1))
        while not (fetched := await waiting):
            waiting = asyncio.create_task(consumer.fetch(1, 5.0))
        assert len(fetched) == 1
    await broker.close()


async def test_what_cannot_lead_to_a_master_is_said_without_the_password_and_a_dead_sentinel_passed_over(
    pair, monkeypatch
):
    with pytest.raises(BrokerError, match=r"is a replica of 127\.0\.0\.1.*redis\+sentinel"):
        await Broker.connect(pair.replica.url)
    hosts = f"127.0.0.1:{pair.sentinel.port}"
    broker = await Broker.connect(f"redis+sentinel://127.0.0.1:1,{hosts}/mymaster")
    assert await broker.execute("PING") == b"PONG"
    await broker.close()
    monkeypatch.setenv("TIDEMILL_REDIS_PASSWORD", SECRET)
    monkeypatch.setenv("TIDEMILL_SENTINEL_PASSWORD", SECRET)
    for url in (f"redis+sentinel://{hosts}/another", "redis+sentinel://127.0.0.1:1/mymaster"):
        with pytest.raises(UnreachableError, match="No master found") as caught:
            await Broker.connect(url)
        assert SECRET not in str(caught.value)
    for wrong in (f"redis+sentinel://a:{SECRET}@{hosts}", "redis+sentinel://a:b:c/mymaster"):
        with pytest.raises(BrokerError, match=r"Expected .*redis\+sentinel://host:26379") as refused:
            await Broker.connect(wrong)
        assert SECRET not in str(refused.value)
