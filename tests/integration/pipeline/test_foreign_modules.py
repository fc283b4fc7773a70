"""What is installed, outside the clone: a folder of the user's with packages called like folders of ours."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.support.runs import simulated_config
from tidemill.common.process.programs import ROOT, Program, run_own

REWARD = """
from common.utils import value
from services import NAME

def score(data_source, solution_str, ground_truth):
    return {"score": value(), "is_theirs": float(NAME == "theirs")}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed into, built from a copy of the sources."""
    work = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("common", "services", "tidemill"):
        shutil.copytree(ROOT / name, work / "source" / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, work / "source")
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *offline, "-w", work, work / "source"], check=True)
    (wheel,) = work.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"tidemill", wheel.name[:14] + ".dist-info"}
    assert {"tidemill/py.typed", "tidemill/services/console/web/templates/base.html"} <= {*names}
    assert any(name.startswith("tidemill/common/redis/lua/") for name in names)
    subprocess.run([*pip, "install", *offline[:2], "--target", work / "site", wheel], check=True)
    return work / "site"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With packages of the user's own."""
    for name in ("services", "common", "benchmarks"):
        package = tmp_path / "work" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("NAME = 'theirs'\n")
    (tmp_path / "work" / "common" / "utils.py").write_text("def value(): return 0.5\n")
    (tmp_path / "work" / "my_reward.py").write_text(REWARD)
    return tmp_path / "work"


@pytest.mark.parametrize("reward", ["my_reward:score", "my_reward.py:score"])
def test_a_run_and_its_reward_each_import_their_own(site, folder, tmp_path, reward):
    config = simulated_config(
        tmp_path, run_id="shadowed", trainer__steps=2, reward__function=reward,
        streams__archive={"enabled": True},
    )  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    done = subprocess.run(
        [sys.executable, site / "bin" / "tidemill", "up", "run.yaml"],
        cwd=folder,
        env=os.environ | {"TIDEMILL_RUNS_DIR": str(tmp_path / "runs"), "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert '"rewards/is_theirs/mean": 1.0' in (tmp_path / "runs/shadowed/metrics.jsonl").read_text()


def test_our_own_modules_are_started_without_the_working_directory(folder, monkeypatch):
    path = [entry for entry in sys.path if entry not in ("", str(ROOT))]
    for directory in (folder, ROOT):
        monkeypatch.chdir(directory)
        monkeypatch.setattr(sys, "path", path)
        assert run_own(Program.SANDBOX, "run") == [sys.executable, "-P", "-m", Program.SANDBOX, "run"]
    monkeypatch.setattr(sys, "path", [str(ROOT), *path])  # what `python -m tidemill` does in a clone
    assert run_own(Program.SANDBOX, "run") == [sys.executable, "-m", Program.SANDBOX, "run"]
