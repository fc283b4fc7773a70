"""Servers of a test's own, which it may lock, fill or kill."""

import pytest

from tests.conftest import SERVERS
from tidemill.common.redis.embedded import EmbeddedRedis


@pytest.fixture(params=list(SERVERS))
def own_redis(request, tmp_path):
    """One of each kind. It syncs always: on a slow disk a server that syncs every second writes later than it
    answers, and one that is killed has lost what it has answered."""
    server = EmbeddedRedis(tmp_path / "redis", executable=SERVERS[request.param], appendfsync="always")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def any_redis(tmp_path):
    """One of the preferred kind."""
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    yield server
    server.stop()
