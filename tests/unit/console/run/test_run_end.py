"""How a run ended is read from its folder alone, also where its launcher could not write it."""

import asyncio
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.trajectories import make_config
from tidemill.services.console.run.end import (
    LOST,
    RunEnd,
    last_seen_at,
    parse_end,
    process_start,
    read_end,
    started_now,
    write_end,
)
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.web.runs import Catalog

RESUME = "tidemill up c.yaml --run-id one --resume"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path, "one")
    folder.create(make_config(run_id="one", trainer={"steps": 8}))
    return folder


def age(folder: RunFolder) -> None:
    """Let everything of a run be old."""
    for path in folder.path.rglob("*"):
        os.utime(path, (1000, 1000))


def test_an_end_is_read_as_it_was_written(folder: RunFolder) -> None:
    end = RunEnd("failed", "reward-0 cannot do this run", "no module named x", steps=3, of_steps=8, at=5.0)
    write_end(folder, end)
    assert read_end(folder) == end
    assert end.lines[0].startswith("failed after 3 of 8 steps")
    assert end.lines[1:] == ["reason: reward-0 cannot do this run", "last error: no module named x"]


def test_fields_of_a_newer_release_are_ignored_and_what_is_no_end_is_none() -> None:
    assert parse_end({"status": "stopped", "colour": "blue"}) == RunEnd("stopped")
    for values in (None, [], "stopped", {}, {"status": 3}, {"status": "failed", "steps": "many"}):
        assert parse_end(values) is None, values


def test_a_run_whose_launcher_lives_is_running(folder: RunFolder) -> None:
    write_end(folder, started_now(RESUME, 8))
    age(folder)
    assert read_end(folder).status == "running"


async def test_a_run_whose_launcher_was_killed_ended_without_a_word(folder: RunFolder) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    end = replace(started_now(RESUME, 8), pid=process.pid, pid_since=process_start(process.pid))
    write_end(folder, end)
    age(folder)
    assert read_end(folder) == end
    process.kill()
    await process.wait()
    lost = read_end(folder)
    assert (lost.status, lost.at) == (LOST, 1000.0)
    assert "ended without a word" in lost.lines[0] and lost.lines[-1] == f"continue with: {RESUME}"
    (line,) = await Catalog(folder.runs).lines()
    assert line.status == LOST and line.end == lost


def test_a_process_with_the_number_of_the_launcher_is_not_the_launcher(folder: RunFolder) -> None:
    write_end(folder, replace(started_now(RESUME, 8), pid_since="1"))
    assert read_end(folder).status == LOST


def test_a_launcher_on_another_machine_lives_while_its_files_change(folder: RunFolder) -> None:
    write_end(folder, replace(started_now(RESUME, 8), host="elsewhere"))
    assert read_end(folder).status == "running"
    age(folder)
    assert read_end(folder).status == LOST


def test_a_run_of_an_older_release_is_finished_stopped_or_lost(folder: RunFolder) -> None:
    assert read_end(folder).status == "running", "its files have just changed"
    age(folder)
    assert read_end(folder).status == "stopped"
    folder.write_address("unix:///gone.sock")
    age(folder)
    assert read_end(folder).status == LOST
    folder.summary.write_text("{}")
    assert read_end(folder).status == "finished"


def test_a_run_was_last_seen_when_a_log_or_its_redis_was_written(folder: RunFolder) -> None:
    age(folder)
    for path, seconds in ((folder.logs / "trainer.log", 2000), (folder.redis_data / "appendonly.aof", 3000)):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
        os.utime(path, (seconds, seconds))
        assert last_seen_at(folder) == seconds
