"""Runs programs that nobody trusts. Standard library only: its process is started with `-I -S`.

It reads one JSON map from stdin and writes one to stdout. The order is what makes it safe: first this
process leaves for namespaces of its own (processes, network, mounts), then it builds a root folder that
holds nothing but the interpreter, and only then, for each program, a child gives up all privileges, takes
its limits and a filter of system calls upon it and becomes the program. This process is the first of its
namespace: when it ends, for whatever reason, the kernel kills everything inside. It ends with its parent.

What the kernel refuses is left out and reported under `isolation`; limits always hold. With `require`
nothing is left out: where anything is refused, no program is run at all.
"""

import contextlib
import ctypes
import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tidemill.services.jobs.sandbox import seccomp
from tidemill.services.jobs.sandbox.emptying import empty
from tidemill.services.jobs.sandbox.jail_watch import Watch, descendants, reap

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("null", "urandom", "random")
"""Without `zero`, a mapping of which can be memory that belongs to no process."""
MAX_FILES = 4096
LONGEST_ARGUMENT = 100_000
"""Linux takes none of 128 KiB or more."""

libc = ctypes.CDLL(None, use_errno=True)


def build_root(order: dict[str, Any], work: str) -> None:
    """A root folder in memory: the interpreter, read-only, and an empty /tmp; nothing else of the machine."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount(
        "jail",
        work,
        "tmpfs",
        MS_NOSUID | MS_NODEV,
        f"size={order['file_mb'] + 4}m,nr_inodes={MAX_FILES},mode=755",
    )
    for folder in (*SYSTEM_FOLDERS, *order["shown"]):
        _show(folder, work)
    os.mkdir(f"{work}/dev")
    for name in DEVICES:
        Path(work, "dev", name).touch()
        _mount(f"/dev/{name}", f"{work}/dev/{name}", None, MS_BIND)
    os.mkdir(f"{work}/proc")
    # Refused where the machine's own /proc is partly hidden, as in some containers. Without it nobody could
    # watch the processes inside.
    _mount("proc", f"{work}/proc", "proc", MS_NOSUID | MS_NODEV | MS_RDONLY)
    os.mkdir(f"{work}/tmp")
    options = f"size={order['file_mb']}m,nr_inodes={MAX_FILES},mode=1777"
    _mount("tmp", f"{work}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.mkdir(f"{work}/old")
    if libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], work.encode(), f"{work}/old".encode()) != 0:
        raise OSError(ctypes.get_errno(), "pivot_root")
    os.chdir("/")
    if libc.umount2(b"/old", MNT_DETACH) != 0:
        raise OSError(ctypes.get_errno(), "umount of the machine's files")
    os.rmdir("/old")
    _mount("jail", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _show(folder: str, work: str) -> None:
    """The same folder or file inside, read-only, with all that is mounted in it; links stay links."""
    source = Path(folder)
    inside = Path(f"{work}{folder}")
    if inside.exists() or not source.exists():
        return
    inside.parent.mkdir(parents=True, exist_ok=True)
    if source.is_symlink():
        inside.symlink_to(os.readlink(source))
        return
    inside.mkdir() if source.is_dir() else inside.touch()
    _mount(folder, str(inside), None, MS_BIND | MS_REC)
    for point in _mounts_in(os.path.realpath(inside)):
        flags = os.statvfs(point).f_flag & (MS_NOSUID | MS_NODEV | 8)  # a mapped user may not clear these
        _mount(folder, point, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | flags)


def _mounts_in(folder: str) -> list[str]:
    """Where something is mounted: the folder itself, and below it."""
    lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    points = [
        re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), line.split(" ")[4]) for line in lines
    ]
    return [point for point in points if point == folder or point.startswith(f"{folder}/")]


def _mount(source: str, target: str, kind: "str | None", flags: int, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode() if kind else None, flags, options.encode())
    if libc.mount(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount of {target}: {os.strerror(number)}")


PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 38, 36
NEW_MOUNTS, NEW_UTS, NEW_IPC = 0x00020000, 0x04000000, 0x08000000
NEW_USER, NEW_PIDS, NEW_NET = 0x10000000, 0x20000000, 0x40000000
EVERYTHING = NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NET
NOBODY = 65534
OTHER_PYTHONS = ("/usr/local/bin/python3", "/usr/bin/python3")
FIRST_UID, NUM_UIDS = 200_000, 60_000
"""A jail that was started by root has a user of its own: limits on processes count by user."""

Map = dict[str, Any]


def main() -> None:
    """Run what stdin asks for."""
    os.setsid() if os.getpid() != os.getsid(0) else None
    _die_with_parent()
    order = {"number": os.getpid(), **json.load(sys.stdin)}
    isolation = _leave() if order["namespaces"] else _stay()
    answers, inside = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(answers)
        _die_with_parent()
        _inside(order, isolation, inside)
        os._exit(0)
    os.close(inside)
    with os.fdopen(answers, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    sys.stdout.buffer.write(answer)


def _leave() -> Map:
    """Namespaces for the children of this process; says which there are."""
    uid, gid = os.getuid(), os.getgid()
    if uid == 0 and libc.unshare(EVERYTHING) == 0:
        return {"namespaces": True, "user": "own"}
    if libc.unshare(EVERYTHING | NEW_USER) == 0:
        with contextlib.suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1")
        with contextlib.suppress(OSError):  # of this namespace only; the filter of calls says the same
            Path("/proc/sys/user/max_user_namespaces").write_text("0")
        return {"namespaces": True, "user": "mapped"}
    return _stay()


def _stay() -> Map:
    """Without namespaces."""
    return {"namespaces": False, "user": "own" if os.getuid() == 0 else "same"}


def _inside(order: Map, isolation: Map, answers: int) -> None:
    """The first process of the jail: prepare, run one program after the other, answer."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel spares it signals that it does not catch
    work = order["folder"]
    isolation["files"] = False
    if isolation["namespaces"]:
        try:
            build_root(order, work)
            work, isolation["files"] = "/tmp", True
        except OSError as error:
            isolation["why"] = str(error)
    isolation["seccomp"] = seccomp.is_supported()
    jail = Jail(order, isolation, work)
    is_refused = order["require"] and not all(isolation[part] for part in ("namespaces", "files", "seccomp"))
    results: list[Map] = []
    deadline = time.monotonic() + order["total_s"]
    for program in order["programs"] if not is_refused else []:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            results.append(
                {"outcome": "timeout", "stdout": "", "stderr": "total_s is used up", "wall_s": 0.0}
            )
            continue
        results.append(jail.run(program, min(order["time_s"], left_s)))
    report = {**isolation, "network": isolation["namespaces"]}
    with os.fdopen(answers, "wb") as stream:
        stream.write(json.dumps({"results": results, "isolation": report}).encode())


class Jail:
    """Runs programs under limits, one at a time."""

    def __init__(self, order: Map, isolation: Map, work: str) -> None:
        self.order, self.isolation, self.work = order, isolation, work
        self.uid = FIRST_UID + order["number"] % NUM_UIDS

    def run(self, program: Map, time_s: float) -> Map:
        """Run one program to its end, or to the first limit that it meets."""
        self._clean()
        pipes = {name: os.pipe() for name in ("stdin", "stdout", "stderr")}
        child = os.fork()
        if child == 0:
            self._become(program, pipes)
        for name, (reader, writer) in pipes.items():
            os.close(reader if name == "stdin" else writer)
        watch = Watch(child, self.order, self.isolation["files"])
        started = time.monotonic()
        try:
            outcome, code, stdout, stderr = watch.follow(
                program["stdin"].encode(), pipes["stdin"][1], pipes["stdout"][0], pipes["stderr"][0], time_s
            )
        finally:
            self._kill_all(child)
        return {
            "outcome": outcome,
            "code": code,
            "stdout": stdout.decode(errors="replace"),
            "stderr": stderr[-2000:].decode(errors="replace"),
            "wall_s": round(time.monotonic() - started, 3),
        }

    def _become(self, program: Map, pipes: Map) -> None:
        """In the child: no way back from here."""
        try:
            os.setsid()
            for target, (name, end) in enumerate((("stdin", 0), ("stdout", 1), ("stderr", 1))):
                os.dup2(pipes[name][end], target)
            os.closerange(3, 4096)
            os.chdir(self.work)
            named = _program_arguments(program["source"])
            _limit(self.order)
            libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            self._drop_user()
            if self.isolation["seccomp"]:
                seccomp.install()
            environment = {"PATH": "/usr/bin:/bin", "HOME": self.work, "TMPDIR": self.work, "LANG": "C.UTF-8"}
            flags = ["-I", "-B"] if self.order["packages"] else ["-I", "-B", "-S"]
            # Without a root folder of its own, the interpreter may be where only its owner can read it.
            for python in (self.order["python"], *OTHER_PYTHONS):
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    os.execve(python, [python, *flags, *named], environment)
            os.write(2, b"no interpreter that this user may run")
        except BaseException as error:
            os.write(2, f"the jail could not start the program: {error!r}".encode())
        finally:
            os._exit(126)

    def _drop_user(self) -> None:
        if self.isolation["user"] == "own":
            os.setgroups([])
            os.setgid(self.uid)
            os.setuid(self.uid)
        # Where the user is mapped or the same, exec drops whatever the namespace gave.

    def _kill_all(self, child: int) -> None:
        """Nothing of a program outlives it."""
        if self.isolation["namespaces"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # everything in this namespace but its first process
        else:
            for _ in range(100):  # children may appear while their parents are killed
                found = descendants()
                if not found:
                    break
                for pid in found:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                reap()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
        reap(wait=self.isolation["namespaces"])

    def _clean(self) -> None:
        """An empty folder for each program, owned by who it runs as."""
        empty(self.work)
        if not self.isolation["files"] and self.isolation["user"] == "own":
            os.chown(self.work, self.uid, self.uid)


def _program_arguments(source: str) -> list[str]:
    """How Python is given the program: in a file of the folder where it is too long for an argument."""
    content = os.fsencode(source)
    if len(content) < LONGEST_ARGUMENT:
        return ["-c", source]
    path = Path("program.py")
    path.write_bytes(content)
    path.chmod(0o644)
    return [str(path)]


def _limit(order: Map) -> None:
    """Limits of the process that becomes the program, and of each process that it starts."""
    cpu_s = max(1, -(-int(order["cpu_s"] * 1000) // 1000))
    limits = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_AS: (order["memory_mb"] << 20,) * 2,
        resource.RLIMIT_FSIZE: (order["file_mb"] << 20,) * 2,
        resource.RLIMIT_NPROC: (order["max_processes"],) * 2,
        resource.RLIMIT_NOFILE: (64, 64),  # the buffers of pipes and sockets belong to no process
        resource.RLIMIT_SIGPENDING: (256, 256),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
    }
    for number, limit in limits.items():
        resource.setrlimit(number, limit)


def _die_with_parent() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
