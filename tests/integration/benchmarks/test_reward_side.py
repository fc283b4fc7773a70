"""One measurement of reward consumers: real workers, of which some are killed meanwhile."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import reward_scaling, reward_side
from benchmarks.reward_scaling import PARTS, REPO, SETTINGS, files_of, measure, run_for_json
from tests.support.waiting import PATIENCE_S
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import append
from tidemill.common.wire.messages import Trajectory

DELAYS_S = [0.02 + 0.01 * (number % 7) for number in range(200)]


def test_workers_that_are_killed_lose_no_sample_and_score_none_twice() -> None:
    measured = measure(REPO, 2, 8, 2, DELAYS_S)
    assert (measured.killed, measured.lost, measured.twice) == (2, 0, 0)
    assert set(measured.cpu_ms) == set(PARTS)
    assert min(measured.cpu_ms.values()) > 0.0
    assert measured.wall_s > sum(DELAYS_S) / 16


@pytest.mark.parametrize(
    ("num_samples", "num_appended", "kills"), [(20, 19, 0), (4, 1, 1)], ids=["all but one", "no more to kill"]
)
async def test_a_sample_without_a_score_is_lost_and_a_second_score_is_one_too_many(
    monkeypatch: pytest.MonkeyPatch, num_samples: int, num_appended: int, kills: int
) -> None:
    async def append_wrongly(broker: Broker, key: str, *batch: Trajectory) -> None:
        await append(broker, key, batch[0], *batch[:num_appended])

    monkeypatch.setattr(reward_side, "append", append_wrongly)
    monkeypatch.setattr(reward_side, "PATIENCE_S", 4.0)
    result = await reward_side.measure(1, 8, kills, DELAYS_S[:num_samples])
    assert (result["lost"], result["twice"]) == (num_samples - num_appended, 1)
    assert result["killed"] == 0, "where scores stop coming, nobody is killed for the next ones"
    assert 0.0 < result["wall_s"] < 4.0, "until the last score, not until the end of the wait"


def test_a_measurement_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reward_scaling, "START_LIMIT_S", 2.0)
    command = [sys.executable, "-c", "import time; print('it has begun', flush=True); time.sleep(600)"]
    with pytest.raises(SystemExit, match=r"(?s)it has begun.*no result within 2 s"):
        run_for_json(command, [0.0], tmp_path, os.environ)


@pytest.mark.timeout(600)
def test_the_command_ends_with_the_figures_of_all_settings_and_what_was_killed() -> None:
    command = [sys.executable, "-m", "benchmarks.reward_scaling", "--groups", "40", "--kills", "1"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [result[name] for name in ("killed", "lost", "twice")] == [len(SETTINGS), 0, 0]
    settings = {f"{consumers} x {slots}" for consumers, slots in SETTINGS}
    assert set(result["efficiency"]) == set(result["cpu_ms"]) == settings


def test_another_commit_is_measured_in_a_folder_that_is_gone_afterwards() -> None:
    with files_of("HEAD") as folder:
        assert (folder / "benchmarks" / "reward_side.py").exists()
        assert (folder / "services" / "reward" / "worker.py").exists()
        assert str(folder) not in subprocess.check_output(["git", "worktree", "list"], cwd=REPO, text=True)
    assert not folder.exists()


def test_a_commit_that_is_not_there_is_named() -> None:
    with pytest.raises(SystemExit, match="--beside 0123abc: "), files_of("0123abc"):
        pass
