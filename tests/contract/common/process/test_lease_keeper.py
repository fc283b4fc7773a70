"""Leases while the event loop of their holder stands still."""

import asyncio
import time

from tests.support.consumers import make_consumer
from tests.support.trajectories import make_trajectory
from tests.support.waiting import PATIENCE_S
from tidemill.common.process.heartbeats import BLOCKING, STARVED, STARVED_S, Heartbeat
from tidemill.common.process.lease_keeper import LeaseKeeper
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.client import make_client
from tidemill.common.streams import append

LEASE_S = 2.0


def hold_up_the_loop() -> None:
    time.sleep(2 * LEASE_S)  # what users' code does where it should await


async def test_a_loop_that_stands_still_loses_no_lease_and_what_it_did_is_named(broker, keys, redis_server):
    lease_keeper = LeaseKeeper(lambda: Broker(make_client(redis_server.url)))
    lease_keeper.start()
    async with make_consumer(broker, keys, "mine", LEASE_S, lease_keeper=lease_keeper) as mine:
        await append(broker, keys.trajectories(), make_trajectory(1))
        (held,) = await mine.fetch(1, 1.0)
        hold_up_the_loop()
        another = make_consumer(broker, keys, "other", LEASE_S)
        assert await another.fetch(1, 0.0) == []  # long after the lease would have ended
        assert await mine.complete([(held, None)], keys.scores()) == [True]
    beat = Heartbeat("w", "reward")
    lease_keeper.report(beat)
    lease_keeper.stop()
    assert "the event loop was blocked" in beat.detail
    assert "hold_up_the_loop (test_lease_keeper.py, line" in beat.detail


async def test_a_loop_that_is_short_of_cpu_is_told_from_one_that_is_blocked(redis_server):
    """It waits in `select` for something to do, and nobody runs it: no code is at fault."""
    lease_keeper = LeaseKeeper(lambda: Broker(make_client(redis_server.url)))
    lease_keeper.start()
    beat = Heartbeat("w", "reward")
    async with asyncio.timeout(PATIENCE_S):
        while not beat.counts.get(STARVED):
            await asyncio.sleep(0.5)  # without `turned`: to the keeper the loop looks as if it did not run
            lease_keeper.report(beat)
    lease_keeper.stop()
    assert beat.counts[STARVED] == 1 and beat.counts[STARVED_S] >= 1.0
    assert not beat.counts.get(BLOCKING) and not beat.detail
