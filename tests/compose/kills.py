"""Kills in the middle of sessions in containers: of a worker, of the reaper in it, of a session's program, of
the engine. Part of `make compose-test ARGS="--only boxes"`.

The task's test passes though nothing is done. So a reward of 0 is one that a kill has made.
"""

import asyncio
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from tests.compose.sessions import EXAMPLE, OPTIONS, PLAY, another_engine, containers
from tests.support.containers import HangingRemoval
from tests.support.preloaded import Process
from tests.support.rollout_worker import RUN_UID, issue
from tests.support.runs import ServiceRun, simulated_config
from tests.support.training import messages
from tests.support.waiting import wait_until
from tidemill.common.config import RunConfig
from tidemill.common.process.programs import Child
from tidemill.common.run.state import UID, update_state
from tidemill.common.wire.messages import DeadLetter, Trajectory

pytestmark = pytest.mark.timeout(900)

LEASE_S = 2.0
SIZE = 2
NUM_TICKETS = 2
GENERATION_S = 6.0
"""What an answer of the model takes: boxes are there meanwhile."""
LOOK_S = 0.2
PATIENCE_S = 600.0
RUNNER = {"verifiers": "vf-eval", "agentbox": Child.ENVIRONMENTS.value}
"""A word in the command of the process that drives a box."""

WAYS = pytest.mark.parametrize("way", ["verifiers", "agentbox"])


@pytest.fixture
def config(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run of which every session has a reward of 1."""
    task = tmp_path / "tasks" / "csv-join"
    shutil.copytree(EXAMPLE / "tasks" / "csv-join", task)
    (task / "tests" / "test.sh").write_text("true\n")
    monkeypatch.setenv("TASKS_DIR", str(task.parent))
    # Else agentbox removes boxes whose process has ended, and hides that nobody else does.
    monkeypatch.setenv("AGENTBOX_REAP_ORPHANS", "0")
    monkeypatch.setenv("TIDEMILL_PASS_ENV", "AGENTBOX_REAP_ORPHANS")
    environment: dict[str, object] = {"use": f"{EXAMPLE / 'agentbox_env.py'}:Env"}
    if way == "verifiers":
        row = json.dumps({"task": 0})
        play = f"$ echo '{row}' | {PLAY.removeprefix('$ ')} {OPTIONS}"
        environment = {"use": "agent", "agent": play}
    return simulated_config(
        tmp_path,
        rollout__environment=environment | {"containers": "docker", "call_timeout_s": 120.0},
        rollout__simulated={"tokens": 4, "vocab_size": 32, "group_s": GENERATION_S},
        rollout__max_groups_in_flight=1,
        model__max_model_len=4096,
        streams__lease_s=LEASE_S,
    )


@contextlib.asynccontextmanager
async def running(folder: Path, config: RunConfig) -> AsyncIterator[ServiceRun]:
    """A run with tickets, and no worker."""
    async with ServiceRun(folder, config) as run:
        await update_state(run.broker, run.keys, **{UID: RUN_UID})  # as the trainer does
        await issue(run.broker, run.keys, group_size=SIZE, max_staleness=0)
        yield run


async def wait_for_boxes(is_enough: Callable[[set[str]], bool]) -> set[str]:
    """The containers of the engine, once they are so."""

    async def look() -> tuple[set[str], ...]:
        boxes = await asyncio.to_thread(containers)
        await asyncio.sleep(LOOK_S)
        return (boxes,) if is_enough(boxes) else ()

    (boxes,) = await wait_until(look, PATIENCE_S)
    return boxes


async def wait_for_the_first_box() -> set[str]:
    return await wait_for_boxes(bool)


async def wait_until_gone(lost: set[str], since: float) -> None:
    await wait_for_boxes(lambda boxes: not boxes & lost)
    print(f"{len(lost)} lost boxes were gone {time.monotonic() - since:.1f} s later")


async def check_that_all_were_played_once(run: ServiceRun) -> None:
    """Check that no sample is lost, none is there twice, and none has a reward that its session had not."""

    async def find_samples() -> list[Trajectory] | None:
        samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
        return samples if len(samples) >= NUM_TICKETS * SIZE else None

    samples = await wait_until(find_samples, PATIENCE_S)
    assert await messages(run.broker, run.keys.dead, DeadLetter) == []
    assert {sample.session.reward for sample in samples if sample.session} == {1.0}
    keys = sorted((sample.ticket, sample.index) for sample in samples)
    assert keys == [(ticket, index) for ticket in range(NUM_TICKETS) for index in range(SIZE)]


async def stop(run: ServiceRun, name: str) -> None:
    await run.stop_all(name)
    assert containers() == set()


def kill(process: Process) -> float:
    """SIGKILL; returns when."""
    process.kill()
    process.wait()
    return time.monotonic()


def kill_runners(worker: Process, word: str) -> int:
    """SIGKILL to a worker's processes whose command has the word; returns how many."""
    num_killed = 0
    for process in psutil.Process(worker.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if word in " ".join(process.cmdline()):
                process.kill()
                num_killed += 1
    return num_killed


@WAYS
async def test_a_killed_worker_leaves_no_box_makes_no_zero_and_loses_no_sample(
    config: RunConfig, tmp_path: Path
) -> None:
    async with running(tmp_path, config) as run:
        killed = run.start("rollout", "killed")
        lost = await wait_for_the_first_box()
        killed_at = kill(killed)
        run.start("rollout", "next")
        await wait_until_gone(lost, killed_at)
        await check_that_all_were_played_once(run)
        await stop(run, "next")


@WAYS
async def test_a_killed_runner_of_a_session_leaves_no_box_makes_no_zero_and_loses_no_sample(
    way: str, config: RunConfig, tmp_path: Path
) -> None:
    async with running(tmp_path, config) as run:
        worker = run.start("rollout", "worker")
        lost = await wait_for_the_first_box()
        assert kill_runners(worker, RUNNER[way]) > 0
        await wait_until_gone(lost, time.monotonic())
        await check_that_all_were_played_once(run)
        await stop(run, "worker")


@WAYS
async def test_a_killed_reaper_leaves_no_box_makes_no_zero_and_loses_no_sample(
    config: RunConfig, tmp_path: Path
) -> None:
    """The second worker is killed while it removes what the first has left."""
    hanging = HangingRemoval(tmp_path)
    async with running(tmp_path, config) as run:
        first = run.start("rollout", "first")
        lost = await wait_for_the_first_box()
        kill(first)
        run.variables["rollout"] = {"PATH": hanging.path}
        second = run.start("rollout", "second")
        await wait_until(lambda: hanging.has_begun, PATIENCE_S)
        killed_at = kill(second)
        hanging.end()
        lost |= containers()
        del run.variables["rollout"]
        run.start("rollout", "third")
        await wait_until_gone(lost, killed_at)
        await check_that_all_were_played_once(run)
        await stop(run, "third")


@WAYS
async def test_a_killed_engine_leaves_no_box_makes_no_zero_and_loses_no_sample(
    config: RunConfig, tmp_path: Path, bridge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not below pytest's folder: the path of a socket is short.
    with tempfile.TemporaryDirectory() as folder, another_engine(Path(folder), bridge, monkeypatch) as engine:
        async with running(tmp_path, config) as run:
            run.start("rollout", "worker")
            lost = await wait_for_the_first_box()
            engine.kill()
            # While it is away the sessions end: by their programs, whose model has answered.
            await wait_until(lambda: "cannot be looked after" in run.log_of("worker"), PATIENCE_S)
            engine.start()
            await wait_until_gone(lost, time.monotonic())
            await check_that_all_were_played_once(run)
            await stop(run, "worker")
