import os

import pytest

from tidemill.common.config.rollout import RolloutConfig
from tidemill.services.rollout.engines.engine import share_cores


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)))


@pytest.mark.parametrize(("workers", "expected"), [(1, 8), (2, 4), (3, 2), (20, 1)])
def test_workers_share_the_cores_less_one(workers: int, expected: int) -> None:
    assert share_cores(RolloutConfig(workers=workers)) == expected
    assert (os.environ["OMP_WAIT_POLICY"], os.environ["OMP_NUM_THREADS"]) == ("PASSIVE", str(expected))


def test_the_environment_wins_over_the_share_and_the_config_over_both() -> None:
    os.environ |= {"OMP_NUM_THREADS": "3,2", "OMP_WAIT_POLICY": "ACTIVE"}
    assert share_cores(RolloutConfig()) == 3
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    assert share_cores(RolloutConfig(num_threads=5)) == 5
    assert os.environ["OMP_NUM_THREADS"] == "5"
