"""Replicas as processes: they register once their server is up, leave in order, and take it along."""

import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.runs import ServiceRun
from tests.support.trajectories import make_config
from tests.support.waiting import wait_until
from tidemill.common.process.heartbeats import read_heartbeats
from tidemill.common.process.replicas import read_replicas
from tidemill.services.console.processes.specs import service_specs

# Through a shell that stays, as servers have children of their own.
SERVER = ("sh", "-c", f"{sys.executable} -m tests.support.misbehaving {{host}} {{port}}; exit 3")


def make_run(folder: Path, command: tuple[str, ...] = SERVER, **local: Any) -> ServiceRun:
    judge = {"servers": "grader", "template": "{{ completion }}"}
    servers = {"grader": {"model": "m", "local": {"count": 2, "command": command, **local}}}
    reward = {"rewards": {"strict": {"judge": judge, "backoff_s": 0.05}}}
    return ServiceRun(folder, make_config(run_id="test", reward=reward, servers=servers))


def start_replica(run: ServiceRun, index: int = 0) -> None:
    run.start("reward.replica", f"replica-{index}", arguments=("--servers", "grader", "--index", str(index)))


async def registered(run: ServiceRun) -> list[str]:
    return await read_replicas(run.broker, run.keys, "grader")


async def urls(run: ServiceRun, count: int = 1) -> list[str]:
    async def enough() -> list[str]:
        found = await registered(run)
        return found if len(found) == count else []

    return await wait_until(enough, 60, f"{count} replicas")


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[ServiceRun]:
    async with make_run(tmp_path) as run:
        yield run


async def test_a_replica_registers_and_leaves_in_order(run: ServiceRun) -> None:
    start_replica(run)
    (url,) = await urls(run)
    async with httpx.AsyncClient() as client:
        answer = await client.post(f"{url}/chat/completions", json={})
        assert answer.json()["choices"][0]["message"]["content"] == "Score: 7"
        await wait_until(lambda: _beats(run, ("replica-0", "replica", "serve")))
        server = _child(run)
        run.processes["replica-0"].send_signal(signal.SIGTERM)
        assert await run.wait("replica-0") == 0
        assert await registered(run) == []
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
    await wait_until(lambda: not _is_alive(server))


async def test_a_killed_replica_takes_its_server_along(run: ServiceRun) -> None:
    start_replica(run)
    await urls(run)
    server = _child(run)
    grandchild = psutil.Process(server).children()[0].pid
    run.kill("replica-0")
    await wait_until(lambda: not _is_alive(server) and not _is_alive(grandchild))


async def test_a_server_that_ends_ends_its_replica_which_says_so(run: ServiceRun) -> None:
    start_replica(run)
    await urls(run)
    os.kill(psutil.Process(_child(run)).children()[0].pid, signal.SIGKILL)
    assert await run.wait("replica-0") == 1
    assert "the server ended by itself (exit code 3)" in run.log_of("replica-0")
    assert await registered(run) == []


@pytest.mark.parametrize("shell", [(), ("sh", "-c", '"$0" "$@"; exit $?')])
async def test_a_server_that_cannot_run_on_this_cpu_is_a_mistake(
    tmp_path: Path, shell: tuple[str, ...]
) -> None:
    """Nothing starts it again: the exit code is that of a mistake."""
    program = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
    async with make_run(tmp_path, (*shell, sys.executable, "-c", program)) as run:
        start_replica(run)
        assert await run.wait("replica-0") == 2
        said = run.log_of("replica-0")
        assert "(SIGILL, an illegal instruction)" in said and "--dtype float32" in said


async def test_a_server_that_never_comes_up_is_given_up(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import time; time.sleep(600)")
    async with make_run(tmp_path, command, start_timeout_s=0.5) as run:
        start_replica(run)
        assert await run.wait("replica-0") == 1
        assert "not healthy within 0.5 s (local.start_timeout_s)" in run.log_of("replica-0")


async def test_servers_that_the_config_has_not_are_a_mistake(run: ServiceRun) -> None:
    run.start("reward.replica", "replica-0", arguments=("--servers", "judge"))
    assert await run.wait("replica-0") == 2
    assert "has grader" in run.log_of("replica-0")


def test_the_console_starts_the_replicas_that_the_config_wants(tmp_path: Path) -> None:
    specs = [spec for spec in service_specs(make_run(tmp_path).config) if spec.role == "replica"]
    assert [spec.name for spec in specs] == ["replica-grader-0", "replica-grader-1"]
    assert "tidemill.services.reward.replica" in specs[1].command
    assert specs[1].command[-4:] == ("--servers", "grader", "--index", "1")


async def _beats(run: ServiceRun, expected: tuple[str, str, str]) -> bool:
    beats = await read_heartbeats(run.broker, run.keys)
    return [(beat.name, beat.role, beat.state) for beat in beats] == [expected]


def _child(run: ServiceRun) -> int:
    """The server of the replica; beside it, the replica has only its guard."""
    children = psutil.Process(run.processes["replica-0"].pid).children()
    (server,) = [child.pid for child in children if "misbehaving" in " ".join(child.cmdline())]
    return server


def _is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_a_server_that_cannot_serve_its_model_ends_the_replica_with_the_reason(tmp_path: Path) -> None:
    """2 says that starting it again is no use; the reason stands last in its log."""
    servers = {"rm": {"model": str(tmp_path / "nowhere"), "local": {}}}
    config = make_config(
        run_id="test", reward={"rewards": {"rm": {"model": {"servers": "rm"}}}}, servers=servers
    )
    async with ServiceRun(tmp_path, config) as run:
        run.start("reward.replica", "replica-0", arguments=("--servers", "rm"))
        assert await run.wait("replica-0") == 2
        assert "nowhere: the folder does not exist" in run.log_of("replica-0")
