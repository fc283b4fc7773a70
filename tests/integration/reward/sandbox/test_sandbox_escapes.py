"""What hostile code asks the kernel for inside a jail, and does not get."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.preloaded import REPO
from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.services.reward.sandbox import bubblewrap
from tidemill.services.reward.sandbox.bubblewrap import SandboxError
from tidemill.services.reward.sandbox.job import make_cases, run_cases

LIMITS = SandboxConfig(time_s=20.0, total_s=60.0, memory_mb=256, file_mb=4)
CALL = """
import ctypes, errno, json, os
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    ctypes.set_errno(0)
    answer = libc.syscall(*(ctypes.c_long(a) if isinstance(a, int) else a for a in arguments))
    return errno.errorcode[ctypes.get_errno()] if answer < 0 else "allowed"
"""
CALLS = {
    "user namespace": "call(272, 0x10000000)",
    "network namespace": "call(272, 0x40000000)",
    "clone into a namespace": "call(56, 0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "call(435, b'\\0' * 88, 88)",
    "mount": "call(165, b'none', b'/tmp', b'tmpfs', 0, b'')",
    "new mount interface": "call(430, b'tmpfs', 0)",
    "umount": "call(166, b'/proc', 2)",
    "pivot_root": "call(155, b'/tmp', b'/tmp')",
    "chroot": "call(161, b'/tmp')",
    "memfd": "call(319, b'x', 0)",
    "secret memory": "call(447, 0)",
    "System V memory": "call(29, 0, 1 << 20, 0o1600)",
    "shared mapping": "call(9, 0, 1 << 20, 3, 0x21, -1, 0)",
    "validated shared mapping": "call(9, 0, 1 << 20, 3, 0x23, -1, 0)",
    "limits of others": "call(302, os.getpid(), 7, 0, 0)",
    "ptrace": "call(101, 0, 0, 0, 0)",
    "memory of others": "call(310, 1, 0, 0, 0, 0, 0)",
    "bpf": "call(321, 0, 0, 0)",
    "io_uring": "call(425, 1, b'\\0' * 120)",
    "keys": "call(250, 0, -3, 0)",
    "performance counters": "call(298, 0, 0, -1, -1, 0)",
    "page faults": "call(323, 0)",
    "file handles": "call(304, -1, 0, 0)",
    "kernel log": "call(103, 10, 0, 0)",
    "network": "call(41, 2, 1, 0)",
    "packet sockets": "call(41, 17, 3, 0)",
    "kernel sockets": "call(41, 16, 3, 0)",
    "virtual machine sockets": "call(41, 40, 1, 0)",
    "passed descriptors": "call(46, 1, 0, 0)",
    "bound sockets": "call(49, 0, 0, 0)",
    "listening sockets": "call(50, 0, 5)",
    "connected sockets": "call(42, 0, 0, 0)",
    "notes of changed files": "call(294, 0)",
    "larger pipes": "call(72, 1, 1031, 1 << 20)",
    "locks on parts of files": "call(72, 1, 6, 0)",
    "notes of changed folders": "call(72, 1, 1026, 0)",
    "extended attributes": "call(188, b'/tmp', b'user.x', b'x', 1, 0)",
    "a session of its own": "call(112)",
    "a process group of its own": "call(109, 0, 0)",
    "descriptors of others": "call(438, 0, 0, 0)",
    "another architecture's numbers": "call(0x40000000 + 39)",
}
NETWORK = {"network", "packet sockets", "kernel sockets", "virtual machine sockets"}


def ran(code: str) -> dict[str, Any]:
    (result,) = run_cases(make_cases(code, {"inputs": [""], "outputs": ["any"]}, 1), LIMITS)
    return result


def test_the_kernel_refuses_what_leads_out_of_the_jail(each_jail: None) -> None:
    lines = [f"print(json.dumps([{name!r}, {call}]), flush=True)" for name, call in CALLS.items()]
    result = ran(CALL + "\n".join(lines))
    answers = dict(json.loads(line) for line in result["stdout"].splitlines())
    expected = {name: "ENETUNREACH" if name in NETWORK else "ENOSYS" for name in CALLS}
    assert answers == expected, result


@pytest.mark.parametrize(
    "allocate",
    [
        "held = [os.memfd_create(str(n)) for n in range(40)]\nfor fd in held: os.write(fd, bytes(8 << 20))",
        "held = mmap.mmap(-1, 200 << 20)\nif os.fork() == 0:\n    held[:] = bytes(len(held)); os._exit(0)\n"
        "os.wait()\nmore = mmap.mmap(-1, 200 << 20); more[:] = bytes(len(more))",
        "import socket\nheld = [socket.socketpair() for _ in range(2000)]",
        "held = [open(f'/dev/shm/{n}', 'wb').write(bytes(8 << 20)) for n in range(40)]",
        "held = [open(f'/tmp/{n}', 'wb', 0).write(bytes(1 << 20)) for n in range(40)]\n"
        "assert sum(held) == 40 << 20",
        "for n in range(100_000): open(f'/tmp/{n}', 'w').close()",
    ],
    ids=["memfd", "shared between forks", "socket buffers", "shared memory files", "files", "empty files"],
)
def test_no_memory_is_out_of_sight_of_the_limit(each_jail: None, allocate: str) -> None:
    result = ran(f"import mmap, os\n{allocate}\nprint('has it')")
    assert "has it" not in result["stdout"]


NAMED = """
import ctypes, os, time
for _ in range(3):
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)
        held = bytearray(120 << 20)
        time.sleep(60)
time.sleep(3)
print("has it")
"""


HEADLESS = """
import ctypes, os, threading, time
def hold():
    time.sleep(0.5)
    held = bytearray(150 << 20)
    time.sleep(60)
for _ in range(3):
    if os.fork() == 0:
        threading.Thread(target=hold).start()
        ctypes.CDLL(None).syscall(60, 0)  # exit of this thread alone
time.sleep(10)
print("has it")
"""


def test_a_process_whose_first_thread_has_ended_hides_no_memory(each_jail: None) -> None:
    result = ran(HEADLESS)
    assert result["outcome"] == "memory", result


def thread_names() -> list[str]:
    names = []
    for path in Path("/proc").glob("[0-9]*/task/*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(path.read_text(errors="replace"))
    return names


def test_a_process_whose_first_thread_has_ended_does_not_outlive_its_jail(each_jail: None) -> None:
    name = f"headless-{os.getpid()}"
    code = (
        "import ctypes, os, threading, time\n"
        "libc = ctypes.CDLL(None)\n"
        "if os.fork() == 0:\n    try: os.setsid()\n    except OSError: pass\n"
        f"    rename = lambda: (libc.prctl(15, b'{name}'[:15], 0, 0, 0), time.sleep(60))\n"
        "    threading.Thread(target=rename).start()\n"
        "    time.sleep(0.2)\n    libc.syscall(60, 0)\n"
        "time.sleep(1)\nprint('ok')"
    )
    assert ran(code)["stdout"] == "ok\n"
    # Bubblewrap reports the end of the program, which is a moment before the kernel has ended the rest.
    give_up_at = time.monotonic() + 10
    while f"{name[:15]}\n" in thread_names():
        assert time.monotonic() < give_up_at, "it outlives its jail"
        time.sleep(0.01)


@pytest.mark.parametrize("name", [b"\xff", b"\rVmRSS: -99999"], ids=["no text", "lines of its own"])
def test_no_name_hides_what_a_process_uses(each_jail: None, name: bytes) -> None:
    result = ran(NAMED.format(name=name))
    assert result["outcome"] == "memory", result


def test_a_nest_of_folders_is_cleared_away(each_jail: None) -> None:
    """Deeper than Python calls itself, and than a path can say. It is no failure of the sandbox."""
    code = """
import os
print(os.listdir())
os.symlink("/", "root"); os.mkdir("shut"); os.mkdir("shut/a"); os.chmod("shut", 0o500); os.mkdir("b", 0)
for _ in range(3000):
    os.mkdir("a"); os.chdir("a")
"""
    tests = {"inputs": ["", ""], "outputs": ["[]", "[]"]}
    cases = make_cases(code, tests, 2)
    results = run_cases(cases, LIMITS)
    assert [case.passed(result) for case, result in zip(cases, results, strict=True)] == [True, True], results


MOUNTED = """
import ctypes, sys
from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.services.reward.sandbox.job import Case
from tidemill.services.reward.sandbox.job import run_cases
libc, folder = ctypes.CDLL(None), sys.argv[1]
libc.unshare(0x20000)  # this process's mounts are its own from here on
libc.mount(b"none", b"/", None, 16384 | 1 << 18, None)
libc.mount(b"none", folder.encode(), b"tmpfs", 0, b"mode=1777")
open(folder + "/is mounted", "w").close()
code = f"import os; print(os.listdir({folder!r})); open({folder!r} + '/escaped', 'w')"
print(run_cases([Case(code, "", "")], SandboxConfig(time_s=20.0, total_s=60.0))[0])
"""


def test_what_is_mounted_below_a_folder_of_the_system_is_read_only_too(each_jail: None) -> None:
    """As volumes of a container are: a jail must not write what its worker's user may."""
    folders = [name for name in ("/usr/games", "/usr/src", "/usr/local/games") if Path(name).is_dir()]
    if os.getuid() != 0 or not folders:
        pytest.skip("nothing can be mounted here")  # only root may, and over a folder that is there
    command = [sys.executable, "-c", MOUNTED, folders[0]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=120)
    assert "is mounted" in done.stdout and "Read-only file system" in done.stdout, done


def test_nothing_is_run_where_no_jail_is_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "was-here"
    tmp_path.chmod(0o777)
    monkeypatch.setattr(bubblewrap, "FETCHED", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"bubblewrap.*seccomp=unconfined"):
        ran(f"open({str(mark)!r}, 'w')")
    assert not mark.exists()


def test_what_programs_need_is_there(each_jail: None) -> None:
    """Threads, processes, pipes, event loops, files."""
    code = """
import asyncio, subprocess, sys, tempfile, threading, concurrent.futures, mmap
thread = threading.Thread(target=print, args=("thread",)); thread.start(); thread.join()
print(subprocess.check_output([sys.executable, "-c", "print('process')"], text=True).strip())
async def main():
    await asyncio.sleep(0)
    return "loop"
print(asyncio.run(main()))
with tempfile.TemporaryFile() as file:
    file.write(b"x"); file.flush(); mmap.mmap(file.fileno(), 1, mmap.MAP_PRIVATE)
with concurrent.futures.ThreadPoolExecutor(2) as pool: print(sum(pool.map(int, "12")))
"""
    assert ran(code)["stdout"].split() == ["thread", "process", "loop", "3"]
