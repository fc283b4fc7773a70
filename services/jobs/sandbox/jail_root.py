"""The root folder of a jail: in memory, with the interpreter read-only, an empty /tmp, and nothing else."""

import ctypes
import os
from pathlib import Path
from typing import Any

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH = 2
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("null", "urandom", "random")
"""Without `zero`, a mapping of which can be memory that belongs to no process."""
MAX_FILES = 4096

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
