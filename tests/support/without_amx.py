"""`python -m tests.support.without_amx COMMAND...`: runs a command on a CPU that lists AMX and cannot use it.

Virtual machines are often like that: /proc/cpuinfo shows the tiles, and the first instruction that uses them
ends a process by SIGILL. Here a filter of system calls refuses what Linux wants to be asked for before that,
as kernels without support do. On a CPU that has no tiles it changes nothing.
"""

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Callable

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
ARCH_PRCTL = 158
ARCH_REQ_XCOMP_PERM = 0x1023
"""On x86-64; elsewhere there are no tiles to refuse."""
RETURN_ALLOW = 0x7FFF0000
RETURN_ERRNO = 0x00050000
LOAD_WORD = 0x20
JUMP_IF_EQUAL = 0x15
RETURN = 0x06
NUMBER_AT = 0
FIRST_ARGUMENT_AT = 16
"""Offsets in `struct seccomp_data`."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def refuse_tiles() -> None:
    """Refuse tiles to this process and to all that it starts, for good."""
    steps = [
        (LOAD_WORD, 0, 0, NUMBER_AT),
        (JUMP_IF_EQUAL, 0, 3, ARCH_PRCTL),
        (LOAD_WORD, 0, 0, FIRST_ARGUMENT_AT),
        (JUMP_IF_EQUAL, 0, 1, ARCH_REQ_XCOMP_PERM),
        (RETURN, 0, 0, RETURN_ERRNO | errno.EOPNOTSUPP),
        (RETURN, 0, 0, RETURN_ALLOW),
    ]
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    program = _Program(len(steps), code)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    _checked(lambda: prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(lambda: prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0))


def _checked(call: Callable[[], int]) -> None:
    if call() != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


if __name__ == "__main__":
    refuse_tiles()
    os.execvp(sys.argv[1], sys.argv[1:])
