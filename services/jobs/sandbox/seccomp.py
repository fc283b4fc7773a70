"""What a program in a jail may ask of the kernel. Standard library only, like the jail itself.

A filter of system calls that no process takes off again, and that all its children have. It refuses what a
program that computes has no use for, in three kinds: ways out (mounts, namespaces, other processes, the
network), attack surface (bpf, io_uring, keys, performance counters), and memory that belongs to no process,
which the watch over a jail's memory could not see (memfd, System V segments, shared mappings, what waits in
sockets that nobody has accepted, notes of changed files). Calls that are
newer than the table below do not exist here: ENOSYS, which C libraries have an answer to.
"""

import ctypes
import errno
import os
import struct

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 38, 22, 2
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
LOAD, EQUAL, GREATER, BITS, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
NUMBER_AT, ARCH_AT, ARGUMENTS_AT = 0, 4, 16
AF_UNIX = 1
NEW_NAMESPACES = 0x7E020000
"""Flags of clone() that make a namespace."""
MAP_SHARED, MAP_KIND = 1, 0x0F
F_SETPIPE_SZ, TIOCSTI = 1031, 0x5412

ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
DENIED = {
    "x86_64": {
        "accept": 43, "accept4": 288, "acct": 163, "add_key": 248, "adjtimex": 159, "bind": 49,
        "bpf": 321, "chroot": 161, "clock_adjtime": 305, "clock_settime": 227, "connect": 42,
        "delete_module": 176, "fanotify_init": 300, "finit_module": 313, "init_module": 175,
        "inotify_init": 253, "inotify_init1": 294, "io_setup": 206, "ioperm": 173, "iopl": 172,
        "kcmp": 312, "kexec_file_load": 320, "kexec_load": 246, "keyctl": 250, "listen": 50,
        "lookup_dcookie": 212, "mbind": 237, "memfd_create": 319, "migrate_pages": 256, "mknod": 133,
        "mknodat": 259, "modify_ldt": 154, "mount": 165, "move_pages": 279, "mq_open": 240, "msgget": 68,
        "name_to_handle_at": 303, "open_by_handle_at": 304, "perf_event_open": 298, "personality": 135,
        "pivot_root": 155, "process_vm_readv": 310, "process_vm_writev": 311, "ptrace": 101,
        "quotactl": 179, "reboot": 169, "remap_file_pages": 216, "request_key": 249, "semget": 64,
        "sendmmsg": 307, "sendmsg": 46, "set_mempolicy": 238, "setdomainname": 171, "sethostname": 170,
        "setns": 308, "settimeofday": 164, "shmat": 30, "shmget": 29, "swapoff": 168, "swapon": 167,
        "syslog": 103, "umount2": 166, "unshare": 272, "uselib": 134, "userfaultfd": 323, "vhangup": 153,
        "vmsplice": 278,
    },
    "aarch64": {
        "accept": 202, "accept4": 242, "acct": 89, "add_key": 217, "adjtimex": 171, "bind": 200,
        "bpf": 280, "chroot": 51, "clock_adjtime": 266, "clock_settime": 112, "connect": 203,
        "delete_module": 106, "fanotify_init": 262, "finit_module": 273, "init_module": 105,
        "inotify_init1": 26, "io_setup": 0, "kcmp": 272, "kexec_file_load": 294, "kexec_load": 104,
        "keyctl": 219, "listen": 201, "lookup_dcookie": 18, "mbind": 235, "memfd_create": 279,
        "migrate_pages": 238, "mknodat": 33, "mount": 40, "move_pages": 239, "mq_open": 180,
        "msgget": 186, "name_to_handle_at": 264, "open_by_handle_at": 265, "perf_event_open": 241,
        "personality": 92, "pivot_root": 41, "process_vm_readv": 270, "process_vm_writev": 271,
        "ptrace": 117, "quotactl": 60, "reboot": 142, "remap_file_pages": 234, "request_key": 218,
        "semget": 190, "sendmmsg": 269, "sendmsg": 211, "set_mempolicy": 237, "setdomainname": 162,
        "sethostname": 161, "setns": 268, "settimeofday": 170, "shmat": 196, "shmget": 194,
        "swapoff": 225, "swapon": 224, "syslog": 116, "umount2": 39, "unshare": 97, "userfaultfd": 282,
        "vhangup": 58, "vmsplice": 75,
    },
}  # fmt: skip
FIRST_NEW = {"x86_64": 335, "aarch64": 294}
"""Numbers from here on are looked up in `NEW`, which is the same for both."""
NEW = {"pidfd_send_signal": 424, "pidfd_open": 434, "close_range": 436, "openat2": 437, "faccessat2": 439}
NEW |= {"epoll_pwait2": 441, "futex_waitv": 449}
CHECKED = {
    "x86_64": {
        "clone": 56, "socket": 41, "socketpair": 53, "mmap": 9, "fcntl": 72, "ioctl": 16, "prlimit64": 302,
    },
    "aarch64": {
        "clone": 220, "socket": 198, "socketpair": 199, "mmap": 222, "fcntl": 25, "ioctl": 29,
        "prlimit64": 261,
    },
}  # fmt: skip
"""Calls that are looked at more closely."""

libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def is_supported() -> bool:
    """Whether this kernel takes filters, and the table above is of this machine."""
    answer = libc.prctl(PR_SET_SECCOMP, MODE_FILTER, None, 0, 0)
    return os.uname().machine in ARCHES and answer != 0 and ctypes.get_errno() == errno.EFAULT


def install() -> None:
    """Take the filter upon this process, and all that it becomes and starts.

    Raises:
        OSError: the kernel refused it.
    """
    code = program(os.uname().machine)
    filled = _Program(len(code) // 8, code)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if libc.prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(filled), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the filter of system calls")


def program(machine: str) -> bytes:
    """The filter, as BPF."""
    calls = CHECKED[machine]
    parts = [
        _step(LOAD, ARCH_AT) + _step(EQUAL, ARCHES[machine], 1, 0) + _give(KILL),
        _step(LOAD, NUMBER_AT),
        *(_refuse(number, errno.EPERM) for number in sorted(DENIED[machine].values())),
        _argument(calls["clone"], 0, _step(BITS, NEW_NAMESPACES, 0, 1) + _give(ERROR | errno.EPERM)),
        *(
            # The network is unreachable: the answer that programs know.
            _argument(calls[name], 0, _step(EQUAL, AF_UNIX, 1, 0) + _give(ERROR | errno.ENETUNREACH))
            for name in ("socket", "socketpair")
        ),
        _argument(  # shared, with or without validation: both have the lowest bit
            calls["mmap"],
            3,
            _step(AND, MAP_KIND) + _step(BITS, MAP_SHARED, 0, 1) + _give(ERROR | errno.EPERM),
        ),
        # Limits of its own only: where users are mapped, those of the jail's first process were in reach.
        _argument(calls["prlimit64"], 0, _step(EQUAL, 0, 1, 0) + _give(ERROR | errno.EPERM)),
        _argument(calls["fcntl"], 1, _step(EQUAL, F_SETPIPE_SZ, 0, 1) + _give(ERROR | errno.EPERM)),
        _argument(calls["ioctl"], 1, _step(EQUAL, TIOCSTI, 0, 1) + _give(ERROR | errno.EPERM)),
        _step(GREATER, FIRST_NEW[machine], 1, 0) + _give(ALLOW),
        *(_step(EQUAL, number, 0, 1) + _give(ALLOW) for number in sorted(NEW.values())),
        _give(ERROR | errno.ENOSYS),
    ]
    return b"".join(parts)


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _give(value: int) -> bytes:
    return _step(RETURN, value)


def _refuse(number: int, error: int) -> bytes:
    return _step(EQUAL, number, 0, 1) + _give(ERROR | error)


def _argument(number: int, index: int, judgement: bytes) -> bytes:
    """For one call: judge an argument's lower half; what passes, and all other calls, go on."""
    body = _step(LOAD, ARGUMENTS_AT + 8 * index) + judgement + _step(LOAD, NUMBER_AT)
    return _step(EQUAL, number, 0, len(body) // 8) + body
