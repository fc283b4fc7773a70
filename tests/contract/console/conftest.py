"""What tests of commands share: a run in Redis, and the command line."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from typer.testing import CliRunner, Result

from tidemill.common.redis.broker import URL_VARIABLE, Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.wire.keys import Keys
from tidemill.services.console.__main__ import app
from tidemill.services.console.run.folder import RUN_VARIABLE

Act = Callable[[Callable[[Broker], Coroutine[Any, Any, Any]]], Any]


@pytest.fixture
def act(redis_server: EmbeddedRedis) -> Act:
    """Work on Redis from a test that is not async: the commands have loops of their own."""

    def act(work: Callable[[Broker], Coroutine[Any, Any, Any]]) -> Any:
        async def connected() -> Any:
            broker = await Broker.connect(redis_server.url)
            try:
                return await work(broker)
            finally:
                await broker.close()

        return asyncio.run(connected())

    return act


@pytest.fixture
def tidemill(
    redis_server: EmbeddedRedis, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Result]]:
    """Call a command on the test's run."""
    monkeypatch.setenv(URL_VARIABLE, redis_server.url)
    monkeypatch.setenv(RUN_VARIABLE, keys.run_id)

    def tidemill(*words: str, **options: Any) -> Result:
        options = {"catch_exceptions": False} | options
        return CliRunner().invoke(app, [*words, "--runs-dir", str(tmp_path)], **options)

    yield tidemill
    structlog.reset_defaults()  # the commands turn logging off
