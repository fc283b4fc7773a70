"""A rank that dies is named and ends the others, also where a collective call would wait for it."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models import run_config, tiny_model
from tests.support.waiting import wait_until

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


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    trainer = {"num_ranks": 3, "device": "cpu", "num_threads": 1}
    path.write_text(run_config(tiny_model(tmp_path / "model"), trainer=trainer).model_dump_json())
    return path


@pytest.fixture
def leader(request, config):
    """Rank 0, in a call that waits: for others, or for what only a GPU would end."""
    waits_for = getattr(request, "param", "device")
    command = [sys.executable, "-c", PROGRAM, str(config), waits_for]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def pids_of(leader: "subprocess.Popen[str]") -> list[int]:
    assert leader.stdout is not None
    line = next(line for line in leader.stdout if line.startswith("ranks:"))  # it may have logged before
    return [int(pid) for pid in line.split()[1:]]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("leader", ["collective", "device"], indirect=True)
def test_rank_0_names_the_rank_that_died_and_ends_the_others(leader):
    first, second = pids_of(leader)
    os.kill(second, signal.SIGKILL)
    _, errors = leader.communicate(timeout=120)
    assert leader.returncode == 1
    assert "rank 2" in errors and "SIGKILL" in errors
    assert not is_alive(first)


async def test_ranks_die_with_rank_0(leader):
    others = pids_of(leader)
    for pid in others:
        os.kill(pid, signal.SIGSTOP)  # as blind to broken connections as a call on a GPU
    leader.kill()
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
def test_hosts_notice_that_another_one_hangs_or_is_gone(lost, number):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    torchruns = address | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", ON_TWO_HOSTS],
            env=os.environ | torchruns | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        assert [host.stdout and host.stdout.readline() for host in hosts] == ["met\n"] * 2
        hosts[lost].send_signal(number)
        _, errors = hosts[1 - lost].communicate(timeout=120)
        assert hosts[1 - lost].returncode == 1 and f"rank {lost}" in errors
    finally:
        for host in hosts:
            host.kill()
            host.communicate()
