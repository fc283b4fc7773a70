"""A rank that dies is named and ends the others, also where a collective call would wait for it."""

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import run_config, tiny_model
from tests.support.preloaded import start_code
from tests.support.waiting import wait_until

TIMEOUT_S = 120.0

PROGRAM = """
import sys, threading
from pathlib import Path
from tidemill.common.config import RunConfig
from tidemill.services.trainer.policy.loading import open_policy

policy = open_policy(RunConfig.model_validate_json(Path(sys.argv[1]).read_text()))
print("ranks:", *(process.pid for process in policy._ranks._watch._started.values()), flush=True)
if sys.argv[2] == "collective":
    policy._ranks.gather(b"")  # the others wait for calls
threading.Event().wait()  # as a call on a GPU does
"""


class Running:
    """A program in a process that has imported torch already, and what it has printed."""

    def __init__(self, folder: Path, code: str, *words: str, **variables: str) -> None:
        folder.mkdir()
        self._output = folder / "output"
        self._errors = folder / "errors"
        self.process = start_code(code, words, self._output, self._errors, os.environ | variables)

    async def line(self, beginning: str) -> str:
        """The first line that begins so, once it is there; other lines may come before."""

        def lines() -> list[str]:
            assert self.process.poll() is None, self._errors.read_text()
            # Without the last one, which may be half of a line.
            complete = self._output.read_text().split("\n")[:-1]
            return [line for line in complete if line.startswith(beginning)]

        await wait_until(lines, TIMEOUT_S)
        return lines()[0]

    def end(self) -> tuple[int, str]:
        """Waits for its end; returns exit code and errors."""
        return self.process.wait(TIMEOUT_S), self._errors.read_text()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    trainer = {"num_ranks": 3, "device": "cpu", "num_threads": 1}
    path.write_text(run_config(tiny_model(tmp_path / "model"), trainer=trainer).model_dump_json())
    return path


@pytest.fixture
def leader(request: pytest.FixtureRequest, config: Path, tmp_path: Path) -> Iterator[Running]:
    """Rank 0, in a call that waits: for others, or for what only a GPU would end."""
    waits_for = getattr(request, "param", "device")
    running = Running(tmp_path / "leader", PROGRAM, str(config), waits_for)
    yield running
    running.process.kill()
    running.process.wait()


async def pids_of(leader: Running) -> list[int]:
    line = await leader.line("ranks:")
    return [int(pid) for pid in line.split()[1:]]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("leader", ["collective", "device"], indirect=True)
async def test_rank_0_names_the_rank_that_died_and_ends_the_others(leader):
    first, second = await pids_of(leader)
    os.kill(second, signal.SIGKILL)
    code, errors = leader.end()
    assert code == 1
    assert "rank 2" in errors and "SIGKILL" in errors
    assert not is_alive(first)


async def test_ranks_die_with_rank_0(leader):
    others = await pids_of(leader)
    for pid in others:
        os.kill(pid, signal.SIGSTOP)  # as blind to broken connections as a call on a GPU
    leader.process.kill()
    await wait_until(lambda: not any(map(is_alive, others)))


ON_TWO_HOSTS = """
import threading
from tidemill.services.trainer.policy.fsdp import ranks

ranks.BEAT_S, ranks.SILENT_S, ranks.GRACE_S = 0.1, 2.0, 0.1
joined = ranks.join_ranks()
print("met", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(("lost", "number"), [(1, signal.SIGSTOP), (0, signal.SIGSTOP), (0, signal.SIGKILL)])
async def test_hosts_notice_that_another_one_hangs_or_is_gone(lost, number, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    torchruns = address | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    hosts = [Running(tmp_path / f"{rank}", ON_TWO_HOSTS, **torchruns, RANK=str(rank)) for rank in range(2)]
    try:
        for host in hosts:
            await host.line("met")
        hosts[lost].process.send_signal(number)
        code, errors = hosts[1 - lost].end()
        assert code == 1 and f"rank {lost}" in errors
    finally:
        for host in hosts:
            host.process.kill()
            host.process.wait()
