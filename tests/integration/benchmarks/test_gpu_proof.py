"""The proof on a GPU, dry: parts are processes that end within their limit, and are done once."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu.parts import Part
from benchmarks.gpu.runner import Proof
from tests.support.preloaded import REPO
from tests.support.waiting import has_ended

FACTS = {"vllm_problem": "", "bfloat16_problem": "", "gpus": []}


def part(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> Part:
    """A part that runs a program of its own."""
    (folder / "program_of_a_part.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return Part("own", "a program", "program_of_a_part", 1)


def test_a_part_that_runs_over_its_time_is_ended_with_all_that_it_started(tmp_path, monkeypatch):
    """Also a process in a session of its own, and one that does not end when it is asked."""
    program = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(command, start_new_session=True)\n"
        "print('started', child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr("benchmarks.gpu.runner.GRACE_S", 0.3)
    record = Proof(tmp_path, FACTS, dry=True, limit_s=4.0).run(part(tmp_path, monkeypatch, program))
    assert record["state"] == "late" and record["tail"].startswith("started ")
    child = int(record["tail"].split()[1])
    until = time.monotonic() + 10
    while not has_ended(child):
        assert time.monotonic() < until, "the part's child goes on"


def test_the_cheap_parts_of_the_dry_run(tmp_path: Path) -> None:
    """The command itself: a part is done, and once; the table and the last line say so."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--out", str(tmp_path)]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [*command, *arguments], cwd=REPO, env=environment, capture_output=True, text=True, check=False
        )

    done = run("--part", "mfu_8b")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"mfu_8b": "done"}
    result = json.loads((tmp_path / "proof.json").read_text())["parts"]["mfu_8b"]["result"]
    assert (
        result["layers"] == "all" and result["tokens_per_s"] > 0 and result["profile"]["matrix products"] > 0
    )
    wrong = run("--part", "mfu_9b")
    assert wrong.returncode == 2 and "no part" in wrong.stderr
