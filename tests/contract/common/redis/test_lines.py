"""Calls of one turn of the loop share a round trip, and nothing else."""

import asyncio

import pytest
from redis import exceptions as redis_errors

from tests.support.trajectories import make_trajectory
from tidemill.common.redis import lines
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import OffsetReader, append
from tidemill.common.wire.messages import Trajectory

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(params=[lines.Line, lines.PlainLine])
async def client(redis_server, request, monkeypatch):
    """With the parts of redis-py that we know inside, and with others."""
    if request.param is lines.PlainLine:
        monkeypatch.setattr(lines, "has_known_parts", lambda connection: False)
    broker = await Broker.connect(redis_server.url)
    assert type(broker.redis._shared) is request.param
    yield broker.redis
    await broker.close()


async def reads_of(client: lines.Client) -> int:
    """How often the server has read from a socket so far."""
    text = (await client.execute_command("INFO", "stats")).decode()
    return int(text.partition("total_reads_processed:")[2].split()[0])


@pytest.mark.parametrize("client", [lines.Line], indirect=True)
async def test_what_is_called_in_one_turn_is_read_in_two_parts(client, keys):
    key = f"{keys.state}:counter"
    before = await reads_of(client)
    calls = [client.execute_command("INCR", key) for _ in range(50)]
    unit = client.exchange([("SET", keys.config, "x"), ("INCR", key)], is_atomic=True)
    *counted, unit_replies = await asyncio.gather(*calls, unit)
    reads = await reads_of(client) - before
    assert reads <= 3, "the first call, which leaves at once, all the others, and the question"
    assert (counted, unit_replies) == (list(range(1, 51)), [b"OK", 51])


async def test_an_error_of_one_call_does_not_touch_the_others(client, keys):
    await client.execute_command("SET", keys.config, "text")
    refused = client.exchange([("INCR", keys.state), ("NO_SUCH_COMMAND",)], is_atomic=True)
    replies = await asyncio.gather(
        client.execute_command("GET", keys.config),
        client.execute_command("INCR", keys.config),
        refused,
        client.exchange([("LPUSH", keys.config, "x"), ("STRLEN", keys.config)]),
        client.execute_command("STRLEN", keys.config),
        client.execute_command("EXISTS", keys.state),
        return_exceptions=True,
    )
    assert (
        replies[0] == b"text" and "not an integer" in str(replies[1]) and "unknown command" in str(replies[2])
    )
    assert "WRONGTYPE" in str(replies[3][0]) and replies[3][1] == 4
    assert replies[4:] == [4, 0], "nothing was done of the refused transaction"


async def test_who_is_cancelled_leaves_the_answers_of_others_in_their_places(client, keys):
    tasks = [asyncio.create_task(client.execute_command("ECHO", str(number))) for number in range(9)]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    assert [reply for reply in replies if isinstance(reply, bytes)] == [b"1", b"2", b"4", b"5", b"7", b"8"]
    blocked = asyncio.create_task(
        client.execute_command("XREAD", "BLOCK", 5000, "STREAMS", keys.dead, "0", is_blocking=True)
    )
    await asyncio.sleep(0.01)
    assert await client.execute_command("ECHO", "a") == b"a", "a command that blocks holds up no other"
    blocked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await blocked


@pytest.mark.parametrize("num_turns", range(12))
async def test_a_command_that_is_cancelled_at_any_moment_ends_its_task(redis_server, num_turns):
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


async def test_what_blocks_is_answered_at_once_and_its_connection_is_used_again(client, keys):
    command = ("XREAD", "BLOCK", 60_000, "STREAMS", keys.dead, "0")
    for _ in range(2):
        calls = [client.execute_command(*command, is_blocking=True) for _ in range(2)]
        blocked = [asyncio.create_task(call) for call in calls]
        while not all(task.done() for task in blocked):
            await client.unblock()  # again and again: neither may block yet
            await asyncio.sleep(0)
        assert [task.result() for task in blocked] == [None, None]
    assert len(client._idle) == 2


async def test_a_connection_that_breaks_fails_all_who_wait_and_the_next_call_has_a_new_one(client):
    await client.execute_command("PING")
    line = client._shared
    calls = [client.execute_command("PING") for _ in range(3)]
    waiting = asyncio.gather(*calls, return_exceptions=True)
    await asyncio.sleep(0)
    line.fail(redis_errors.ConnectionError("reset"))
    assert [type(error) for error in await waiting] == [redis_errors.ConnectionError] * 3
    assert await client.execute_command("PING") == b"PONG"
    assert client._shared is not line


async def test_a_stream_that_flows_is_read_without_blocking(redis_server, keys):
    broker = await Broker.connect(redis_server.url)
    reader = OffsetReader(broker, keys.trajectories(), Trajectory)
    await append(broker, keys.trajectories(), *(make_trajectory(number) for number in range(3)))
    assert [len(await reader.read(1, 1.0)) for _ in range(3)] == [1, 1, 1]
    assert len(broker.redis._idle) == 1, "the first read blocks"
    waiting = asyncio.create_task(reader.read(9, 5.0))  # finds nothing at once, and blocks again
    await asyncio.sleep(0.01)
    await append(broker, keys.trajectories(), make_trajectory(3))
    assert len(await waiting) == 1
    await broker.close()
