"""`tidemill status` of a run that stopped and whose Redis is gone: its folder tells what it came to."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.trajectories import make_config
from tidemill.common.errors import ConfigError
from tidemill.services.console.__main__ import app
from tidemill.services.console.run.folder import RunFolder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    folder = RunFolder(tmp_path, "one")
    folder.create(make_config(run_id="one", trainer={"steps": 8}))
    lines = [
        {"kind": "step", "step": i, "time": 1.0 + i, "reward": i / 10, "step_time_s": 2.0} for i in range(3)
    ]
    lines.append(
        {"kind": "evaluation", "version": 0, "set": "held", "time": 1.0, "score": 0.31, "num_failed": 0}
    )
    (folder.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder.path / "checkpoints" / "v00000002").mkdir(parents=True)
    return folder


def status(folder: RunFolder, *arguments: str) -> str:
    line = ["status", folder.run_id, "--runs-dir", str(folder.runs), *arguments]
    return CliRunner().invoke(app, line, catch_exceptions=False).output


def test_it_is_read_from_the_folder_and_says_so(folder: RunFolder) -> None:
    text = status(folder)
    for expected in ("stopped", "step 3/8", "0.200", "0.310", "its Redis is not there", "version 2"):
        assert expected in text, expected


def test_programs_get_the_same(folder: RunFolder) -> None:
    tree = json.loads(status(folder, "--json"))
    assert (tree["status"], tree["version"], tree["metrics"]["reward"]) == ("stopped", 3, 0.2)
    assert tree["source"] == str(folder.path)


def test_a_redis_that_does_not_answer_is_no_obstacle(folder: RunFolder) -> None:
    folder.write_address("redis://127.0.0.1:1")
    assert "step 3/8" in status(folder)


def test_a_folder_without_a_run_is_a_plain_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no Redis to ask"):
        status(RunFolder(tmp_path, "nothing"))
