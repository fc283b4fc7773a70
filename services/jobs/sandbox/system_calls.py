"""What a program in a jail may ask of the kernel: a list of what may be called, made into a filter by
libseccomp.

Allowed is what Python, its standard library and numpy compute with. All else does not exist there: ENOSYS,
which C libraries have an answer to. Among what is missing are ways out (mounts, namespaces, ptrace, the
network), and memory that belongs to no process, which no limit on processes counts: memfd, shared memory,
sockets that wait to be accepted, notes of changed files, locks on parts of files, extended attributes.
Who is not root gains nothing by `setuid`, by which the launcher stops being root.
`setsid` and `setpgid` are missing too: all that a program starts stays in its process group, and ends with
that.
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
ALLOW, ERROR = 0x7FFF0000, 0x00050000
EQUAL, MASKED = 4, 7
NEW_NAMESPACES, MAP_SHARED, AF_UNIX = 0x7E020000, 1, 1
FCNTL = (0, 1, 2, 3, 4, 1030, 1032)
"""Duplicates, flags, the size of a pipe. No locks on parts of files, of which there may be any number."""
IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Whether it is a terminal, its size, what waits to be read, whether it blocks and is inherited."""
CONDITIONS = (
    ("clone", 0, MASKED, NEW_NAMESPACES, 0),
    ("mmap", 3, MASKED, MAP_SHARED, 0),
    ("prlimit64", 0, EQUAL, 0, 0),  # its own limits only
    ("socketpair", 0, EQUAL, AF_UNIX, 0),
    *(("fcntl", 1, EQUAL, command, 0) for command in FCNTL),
    *(("ioctl", 1, EQUAL, request, 0) for request in IOCTL),
)
"""Allowed for some arguments: call, argument, comparison, and what it is compared with."""
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
    """The filter, as the kernel takes it.

    Raises:
        OSError: there is no libseccomp here, or it knows nothing of this machine.
    """
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ERROR | errno.ENOSYS))
    if not context:
        raise OSError("libseccomp makes no filter here")
    try:
        # Numbers of another architecture, such as x32's, do not exist either: libseccomp's own choice is to
        # kill who calls one.
        library.seccomp_attr_set(context, BAD_ARCH_ATTRIBUTE, ERROR | errno.ENOSYS)
        for name in ALLOWED:
            _add(library, context, ALLOW, name)
        for name, *argument in CONDITIONS:
            _add(library, context, ALLOW, name, _Argument(*argument))
        _add(library, context, ERROR | errno.ENETUNREACH, "socket")  # the answer that programs know
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
