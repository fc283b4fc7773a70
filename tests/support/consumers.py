"""Consumers for tests: making them, giving them messages, and reading their state."""

from collections.abc import Sequence
from typing import Any

from tests.support.trajectories import make_trajectory
from tidemill.common import streams
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Delivery, Entry, Garbled
from tidemill.common.streams.consumer import Consumer
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import DeadLetter, Lane, Score, ScoreStatus, Ticket, Trajectory

LEASE_S = 3600.0
"""Far longer than any test: leases end because a test ages them, never because it is slow."""


def make_consumer(
    broker: Broker, keys: Keys, name: str = "a", lease_s: float = LEASE_S, **more: Any
) -> Consumer[Trajectory]:
    name_of_key = (keys.trajectories(), REWARD_GROUP, name, Trajectory)
    return Consumer(broker, *name_of_key, lease_s=lease_s, dead_key=keys.dead, **more)


def make_rollout(broker: Broker, keys: Keys, name: str = "a", lane: Lane = Lane.TRAIN) -> Consumer[Ticket]:
    prompts = keys.prompts(lane)
    return Consumer(broker, prompts, ROLLOUT_GROUP, name, Ticket, lease_s=LEASE_S, dead_key=keys.dead)


def make_score(ticket: int) -> Score:
    return Score(ticket=ticket, index=0, status=ScoreStatus.OK, value=float(ticket))


def make_dead_letter(entry: Garbled, worker: str = "a") -> DeadLetter:
    return streams.dead_letter("trajectories", entry.entry_id, entry.fields, entry.error, worker)


async def publish(broker: Broker, keys: Keys, count: int) -> list[str]:
    await streams.ensure_group(broker, keys.trajectories(), REWARD_GROUP)
    return await streams.append(
        broker, keys.trajectories(), *(make_trajectory(number) for number in range(count))
    )


async def fetched(consumer: Consumer[Trajectory], count: int) -> list[Delivery[Trajectory]]:
    deliveries = [delivery for delivery in await consumer.fetch(count, 0) if isinstance(delivery, Delivery)]
    assert len(deliveries) == count
    return deliveries


async def fall_silent(broker: Broker, keys: Keys, consumer: str, ids: Sequence[str]) -> None:
    """Age these entries as if `consumer` had not renewed them for two leases."""
    args = ("IDLE", int(2000 * LEASE_S), "JUSTID")
    await broker.execute("XCLAIM", keys.trajectories(), REWARD_GROUP, consumer, 0, *ids, *args)


async def scored(broker: Broker, keys: Keys) -> list[int]:
    read = await streams.read_range(broker, keys.scores(), Score)
    return [entry.message.ticket for entry in read if isinstance(entry, Entry)]


async def pending(broker: Broker, keys: Keys) -> list[str]:
    return await streams.pending_ids(broker, keys.trajectories(), REWARD_GROUP, "-", "+", 1000)


async def take_ticket(
    broker: Broker, keys: Keys, name: str = "a"
) -> tuple[Consumer[Ticket], Delivery[Ticket]]:
    consumer = make_rollout(broker, keys, name)
    await streams.ensure_group(broker, keys.prompts(), ROLLOUT_GROUP)
    (delivery,) = await consumer.fetch(1, 0)
    assert isinstance(delivery, Delivery)
    return consumer, delivery


async def samples_of(broker: Broker, keys: Keys) -> list[int]:
    read = await streams.read_range(broker, keys.trajectories(), Trajectory)
    return [entry.message.index for entry in read if isinstance(entry, Entry)]
