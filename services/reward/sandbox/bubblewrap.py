"""The command that makes a jail: bubblewrap's namespaces and files, and Python in it."""

import functools
import os
import shutil
import sys
import sysconfig
from pathlib import Path

from tidemill.common.config.reward_kinds import SandboxConfig
from tidemill.common.errors import TidemillError
from tidemill.common.process.shortage import is_machine_fault
from tidemill.services.reward.sandbox.system_calls import make_filter

SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")
DEVICES = ("/dev/null", "/dev/urandom", "/dev/random")
"""/dev/zero is left out: a mapping of it can be memory that belongs to no process."""
PYTHON = (os.path.realpath(sys.executable), "-ISBc")
ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
LAUNCHER = Path(__file__).with_name("launcher.py").read_text(encoding="utf-8")
FETCHED = Path(sys.prefix, "bubblewrap")
"""Folder into which `make` unpacks bubblewrap on machines without it."""
NOBODY = 65534
CAP_SYS_ADMIN = 21


class SandboxError(TidemillError):
    """The jail failed, which says nothing about the code in it."""


def make_command(config: SandboxConfig, is_template: bool = False) -> list[str]:
    """The command that sets up namespaces and files; what comes after them is still to be appended.

    `is_template`: what runs in it makes namespaces and mounts for each program.

    Raises:
        SandboxError: there is no bubblewrap.
    """
    program = shutil.which("bwrap", path=f"{os.environ.get('PATH', os.defpath)}:{FETCHED}")
    if program is None:
        raise SandboxError("there is no bubblewrap (bwrap) on the PATH; Debian's package is bubblewrap")
    # Root needs no user namespace, which some kernels forbid: the launcher changes to another user.
    user = (
        ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        if is_admin()
        else ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    )
    if is_template:
        user += ["--cap-add", "CAP_SYS_ADMIN"]
    # First, because packages may lie in the machine's /tmp: they are mounted over the jail's /tmp.
    files = ["--perms", "1777", "--size", str(config.file_mb << 20), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    for path in (*SYSTEM, os.path.realpath(sys.base_prefix), *find_packages(config.packages), *DEVICES):
        if os.path.islink(path):
            files += ["--symlink", os.readlink(path), path]
        elif not path.startswith("/usr/"):
            # From below the root on to the folder that holds it: the jail's user must be able to enter each.
            above = [folder for folder in reversed(Path(path).parents) if folder != Path("/")]
            for folder in above:
                files += ["--perms", "0755", "--dir", str(folder)]
            files += ["--dev-bind" if path in DEVICES else "--ro-bind-try", path, path]
    spaces = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    return [program, *spaces, *user, "--die-with-parent", *files]


def find_packages(has_packages: bool) -> list[str]:
    """Folders of the packages that are installed beside this project; none without `has_packages`."""
    names = ("purelib", "platlib") if has_packages else ()
    return sorted({os.path.realpath(sysconfig.get_path(name)) for name in names})


@functools.cache
def is_admin() -> bool:
    """Whether this process is root and may make namespaces, so that it needs no user namespace."""
    status = Path("/proc/self/status").read_text().splitlines()
    capabilities = next((line.split()[1] for line in status if line.startswith("CapEff:")), "0")
    return os.geteuid() == 0 and bool(int(capabilities, 16) >> CAP_SYS_ADMIN & 1)


def read_filter() -> bytes:
    """The filter of system calls.

    Raises:
        SandboxError: it cannot be made here.
    """
    try:
        return make_filter()
    except OSError as error:
        if is_machine_fault(error):
            raise
        raise SandboxError(f"no filter of system calls (Debian's libseccomp2): {error}") from None
