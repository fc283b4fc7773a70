"""The server from which a run's processes are forked: a fork that fails, and what forked processes share.

As root no limit of processes holds, so `EAGAIN` comes from an `os.fork` that is replaced in the server.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from tests.support.preloaded import REPO
from tests.support.waiting import has_ended, wait_until
from tidemill.services.console.up import forks
from tidemill.services.console.up.forks import ForkServer
from tidemill.services.console.up.specs import ServiceSpec

SERVER = """
    import errno, os, sys
    from pathlib import Path
    import numpy, random, torch
    from tidemill.common.process import fork_server

    FLAG = Path(sys.argv[2])
    fork, pidfd_open = os.fork, os.pidfd_open

    def failing(call, name):
        def called(*arguments):
            if FLAG.exists() and FLAG.read_text() == name:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return call(*arguments)
        return called

    os.fork, os.pidfd_open = failing(fork, "fork"), failing(pidfd_open, "pidfd_open")
    fork_server.SHARED_IMPORTS = ()
    asked = fork_server.main()
    if asked is not None:
        fork_server.become(asked)
"""
DRAWING = """
    import json, random, sys, time
    import numpy, torch

    drawn = [torch.rand(1).item(), random.random(), numpy.random.rand()]
    print(json.dumps(drawn), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def flag(tmp_path: Path) -> Path:
    """A file that names the call that fails in the server."""
    return tmp_path / "flag"


@pytest.fixture
async def server(tmp_path: Path, flag: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ForkServer]:
    """A fork server that imports torch and none of our services."""
    (tmp_path / "drawing.py").write_text(dedent(DRAWING))
    script = tmp_path / "server.py"
    script.write_text(dedent(SERVER))

    def command(_: object, descriptor: str) -> list[str]:
        return [sys.executable, str(script), descriptor, str(flag)]

    monkeypatch.setattr(forks, "run_own", command)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPO}")
    server = ForkServer()
    try:
        yield server
    finally:
        for child in psutil.Process(server.process.pid).children():
            child.kill()
        server.close()


def fail_at(flag: Path, call: str) -> None:
    """Have a call of the server fail from now on; empty: none."""
    flag.write_text(call)


async def start(server: ForkServer, log: Path) -> forks.Forked | None:
    spec = ServiceSpec("rollout", "rollout", (sys.executable, "-m", "drawing"), loads_torch=True)
    return await asyncio.wait_for(server.start(spec, dict(os.environ), log), 120)


async def test_two_forks_draw_different_numbers(server: ForkServer, tmp_path: Path) -> None:
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    for log in logs:
        assert await start(server, log) is not None
    await wait_until(lambda: all(log.exists() and log.read_text().endswith("\n") for log in logs))
    first = json.loads(logs[0].read_text())
    second = json.loads(logs[1].read_text())
    for library, number, other_number in zip(("torch", "random", "numpy"), first, second, strict=True):
        assert number != other_number, library


@pytest.mark.parametrize("call", ["fork", "pidfd_open"])
async def test_a_fork_that_fails_is_an_answer_and_those_before_it_go_on(
    server: ForkServer, tmp_path: Path, flag: Path, call: str
) -> None:
    first = await start(server, tmp_path / "first.log")
    assert first is not None
    fail_at(flag, call)
    assert await start(server, tmp_path / "second.log") is None
    assert not has_ended(first.pid)
    children = psutil.Process(server.process.pid).children()
    assert [child.pid for child in children] == [first.pid], "nothing is left of the fork that failed"
    fail_at(flag, "")
    third = await start(server, tmp_path / "third.log")
    assert third is not None
    # Ends are still reported, each to whom it belongs.
    psutil.Process(third.pid).kill()
    assert await asyncio.wait_for(third.wait(), 60) == -9
    assert not has_ended(first.pid)
