"""A command on Redis can be cancelled at any moment, however far it has got."""

import asyncio

import pytest

from tidemill.common.redis.broker import Broker


@pytest.mark.parametrize("num_turns", range(12))
async def test_a_cancelled_command_ends_its_task(redis_server, num_turns):
    broker = await Broker.connect(redis_server.url)
    # A second connection has to be opened, which takes most of the turns of the loop tried here.
    holding = asyncio.create_task(broker.execute("XREAD", "BLOCK", 300, "STREAMS", "empty", "0"))
    await asyncio.sleep(0)
    task = asyncio.create_task(broker.execute("XREAD", "BLOCK", 300, "STREAMS", "empty", "0"))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task, holding}, timeout=20)
    await broker.close()
    assert task.cancelled()
