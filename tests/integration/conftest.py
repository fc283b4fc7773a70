"""A Redis for the runs of one file, and whether this machine has jails."""

from collections.abc import Iterator

import pytest

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.redis.embedded import EmbeddedRedis


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def isolated() -> None:
    """A jail can be set up here; where a user may not make namespaces, the test is skipped."""
    # Not above: every process of a parallel run reads this file, and few tests need a jail.
    from tidemill.services.jobs.sandbox.jail import SandboxError
    from tidemill.services.jobs.sandbox.job import probe

    try:
        probe(SandboxConfig(memory_mb=256, file_mb=4))
    except SandboxError as error:
        pytest.skip(f"no jails here: {error}")
