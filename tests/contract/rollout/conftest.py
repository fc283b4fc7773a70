"""One or more rollout workers on the broker of a test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.rollout_worker import announce_version, started
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys


@pytest.fixture
def make(broker: Broker, keys: Keys, tmp_path: Path) -> Callable[..., Any]:
    """Start a worker, its follower included, for the length of a block."""
    return lambda name="w1", **config: started(broker, keys, tmp_path, name, **config)


@pytest.fixture
def announce(broker: Broker, keys: Keys, tmp_path: Path) -> Callable[..., Any]:
    return lambda version, term=1: announce_version(broker, keys, tmp_path, version, term)
