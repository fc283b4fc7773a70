"""Whatever numbers a worker sends, a script ends and Redis serves others.

It runs one script at a time, and one that has written cannot be stopped.
"""

import asyncio
import contextlib
import itertools
import re
from importlib import resources

import pytest
from redis import exceptions as redis_errors

from tests.support.waiting import PATIENCE_S
from tidemill.common.redis.broker import Broker

HUGE = "9000000000000000"
"""The largest that a number in Lua holds as an integer; what is larger, Redis refuses as a count."""
HOSTILE = ("0", "-1", "0.5", HUGE, "9223372036854775807", "1e308", "inf", "-inf", "nan", "")
LUA = resources.files("tidemill.common.redis") / "lua"
SCRIPTS: dict[str, tuple[list[str], list[str], list[int]]] = {
    "append_after": (["stream"], ["9999-0", "1.0", "99999-0", "x"], []),
    "append_part": (["stream", "progress", "parts"], ["group", "holder", "1-0", "0", "0:1", "0:0",
        "payload"], [3, 4, 5]),
    "cache_put": (["cache", "used", "size"], ["digest", "payload", "4096"], [2]),
    "complete": (["stream", "out"], ["group", "holder", "1.0", "1-0", "x", "300-0", "x"], []),
    "continue_after": (["stream"], ["300-0", "400-0", "1"], [0, 1, 2]),
    "finish": (["stream", "state"], ["300-0", "status", "finished"], [0]),
    "limits": (["level", "flight"], ["train", "1000", "4", "60", "600", "900", ".1", "w", "1", "1", "1",
        "old", "5", "going", "id", "1"], [1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15]),
    "move_aside": (["stream", "dead"], ["1.0", "300-0", "200-0", "letter"], [1]),
    "publish_sample": (["stream", "out", "progress", "parts"], ["group", "holder", "1-0", "0", "3", "1.0",
        "x"], [3, 4]),
    "reclaim": (["stream"], ["group", "thief", "1000", "8", "-", "0", ""], [2, 3, 4, 5]),
    "store_result": (["stream", "results", "tickets"], ["group", "holder", "1-0", "0", "0", "3", "x"], [3, 4,
        5]),
    "trim": (["stream", "state"], ["200-0", "mark", "marked", "trimmed", "group", "progress:", ""], [0]),
}  # fmt: skip
"""Scripts with a loop whose length is not that of ARGV: keys, arguments, and which of those are numbers."""


def has_other_loop(source: str) -> bool:
    """Whether a loop ends by anything but the number of arguments."""
    code = re.sub(r"--.*", "", source)
    loops = re.findall(r"\b(?:for\b.*|while\b.*|repeat\b.*)", code)
    return any("#ARGV" not in loop for loop in loops)


async def fill(broker: Broker) -> None:
    """A stream of which somebody holds 300 entries, and some of everything else."""
    await broker.execute("FLUSHALL")
    await broker.execute("XGROUP", "CREATE", "stream", "group", "0", "MKSTREAM")
    await broker.pipeline([("XADD", "stream", f"{n}-0", "v", "1.0", "p", "x") for n in range(1, 301)])
    await broker.execute("XREADGROUP", "GROUP", "group", "holder", "COUNT", 300, "STREAMS", "stream", ">")
    ids = (f"{n}-0" for n in range(1, 301))
    await broker.execute("XCLAIM", "stream", "group", "holder", 0, *ids, "IDLE", 9999)
    rows = [("HSET", "size", "bytes", 32 * 14, "clock", 32), ("HSET", "state", "mark", "marked")]
    for n in range(32):
        rows += [("HSET", "cache", f"digest{n}", "payload"), ("ZADD", "used", n, f"digest{n}")]
        rows += [("ZADD", "flight", 10**15 + n, f"request{n}"), ("HSET", "results", n, "payload")]
        rows += [("HSET", "parts", f"0:{n}", "payload")]
    await broker.pipeline(rows)


def test_every_script_with_such_a_loop_is_tried():
    names = {file.name.removesuffix(".lua") for file in LUA.iterdir() if has_other_loop(file.read_text())}
    assert names == set(SCRIPTS)


@pytest.mark.parametrize("script", [name for name, (_, _, numbers) in SCRIPTS.items() if numbers])
async def test_a_script_ends_whatever_numbers_it_gets(own_redis, script):
    keys, args, numbers = SCRIPTS[script]
    broker = await Broker.connect(own_redis.url)
    await fill(broker)
    filled = [
        ("RESTORE", name, 0, await broker.execute("DUMP", name)) for name in await broker.execute("KEYS", "*")
    ]
    for others, number, value in itertools.product(("", HUGE), numbers, HOSTILE):
        changed = [others or arg if i in numbers else arg for i, arg in enumerate(args)]
        changed[number] = value
        await broker.pipeline([("FLUSHALL",), *filled])
        with contextlib.suppress(redis_errors.ResponseError):
            await asyncio.wait_for(broker.script(script, keys, changed), PATIENCE_S / 12)
        assert await broker.execute("PING") == b"PONG"
    await broker.close()


@pytest.mark.parametrize("idle", HOSTILE)
async def test_what_is_taken_over_is_bounded_and_taken_once(broker, keys, idle):
    """An idle time of 0 finds what the same call has claimed."""
    stream = keys.trajectories()
    await broker.execute("XGROUP", "CREATE", stream, "group", "0", "MKSTREAM")
    await broker.pipeline([("XADD", stream, f"{n}-0", "p", "x") for n in range(1, 1501)])
    await broker.execute("XREADGROUP", "GROUP", "group", "holder", "COUNT", 1500, "STREAMS", stream, ">")
    with contextlib.suppress(redis_errors.ResponseError):
        _, _, reclaimed = await broker.script(
            "reclaim", [stream], ["group", "thief", idle, "2000", "", 0, ""]
        )
        ids = [entry_id for entry_id, _, _ in reclaimed]
        assert len(ids) == len(set(ids)) <= 1000
