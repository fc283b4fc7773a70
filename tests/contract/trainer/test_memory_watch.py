"""Someone lets Redis evict keys in the middle of a run: that is said at once, and loudly."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.support.training import make_context, trainer_config
from tests.support.waiting import wait_until
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.telemetry import metrics
from tidemill.services.trainer.durable import memory_watch
from tidemill.services.trainer.durable.memory_watch import (
    EVICTS,
    HAS_EVICTED,
    HOLDS_WHAT_IS_NEEDED,
    WAITS_FOR_ARCHIVE,
    MemoryWatch,
)


@pytest.fixture
async def own_broker(tmp_path):
    """A server whose settings a test may change."""
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    broker = await Broker.connect(server.url)
    yield broker
    await broker.close()
    server.stop()


async def test_keys_that_redis_deletes_are_said_and_counted_and_nothing_is_called_safe(
    own_broker, keys, monkeypatch
):
    monkeypatch.setattr(memory_watch, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(memory_watch, "FULL_SHARE", 0.0)
    checkpointer: Any = SimpleNamespace(trimmer=SimpleNamespace(is_waiting=False))
    context = make_context(own_broker, keys, trainer_config(streams__trim=False))
    before = metrics.REDIS_EVICTED_KEYS._value.get()
    with capture_logs() as logs:
        watching = asyncio.ensure_future(MemoryWatch(context, checkpointer).watch())
        await own_broker.execute("CONFIG", "SET", "maxmemory-policy", "allkeys-random")
        await wait_until(lambda: said(logs, EVICTS))
        await own_broker.execute("CONFIG", "SET", "maxmemory", 4 << 20)
        for number in range(200):
            await own_broker.execute("SET", f"filler:{number}", b"x" * 50_000)
        await wait_until(lambda: said(logs, HAS_EVICTED))
        watching.cancel()
    assert not said(logs, HOLDS_WHAT_IS_NEEDED)
    assert not said(logs, WAITS_FOR_ARCHIVE)
    assert metrics.REDIS_EVICTED_KEYS._value.get() > before
    assert metrics.REDIS_MAY_EVICT._value.get() == 1


def said(logs: list[Any], event: str) -> bool:
    return any(line["event"] == event for line in logs)
