"""A Redis for the runs of one file, checks of users' code in little time, and whether there are jails."""

import subprocess
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.process import checks
from tidemill.common.redis.embedded import EmbeddedRedis


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def forked_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tidemill check` asks forked processes; in `common/test_algorithm_check.py`, those that users' does."""
    # Not above: that import notes the environment, some of which is set after this file was read.
    from tests.support.preloaded import run_check

    forking = SimpleNamespace(run=run_check, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(checks, "subprocess", forking)


@pytest.fixture(scope="session")
def isolated() -> None:
    """A jail can be set up here; where a user may not make namespaces, the test is skipped."""
    # Not above: every process of a parallel run reads this file, and few tests need a jail.
    from tidemill.services.reward.sandbox.bubblewrap import SandboxError
    from tidemill.services.reward.sandbox.job import probe

    try:
        probe(SandboxConfig(memory_mb=256, file_mb=4))
    except SandboxError as error:
        pytest.skip(f"no jails here: {error}")  # users may be forbidden to make namespaces
