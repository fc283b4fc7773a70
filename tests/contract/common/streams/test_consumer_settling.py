"""What a consumer is just settling is not pending any more, and still not lost."""

import asyncio
from typing import Any

import pytest

from tests.support.trajectories import make_trajectory
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Consumer, Delivery, append
from tidemill.common.wire.keys import REWARD_GROUP, Keys
from tidemill.common.wire.messages import Score, ScoreStatus, Trajectory


async def test_renewing_while_an_acknowledgement_is_under_way_loses_nothing(
    broker: Broker, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    await append(broker, keys.trajectories(), make_trajectory(0))
    name = (keys.trajectories(), REWARD_GROUP, "w1", Trajectory)
    async with Consumer(broker, *name, lease_s=60.0, dead_key=keys.dead) as consumer:
        (delivery,) = await consumer.fetch(1, 0.0)
        assert isinstance(delivery, Delivery)
        is_done, may_answer, script = asyncio.Event(), asyncio.Event(), broker.script

        async def slow(script_name: str, *rest: Any) -> Any:
            reply = await script(script_name, *rest)
            if script_name == "complete":  # Redis has done it, its answer is still on the way
                is_done.set()
                await may_answer.wait()
            return reply

        monkeypatch.setattr(broker, "script", slow)
        score = Score(ticket=0, index=0, status=ScoreStatus.OK, value=1.0)
        settling = asyncio.create_task(consumer.complete([(delivery, score)], keys.scores()))
        await is_done.wait()
        await consumer.renew()
        assert not delivery.is_lost
        may_answer.set()
        assert await settling == [True]
