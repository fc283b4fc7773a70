"""The list of runs on the web."""

from pathlib import Path

import pytest

from tests.conftest import SERVERS
from tests.support.models import run_config
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.state import publish_config
from tidemill.common.wire.keys import RUNS, Keys
from tidemill.services.console.web.runs import Catalog


@pytest.mark.parametrize("redis_server", sorted(SERVERS)[:1], indirect=True)
async def test_a_run_that_somebody_only_named_is_not_listed(
    redis_server: EmbeddedRedis, broker: Broker, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_REDIS_URL", redis_server.url)
    await publish_config(broker, keys, run_config(tmp_path))
    await broker.execute("SADD", RUNS, "invented")
    catalog = Catalog(tmp_path)
    assert [line.run_id for line in await catalog.lines() if line.run_id in (keys.run_id, "invented")] == [
        keys.run_id
    ]
    assert await catalog.exists(keys.run_id) and not await catalog.exists("invented")
    await broker.execute("SREM", RUNS, "invented")
