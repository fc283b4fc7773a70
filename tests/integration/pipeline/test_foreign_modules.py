"""A folder of the user's with modules called like ours: our processes start with ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.runs import simulated_config
from tidemill.common.process.programs import ROOT, Program, run_own

TIDEMILL = Path(sys.executable).with_name("tidemill")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With packages that say when they are imported."""
    for name in ("services", "common"):
        package = tmp_path / "work" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"open({str(tmp_path / name)!r}, 'a').close()\n")
    return tmp_path / "work"


@pytest.mark.skipif(not TIDEMILL.exists(), reason="the project is not installed here")
def test_a_run_starts_where_the_working_directory_has_modules_of_our_names(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "my_reward.py").write_text("def score(data_source, solution_str, ground_truth): return 0.5\n")
    config = simulated_config(
        tmp_path,
        run_id="shadowed",
        trainer__steps=2,
        reward__function="my_reward:score",
        streams__archive={"enabled": True},
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    done = subprocess.run(
        [str(TIDEMILL), "up", "run.yaml"],
        cwd=folder,
        env=os.environ | {"TIDEMILL_RUNS_DIR": str(tmp_path / "runs")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert not (tmp_path / "services").exists() and not (tmp_path / "common").exists()


def test_our_own_modules_are_started_without_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert run_own(Program.JOBS, "run") == [sys.executable, "-P", "-m", "tidemill.services.jobs", "run"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    assert run_own(Program.JOBS, "run")[1] == "-P", "our folder, where we are installed"
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    assert run_own(Program.JOBS, "run") == [sys.executable, "-m", "tidemill.services.jobs", "run"]
