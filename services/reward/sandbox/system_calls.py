"""The system calls that a program in a jail may make: a list, made into a filter by libseccomp.

Allowed are those that Python, its standard library and numpy need to compute. All others fail with ENOSYS,
which C libraries handle. Missing are, among others, ways out of the jail (mounts, namespaces, ptrace, the
network), and memory that belongs to no process and so counts for no limit: memfd, shared memory, sockets that
wait to be accepted, inotify, locks on parts of files, extended attributes. `setuid` is allowed because the
launcher gives up root with it; without root it is of no use. `setsid` and `setpgid` are missing: all that a
program starts stays in its process group, and is killed with that group.
"""

import ctypes
import errno
import functools
import tempfile
from typing import Any

ALLOWED = """
access alarm arch_prctl brk capget chdir chmod chown clock_getres clock_gettime clock_nanosleep close
close_range copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait
epoll_pwait2 epoll_wait eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64
fallocate fchdir fchmod fchmodat fchown fchownat fdatasync fgetxattr flistxattr flock fork fstat fstatfs
fsync ftruncate futex futex_waitv getcpu getcwd getdents getdents64 getegid geteuid getgid getgroups
getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit
getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr kill lchown lgetxattr link
linkat listxattr llistxattr lseek lstat madvise membarrier mincore mkdir mkdirat mprotect mremap msync
munmap nanosleep newfstatat open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2 poll ppoll
prctl pread64 preadv preadv2 pselect6 pwrite64 pwritev pwritev2 read readlink readlinkat readv recvfrom
recvmsg rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask
rt_sigreturn rt_sigsuspend rt_sigtimedwait sched_get_priority_max sched_get_priority_min sched_getaffinity
sched_getparam sched_getscheduler sched_setaffinity sched_yield select sendfile sendto set_robust_list
set_tid_address setgid setgroups setitimer setuid shutdown sigaltstack signalfd4 stat statfs statx symlink
symlinkat sysinfo tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_settime
timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat utime
utimensat utimes vfork wait4 waitid write writev
""".split()  # noqa: SIM905 (in lines)
ALLOW = 0x7FFF0000
ERROR = 0x00050000
EQUAL = 4
MASKED = 7
NEW_NAMESPACES = 0x7E020000
MAP_SHARED = 1
AF_UNIX = 1
FCNTL = (0, 1, 2, 3, 4, 1030, 1032)
"""Duplicate a descriptor, read and set its flags, read a pipe's size. No locks on parts of files: their
number has no limit."""
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Read a terminal's settings and size and the bytes that can be read; set whether a descriptor blocks and is
inherited."""
CONDITIONS = (
    ("clone", 0, MASKED, NEW_NAMESPACES, 0),
    ("mmap", 3, MASKED, MAP_SHARED, 0),
    ("prlimit64", 0, EQUAL, 0, 0),  # its own limits only
    ("socketpair", 0, EQUAL, AF_UNIX, 0),
    *(("fcntl", 1, EQUAL, command, 0) for command in FCNTL),
    *(("ioctl", 1, EQUAL, request, 0) for request in IOCTL),
)
"""Calls allowed for some arguments only: name, index of the argument, comparison, two operands."""
BAD_ARCH_ATTRIBUTE = 2


class _Argument(ctypes.Structure):
    _fields_ = (
        ("number", ctypes.c_uint),
        ("comparison", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


@functools.cache
def make_filter() -> bytes:
    """The filter as a BPF program.

    Raises:
        OSError: libseccomp is missing, or does not support this machine.
    """
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ERROR | errno.ENOSYS))
    if not context:
        raise OSError("libseccomp makes no filter here")
    try:
        # Calls of another architecture, such as x32, fail too; by default libseccomp kills the caller.
        library.seccomp_attr_set(context, BAD_ARCH_ATTRIBUTE, ERROR | errno.ENOSYS)
        for name in ALLOWED:
            _add(library, context, ALLOW, name)
        for name, *argument in CONDITIONS:
            _add(library, context, ALLOW, name, _Argument(*argument))
        _add(library, context, ERROR | errno.ENETUNREACH, "socket")  # an error that programs handle
        with tempfile.TemporaryFile() as file:
            if library.seccomp_export_bpf(context, file.fileno()) != 0:
                raise OSError("libseccomp gives no filter")
            file.seek(0)
            return file.read()
    finally:
        library.seccomp_release(context)


def _add(library: Any, context: ctypes.c_void_p, action: int, name: str, *arguments: _Argument) -> None:
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number < 0:  # not of this architecture, or newer than the library
        return
    array = (_Argument * len(arguments))(*arguments)
    if library.seccomp_rule_add_array(context, action, number, len(arguments), array) != 0:
        raise OSError(f"libseccomp takes no rule for {name}")
