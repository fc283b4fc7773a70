"""What tests of the sandbox share."""

import pytest

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.services.jobs.sandbox.jail import SandboxError
from tidemill.services.jobs.sandbox.job import probe


@pytest.fixture(scope="session")
def isolated() -> None:
    """A jail can be set up here; where a user may not make namespaces, the test is skipped."""
    try:
        probe(SandboxConfig(memory_mb=256, file_mb=4))
    except SandboxError as error:
        pytest.skip(f"no jails here: {error}")
