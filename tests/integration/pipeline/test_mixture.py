"""The example of a mixture of experts in short: real services train it along the engine's experts and within
its sampling masks, and what was trained comes out again bit by bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import preloaded
from tests.support.preloaded import REPO
from tests.support.runs import ServiceRun
from tests.support.training import commits_of
from tidemill.common.config import load_config
from tidemill.common.run.state import PROFILES
from tidemill.common.streams import Entry, read_range
from tidemill.common.wire.messages import Trajectory

STEPS = 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    command = [sys.executable, "examples/moe/make_model.py", "--steps", "10", "--out", str(folder)]
    subprocess.run(command, cwd=REPO, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return folder


@pytest.mark.long
async def test_routes_and_masks_are_trained_on_and_replayed_bit_by_bit(model: Path, tmp_path: Path) -> None:
    small = [f"model.path={model}", f"trainer.steps={STEPS}", "trainer.groups_per_step=8"]
    small += ["trainer.loggers=[]", "trainer.evaluation.every=0", "streams.trim=false"]
    config = load_config(REPO / "examples/moe/config.yaml", small)
    async with ServiceRun(tmp_path, config, "mixture") as run:
        profile = run.run_dir / PROFILES / "step-1"
        profile.mkdir(parents=True)  # as `tidemill step --profile` asks for one
        run.start_all()
        assert await run.wait("trainer") == 0, run.log_of("trainer")
        commits = await commits_of(run.broker, run.keys)
        entries = await read_range(run.broker, run.keys.trajectories(), Trajectory)
        assert all(entry.message.choices.claim for entry in entries if isinstance(entry, Entry))
        # The last steps train on samples of older weights, whose routers chose otherwise now and then.
        metrics = commits[-1].metrics
        assert 0.0 < metrics["routes/changed_layers"] <= metrics["routes/changed_tokens"] < 0.5
        assert metrics["logprob_gap/mean"] < 1.0
        assert not any(commit.dropped for commit in commits)
        assert (profile / "rank-0.json.gz").exists()
        (run.run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
        environment = {"TIDEMILL_RUNS_DIR": str(tmp_path), "TIDEMILL_REDIS_URL": run.url}
        steps = ",".join(map(str, range(STEPS)))
        done = preloaded.tidemill("replay", steps, "mixture", "--json", **environment)
        assert done.returncode == 0, done.stderr
        results = json.loads(done.stdout)
        assert [one["step"] for one in results] == list(range(STEPS)) and all(one["equal"] for one in results)
        shown = preloaded.tidemill("step", str(STEPS - 1), "mixture", **environment)
        for name in ("routes/changed_tokens", "routes/logprob_gap_without"):
            assert name in shown.stdout, shown.stdout + shown.stderr
