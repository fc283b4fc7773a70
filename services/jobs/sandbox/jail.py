"""Runs programs that nobody trusts. A script of its own, with the standard library only (`python -I -S`).

It reads one JSON map from stdin and writes one to stdout. The order is what makes it safe: first this
process leaves for namespaces of its own (processes, network, mounts), then it builds a root folder that
holds nothing but the interpreter, and only then, for each program, a child gives up all privileges, takes
its limits upon it and becomes the program. This process is the first of its namespace: when it ends, for
whatever reason, the kernel kills everything inside. It ends with its parent.

What the kernel refuses is left out and reported under `isolation`; limits always hold.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 38, 36
NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_USER, NEW_PIDS, NEW_NET = (
    0x00020000,
    0x04000000,
    0x08000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
EVERYTHING = NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_PIDS | NEW_NET
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
NOBODY = 65534
FIRST_UID, NUM_UIDS = 200_000, 60_000
"""Without namespaces, each jail has a user of its own: limits on processes count by user."""
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("null", "zero", "urandom", "random")
WATCH_S = 0.02
READ_BYTES = 1 << 16

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Run what stdin asks for."""
    os.setsid() if os.getpid() != os.getsid(0) else None
    _die_with_parent()
    order = json.load(sys.stdin)
    isolation = _leave()
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


def _leave() -> dict:
    """Namespaces for the children of this process; says which there are."""
    uid, gid = os.getuid(), os.getgid()
    if uid == 0 and libc.unshare(EVERYTHING) == 0:
        return {"namespaces": True, "user": "nobody"}
    if libc.unshare(EVERYTHING | NEW_USER) == 0:
        with contextlib.suppress(OSError):
            Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{NOBODY} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{NOBODY} {gid} 1")
        return {"namespaces": True, "user": "mapped"}
    return {"namespaces": False, "user": "own" if uid == 0 else "same"}


def _inside(order: dict, isolation: dict, answers: int) -> None:
    """The first process of the jail: prepare, run one program after the other, answer."""
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    work = order["folder"]
    isolation["files"] = False
    if isolation["namespaces"]:
        try:
            _build_root(order, work)
            work, isolation["files"] = "/tmp", True
        except OSError as error:
            isolation["why"] = str(error)
    jail = Jail(order, isolation, work)
    results = []
    deadline = time.monotonic() + order["total_s"]
    for program in order["programs"]:
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

    def __init__(self, order: dict, isolation: dict, work: str) -> None:
        self.order, self.isolation, self.work = order, isolation, work
        self.uid = FIRST_UID + os.getppid() % NUM_UIDS if isolation["user"] == "own" else NOBODY

    def run(self, program: dict, time_s: float) -> dict:
        """Run one program to its end, or to the first limit that it meets."""
        self._clean()
        pipes = {name: os.pipe() for name in ("stdin", "stdout", "stderr")}
        child = os.fork()
        if child == 0:
            self._become(program, pipes)
        for name, (reader, writer) in pipes.items():
            os.close(reader if name == "stdin" else writer)
        watch = _Watch(child, self.order, self.isolation["namespaces"])
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

    def _become(self, program: dict, pipes: dict) -> None:
        """In the child: no way back from here."""
        try:
            os.setsid()
            for target, (name, end) in enumerate((("stdin", 0), ("stdout", 1), ("stderr", 1))):
                os.dup2(pipes[name][end], target)
            os.closerange(3, 4096)
            os.chdir(self.work)
            _limit(self.order)
            libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            self._drop_user()
            environment = {"PATH": "/usr/bin:/bin", "HOME": self.work, "TMPDIR": self.work, "LANG": "C.UTF-8"}
            python = self.order["python"]
            flags = ["-I", "-B"] if self.order["packages"] else ["-I", "-B", "-S"]
            os.execve(python, [python, *flags, "-c", program["source"]], environment)
        except BaseException as error:
            os.write(2, f"the jail could not start the program: {error!r}".encode())
        finally:
            os._exit(126)

    def _drop_user(self) -> None:
        if self.isolation["user"] in ("nobody", "own"):
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
                found = _descendants(os.getpid())
                if not found:
                    break
                for pid in found:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                _reap()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
        _reap(wait=self.isolation["namespaces"])

    def _clean(self) -> None:
        """An empty folder for each program, owned by who it runs as."""
        for name in os.listdir(self.work):
            _remove(Path(self.work, name))
        if not self.isolation["files"] and self.isolation["user"] in ("nobody", "own"):
            os.chown(self.work, self.uid, self.uid)


class _Watch:
    """Follows one running program: its output, its time, the memory and number of its processes."""

    def __init__(self, child: int, order: dict, has_namespace: bool) -> None:
        self.child, self.order, self.has_namespace = child, order, has_namespace
        self.max_bytes = order["output_kb"] << 10

    def follow(self, fed: bytes, stdin: int, stdout: int, stderr: int, time_s: float) -> tuple:
        """How it ended, its exit code, and what it wrote."""
        for end in (stdin, stdout, stderr):
            os.set_blocking(end, False)
        written = {stdout: bytearray(), stderr: bytearray()}
        deadline, looked, code = time.monotonic() + time_s, 0.0, None
        outcome = ""
        try:
            while not outcome:
                ready, free, _ = select.select(list(written), [stdin] if fed else [], [], WATCH_S)
                for end in ready:
                    _read_into(written[end], end)
                if free:
                    fed = _feed(stdin, fed)
                if not fed and stdin >= 0:
                    os.close(stdin)
                    stdin = -1
                code = code if code is not None else _exit_code(self.child)
                if sum(map(len, written.values())) > self.max_bytes:
                    outcome = "output"
                elif code is not None and not any(_read_into(*pair) for pair in _pairs(written)):
                    outcome = _ending(code)
                elif time.monotonic() > deadline:
                    outcome = "timeout"
                elif time.monotonic() - looked > 2 * WATCH_S:
                    looked = time.monotonic()
                    outcome = self._excess()
        finally:
            for end in (stdin, stdout, stderr):
                if end >= 0:
                    os.close(end)
        return (
            outcome,
            code,
            bytes(written[stdout][: self.max_bytes]),
            bytes(written[stderr][: self.max_bytes]),
        )

    def _excess(self) -> str:
        """Limits that no setrlimit has: of all processes together."""
        pids = _others() if self.has_namespace else _descendants(os.getpid())
        if len(pids) > self.order["max_processes"]:
            return "processes"
        return "memory" if sum(map(_resident_bytes, pids)) > self.order["memory_mb"] << 20 else ""


def _pairs(written: dict) -> list:
    return [(buffer, end) for end, buffer in written.items()]


def _ending(code: int) -> str:
    if code == -signal.SIGXCPU:
        return "timeout"
    if code == -signal.SIGXFSZ:
        return "file"
    return "done" if code >= 0 else "killed"


def _read_into(buffer: bytearray, end: int) -> bool:
    """Whether there was anything."""
    try:
        part = os.read(end, READ_BYTES)
    except BlockingIOError:
        return False
    buffer += part
    return bool(part)


def _feed(stdin: int, fed: bytes) -> bytes:
    try:
        return fed[os.write(stdin, fed[:READ_BYTES]) :]
    except BlockingIOError:
        return fed
    except BrokenPipeError:
        return b""


def _exit_code(child: int) -> "int | None":
    """Reap what has ended; the code of `child` if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = os.waitstatus_to_exitcode(status)


def _reap(wait: bool = False) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0 if wait else os.WNOHANG)[0]:
            pass


def _limit(order: dict) -> None:
    """Limits of the process that becomes the program, and of each process that it starts."""
    cpu_s = max(1, -(-int(order["cpu_s"] * 1000) // 1000))
    limits = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),
        resource.RLIMIT_AS: (order["memory_mb"] << 20,) * 2,
        resource.RLIMIT_FSIZE: (order["file_mb"] << 20,) * 2,
        resource.RLIMIT_NPROC: (order["max_processes"],) * 2,
        resource.RLIMIT_NOFILE: (256, 256),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_MEMLOCK: (0, 0),
    }
    for number, limit in limits.items():
        resource.setrlimit(number, limit)


def _build_root(order: dict, work: str) -> None:
    """A root folder in memory with the interpreter, read-only, and an empty /tmp; nothing else of the machine."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("jail", work, "tmpfs", MS_NOSUID | MS_NODEV, f"size={order['file_mb'] + 4}m,mode=755")
    for folder in (*SYSTEM_FOLDERS, *order["shown"]):
        _show(folder, work)
    os.mkdir(f"{work}/dev")
    for name in DEVICES:
        Path(work, "dev", name).touch()
        _mount(f"/dev/{name}", f"{work}/dev/{name}", None, MS_BIND)
    os.mkdir(f"{work}/proc")
    # Where the machine's own /proc is partly hidden, as in containers, a new one is refused: none then.
    with contextlib.suppress(OSError):
        _mount("proc", f"{work}/proc", "proc", MS_NOSUID | MS_NODEV | MS_RDONLY)
    os.mkdir(f"{work}/tmp")
    _mount("tmp", f"{work}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={order['file_mb']}m,mode=1777")
    os.mkdir(f"{work}/old")
    if libc.syscall(SYS_PIVOT_ROOT[os.uname().machine], work.encode(), f"{work}/old".encode()) != 0:
        raise OSError(ctypes.get_errno(), "pivot_root")
    os.chdir("/")
    if libc.umount2(b"/old", MNT_DETACH) != 0:
        raise OSError(ctypes.get_errno(), "umount of the machine's files")
    os.rmdir("/old")
    _mount("jail", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _show(folder: str, work: str) -> None:
    """The same folder or file inside, read-only; links stay links."""
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
    flags = os.statvfs(inside).f_flag & (MS_NOSUID | MS_NODEV | 8)  # a mapped user may not clear these
    _mount(folder, str(inside), None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | flags)


def _mount(source: str, target: str, kind: "str | None", flags: int, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode() if kind else None, flags, options.encode())
    if libc.mount(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount of {target}: {os.strerror(number)}")


def _others() -> list:
    """All processes of this namespace but its first."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    return []


def _descendants(root: int) -> list:
    """Processes below `root`, wherever they moved their session; orphans come back to this process."""
    children: dict = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    children.setdefault(int(fields[1]), []).append(int(name))
    found, heads = [], [root]
    while heads:
        heads = [pid for head in heads for pid in children.get(head, [])]
        found += heads
    return found


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            for name in os.listdir(path):
                _remove(path / name)
            path.rmdir()
        else:
            path.unlink()


def _die_with_parent() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
