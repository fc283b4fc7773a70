"""A whole reward worker inside the test's process, and what it published."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.process.activity import Activity
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Entry, group_status, read_range
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import Lane, Score, Trajectory
from tidemill.services.reward.worker import serve


@contextlib.asynccontextmanager
async def worker(
    broker: Broker, keys: Keys, name: str = "w1", **reward: Any
) -> AsyncIterator[ServiceContext]:
    """A whole reward worker inside this process."""
    config = make_config(reward={"backoff_s": 0.0, "processes": 1} | reward, streams={"lease_s": 1.0})
    context = ServiceContext("reward", name, keys, config, broker, Path(), Activity("reward"))
    task = asyncio.create_task(serve(context))
    try:
        yield context
        context.stopping.set()
        await asyncio.wait_for(task, 120)
    finally:
        task.cancel()


def group(*texts: str, ticket: int = 0) -> list[Trajectory]:
    return [
        make_trajectory(ticket, index, text=text, group_size=len(texts)) for index, text in enumerate(texts)
    ]


async def scores(broker: Broker, keys: Keys, count: int, lane: Lane = Lane.TRAIN) -> list[Score]:
    """All scores once there are `count`, by index; there must not be more."""

    async def found() -> list[Score]:
        entries = await read_range(broker, keys.scores(lane), Score)
        made = [entry.message for entry in entries if isinstance(entry, Entry)]
        return made if len(made) >= count else []

    made = await wait_until(found)
    assert len(made) == count
    return sorted(made, key=lambda score: score.key)


async def num_pending(broker: Broker, keys: Keys, lane: Lane = Lane.TRAIN) -> int:
    status = await group_status(broker, keys.trajectories(lane), REWARD_GROUP)
    return -1 if status is None else status.pending
