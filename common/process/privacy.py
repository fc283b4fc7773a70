"""What other processes of the same user may read of this one."""

import ctypes
import sys

_PR_SET_DUMPABLE = 4


def hide_memory() -> None:
    """Keep other processes of this user from reading this one's memory and variables, which hold passwords:
    its children may run code that a model wrote. Programs that it starts are not hidden."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
