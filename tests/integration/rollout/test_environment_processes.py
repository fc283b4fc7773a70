"""Environments that block, in processes of their own: hung, killed, closed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.environments import THIS
from tests.support.waiting import wait_until
from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.errors import EnvironmentFaultError
from tidemill.services.rollout.environments import load
from tidemill.services.rollout.environments.environment import Design
from tidemill.services.rollout.environments.player import build_stage
from tidemill.services.rollout.environments.stages import ProcessStage

ROW = {"prompt": "Play.", "ground_truth": 7}


@contextlib.asynccontextmanager
async def opened(**section: Any) -> AsyncIterator[ProcessStage]:
    stage = stage_of(**section)
    try:
        yield stage
    finally:
        await stage.close()


def stage_of(**section: Any) -> ProcessStage:
    config = EnvironmentConfig(**{"processes": 2, **section})
    design = load(config)
    assert isinstance(design, Design)
    return ProcessStage(design, config)


def pids_of(stage: ProcessStage) -> list[int]:
    return [process.pid for process in stage.num_sessions]


@pytest.fixture
def closing(tmp_path: Path) -> Path:
    """A file of a user whose environment tells of its close on disk."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import pathlib, time\n"
        "class Mine:\n"
        "    def __init__(self, folder):\n"
        "        self.folder = folder\n"
        "    def reset(self, row):\n"
        "        self.name = row['name']\n"
        "    def step(self, text):\n"
        "        while text == 'hang': time.sleep(0.05)\n"
        "        return 'more', 0.0, False\n"
        "    def close(self):\n"
        "        pathlib.Path(self.folder, self.name).touch()\n"
    )
    return file


async def test_sessions_keep_their_state_in_one_process_each_and_blocking_does_not_hold_up_others() -> None:
    async with opened(use=f"{THIS}:Guess") as stage:
        games = [await stage.open(ROW | {"ground_truth": number}) for number in range(4)]
        for number, game in enumerate(games):
            await game.reset(ROW | {"ground_truth": number})
        acts = [await game.step("2") for game in games]
        assert [act.is_done for act in acts] == [False, False, True, False]
        assert len(pids_of(stage)) == 2


async def test_a_hung_call_costs_its_session_and_its_process_and_the_others_end_there(closing, tmp_path):
    options = {"folder": str(tmp_path)}
    async with opened(use=f"{closing}:Mine", options=options, call_timeout_s=4.0, processes=1) as stage:
        stuck = await stage.open(ROW)
        healthy = await stage.open(ROW)
        await stuck.reset(ROW | {"name": "stuck"})
        await healthy.reset(ROW | {"name": "other"})
        (old,) = pids_of(stage)
        with pytest.raises(EnvironmentFaultError, match="step took longer than 4 s"):
            await stuck.step("hang")
        assert (await healthy.step("x")).messages
        replaced = await stage.open(ROW)
        assert set(pids_of(stage)) > {old}
        await healthy.close()
        assert (tmp_path / "other").exists() and old not in pids_of(stage)
        await replaced.close()


async def test_a_tool_that_hangs_is_told_to_the_model_and_the_next_call_works() -> None:
    async with opened(use="tools", tools=(f"{THIS}:hang", f"{THIS}:multiply"), call_timeout_s=4.0) as stage:
        tools = await stage.open(ROW)
        act = await tools.call("hang", {"seconds": 3600})
        assert (act.messages[0]["content"], act.is_wrong) == (
            "error: hang took longer than 4 s and was stopped",
            True,
        )
        assert (await tools.call("multiply", {"a": 6, "b": 7})).messages[0]["content"] == "42"


async def test_what_is_open_is_closed_when_the_worker_ends(closing: Path, tmp_path: Path) -> None:
    stage = stage_of(use=f"{closing}:Mine", options={"folder": str(tmp_path)})
    games = [await stage.open(ROW) for _ in range(3)]
    for number, game in enumerate(games):
        await game.reset(ROW | {"name": str(number)})
    await stage.close()
    assert all((tmp_path / str(number)).exists() for number in range(3))


def test_blocking_environments_run_in_processes_and_others_on_the_loop() -> None:
    for use, expected in ((f"{THIS}:Guess", "ProcessStage"), (f"{THIS}:AsyncGuess", "LocalStage")):
        assert type(build_stage(EnvironmentConfig(use=use))).__name__ == expected


async def test_opening_that_is_broken_off_leaves_nothing() -> None:
    stage = stage_of(use=f"{THIS}:Guess")
    opening = asyncio.ensure_future(stage.open(ROW))
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    await stage.close()
    assert not pids_of(stage)


async def test_what_an_environment_started_ends_with_its_process(tmp_path: Path) -> None:
    """Also where the process came to its end by itself."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import subprocess\n"
        "class Mine:\n"
        "    def reset(self, row):\n"
        "        self.started = subprocess.Popen(['sleep', '600'])\n"
        "        return str(self.started.pid)\n"
        "    def step(self, text):\n"
        "        return 'more', 0.0, False\n"
    )
    stage = stage_of(use=f"{file}:Mine")
    environment = await stage.open(ROW)
    pid = int((await environment.reset(ROW)).added)
    assert psutil.pid_exists(pid)
    await stage.close()
    await wait_until(lambda: not psutil.pid_exists(pid))
