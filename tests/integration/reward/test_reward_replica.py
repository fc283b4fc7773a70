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
from tests.support.waiting import has_ended, wait_until
from tidemill.common.process.heartbeats import read_heartbeats
from tidemill.common.process.replicas import read_replicas
from tidemill.services.console.up.specs import service_specs

# Through a shell that stays, as servers have children of their own.
SERVER = ("sh", "-c", f"{sys.executable} -m tests.support.misbehaving {{host}} {{port}}; exit 3")


def make_run(folder: Path, command: tuple[str, ...] | None = SERVER, **local: Any) -> ServiceRun:
    """Without a command, of a server of our own with a model."""
    reward: dict[str, Any] = {"judge": {"servers": "grader", "template": "{{ completion }}"}}
    local |= {"count": 2, "command": command}
    if command is None:
        reward = {"model": {"servers": "grader"}}
        local = {}
    servers = {"grader": {"model": str(folder / "nowhere"), "local": local}}
    reward = {"rewards": {"strict": {**reward, "backoff_s": 0.05}}}
    return ServiceRun(folder, make_config(run_id="test", reward=reward, servers=servers))


def start_replica(run: ServiceRun, index: int = 0) -> None:
    run.start("reward.replica", f"replica-{index}", arguments=("--servers", "grader", "--index", str(index)))


async def registered(run: ServiceRun) -> list[str]:
    return await read_replicas(run.broker, run.keys, "grader")


async def urls(run: ServiceRun, count: int = 1) -> list[str]:
    async def enough() -> list[str]:
        replicas = await registered(run)
        return replicas if len(replicas) == count else []

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
    await wait_until(lambda: has_ended(server))


async def test_a_killed_replica_takes_its_server_along(run: ServiceRun) -> None:
    start_replica(run)
    await urls(run)
    server = _child(run)
    grandchild = psutil.Process(server).children()[0].pid
    run.kill("replica-0")
    await wait_until(lambda: has_ended(server) and has_ended(grandchild))


async def test_a_server_that_ends_ends_its_replica_which_says_so(run: ServiceRun) -> None:
    start_replica(run)
    await urls(run)
    os.kill(psutil.Process(_child(run)).children()[0].pid, signal.SIGKILL)
    assert await run.wait("replica-0") == 1
    assert "the server ended by itself (exit code 3)" in run.log_of("replica-0")
    assert await registered(run) == []


DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
SLEEPS = "import time; time.sleep(600)"
THROUGH_A_SHELL = ("sh", "-c", '"$0" "$@"; exit $?')
MISTAKES: dict[str, tuple[dict[str, Any], str, int, tuple[str, ...]]] = {
    "an instruction that this CPU lacks": (
        {"command": (sys.executable, "-c", DIES)}, "grader", 2, ("(SIGILL, an illegal", "--dtype float32")
    ),
    "the same behind a shell": (
        {"command": (*THROUGH_A_SHELL, sys.executable, "-c", DIES)}, "grader", 2, ("(SIGILL, an illegal",)
    ),
    "never up": (
        {"command": (sys.executable, "-c", SLEEPS), "start_timeout_s": 0.5}, "grader", 1,
        ("not healthy within 0.5 s (local.start_timeout_s)",),
    ),
    "a model that is not there": ({"command": None}, "grader", 2, ("nowhere: the folder does not exist",)),
    "servers that the config lacks": ({}, "judge", 2, ("has grader",)),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_what_cannot_serve_ends_its_replica_with_the_reason_last_in_its_log(tmp_path, mistake):
    """2 says that starting it again is no use."""
    local, servers, exit_code, said = MISTAKES[mistake]
    async with make_run(tmp_path, **local) as run:
        run.start("reward.replica", "replica-0", arguments=("--servers", servers))
        assert await run.wait("replica-0") == exit_code
        assert [words for words in said if words not in run.log_of("replica-0")] == []


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
