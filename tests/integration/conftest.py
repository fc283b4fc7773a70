"""A Redis for the runs of one file."""

from collections.abc import Iterator

import pytest

from tidemill.common.redis.embedded import EmbeddedRedis


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()
