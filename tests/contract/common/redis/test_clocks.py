"""Leases and heartbeats when clocks are wrong: those of machines, and that of Redis itself."""

import asyncio
import time

import pytest

from tests.support.clocks import set_clock_back
from tests.support.consumers import LEASE_S, fall_silent, fetched, make_consumer, pending, publish
from tests.support.waiting import wait_until
from tidemill.common.process.heartbeats import (
    GONE_AFTER_S,
    Heartbeat,
    forget_heartbeats,
    publish_heartbeat,
    read_heartbeats,
)
from tidemill.common.process.replicas import read_replicas
from tidemill.common.streams import Delivery
from tidemill.common.wire.keys import REWARD_GROUP

TEN_MINUTES_S = 600.0


async def test_what_a_dead_consumer_holds_is_taken_over_after_a_lease_though_the_clock_is_set_back(
    broker, keys
):
    await publish(broker, keys, 3)
    held = await fetched(make_consumer(broker, keys, "dead"), 3)
    await set_clock_back(broker, keys.trajectories(), REWARD_GROUP, TEN_MINUTES_S)
    rival = make_consumer(broker, keys, "rival", lease_s=0.2)
    reclaimed: list[str] = []

    async def takes_over():
        reclaimed.extend(entry.entry_id for entry in await rival.fetch(10, 0))
        return len(reclaimed) == 3

    await wait_until(takes_over)
    assert sorted(reclaimed) == sorted(delivery.entry_id for delivery in held)


async def test_a_live_consumer_keeps_its_lease_when_the_clock_is_set_back(broker, keys):
    await publish(broker, keys, 1)
    holder = make_consumer(broker, keys, "holder")
    rival = make_consumer(broker, keys, "rival")
    (held,) = await fetched(holder, 1)
    await set_clock_back(broker, keys.trajectories(), REWARD_GROUP, TEN_MINUTES_S)
    for _ in range(3):
        assert await rival.fetch(10, 0) == []
        rival.takeover.next_at = 0.0
        await holder.renew()
    assert not held.is_lost
    assert await pending(broker, keys) == [held.entry_id]


async def test_who_has_looked_before_notices_that_the_clock_is_set_back(broker, keys):
    await publish(broker, keys, 0)
    rival = make_consumer(broker, keys, "rival")
    assert await rival.fetch(10, 0) == []
    await publish(broker, keys, 1)
    (held,) = await fetched(make_consumer(broker, keys, "dead"), 1)
    await set_clock_back(broker, keys.trajectories(), REWARD_GROUP, TEN_MINUTES_S)
    now_ms, asked_at = rival.takeover._clock
    rival.takeover._clock = (now_ms + int(2000 * LEASE_S), asked_at)  # as if the server were behind now
    for _ in range(2):  # the first look notices it, the second one begins the lease
        rival.takeover.next_at = 0.0
        assert await rival.fetch(10, 0) == []
    await asyncio.sleep(0.01)
    (row,) = await broker.execute("XPENDING", keys.trajectories(), REWARD_GROUP, "-", "+", 10)
    assert row[0].decode() == held.entry_id and row[2] > 0


async def test_nothing_is_taken_over_when_the_clock_jumps_ahead(broker, keys):
    """All leases look expired then; who lives renews them first."""
    await publish(broker, keys, 1)
    holder = make_consumer(broker, keys, "holder")
    rival = make_consumer(broker, keys, "rival")
    (held,) = await fetched(holder, 1)
    assert await rival.fetch(10, 0) == []
    now_ms, asked_at = rival.takeover._clock
    rival.takeover._clock = (now_ms - int(2000 * LEASE_S), asked_at)
    await fall_silent(broker, keys, "holder", [held.entry_id])
    rival.takeover.next_at = 0.0
    assert await rival.fetch(10, 0) == []
    await holder.renew()
    rival.takeover.next_at = 0.0
    assert await rival.fetch(10, 0) == []
    assert not held.is_lost
    # One that is not renewed is taken, if a lease later.
    await fall_silent(broker, keys, "holder", [held.entry_id])
    rival.takeover.next_at = 0.0
    rival.takeover.patient_until = 0.0
    (delivery,) = await rival.fetch(10, 0)
    assert isinstance(delivery, Delivery)


@pytest.mark.parametrize("whose", ["the one that writes it", "the one that reads it", "both"])
@pytest.mark.parametrize("skew_s", [-3600.0, 3600.0])
async def test_heartbeats_are_by_the_servers_clock_whatever_machines_say(
    broker, keys, monkeypatch, skew_s, whose
):
    wall = time.time
    before_s = await broker.server_time_s()
    with monkeypatch.context() as patch:
        if whose != "the one that reads it":
            patch.setattr(time, "time", lambda: wall() + skew_s)
        await publish_heartbeat(broker, keys, Heartbeat("w", "rollout"))
    with monkeypatch.context() as patch:
        if whose != "the one that writes it":
            patch.setattr(time, "time", lambda: wall() + skew_s)
        (beat,) = await read_heartbeats(broker, keys)
        assert beat.is_alive and abs(beat.age_s) < GONE_AFTER_S
        assert await forget_heartbeats(broker, keys, GONE_AFTER_S) == 0
    assert before_s <= beat.at <= beat.read_at <= await broker.server_time_s()


async def test_a_heartbeat_from_before_the_clock_was_set_back_is_not_alive(broker, keys, monkeypatch):
    execute = broker.execute

    async def ahead(*command):
        reply = await execute(*command)
        return [b"%d" % (int(reply[0]) + 600), reply[1]] if command == ("TIME",) else reply

    dead = Heartbeat("dead", "replica", servers="judge", url="http://dead")
    alive = Heartbeat("alive", "replica", servers="judge", url="http://alive")
    with monkeypatch.context() as patch:
        patch.setattr(broker, "execute", ahead)
        await publish_heartbeat(broker, keys, Heartbeat("dead", "rollout"))
        await publish_heartbeat(broker, keys, dead)
    await publish_heartbeat(broker, keys, alive)
    (beat,) = await read_heartbeats(broker, keys, ("rollout",))
    assert not beat.is_alive
    assert await read_replicas(broker, keys, "judge") == ["http://alive"]
