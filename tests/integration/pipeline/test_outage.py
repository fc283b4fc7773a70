"""What a reward that fails does to a run: the whole of `make demo-outage`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.preloaded import REPO


@pytest.mark.timeout(1800)
def test_failures_as_zeros_unlearn_and_attempts_learn(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.outage.compare", "--runs-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert list(result) == ["zeros", "left_out", "attempts"]
    assert {tuple(figures) for figures in result.values()} == {("before", "after", "lost")}
    assert [figures["lost"] for figures in result.values()] == [0, 0, 0]
    assert result["zeros"]["after"] < 0.05 < result["zeros"]["before"]
    assert result["left_out"]["after"] > 0.8
    assert result["attempts"]["after"] > 0.85
    assert (tmp_path / "outage.png").stat().st_size > 10_000
