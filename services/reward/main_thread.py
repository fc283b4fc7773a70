"""Notices functions that set signals or alarms, as timeouts of parsers do: they need the main thread.

From another thread `signal.signal` raises, and many a library takes that for a wrong answer; an alarm would
interrupt whatever the main thread is doing. So both are noted, whoever swallows the exception: a call that
did it in another thread is worth nothing, and is made again in the main thread.
"""

import signal
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

_used = threading.Event()
_thread = threading.local()


def watch() -> None:
    """Note all use of signals from now on; to be called before the function is imported."""
    for name in ("signal", "alarm", "setitimer"):
        if hasattr(signal, name):
            setattr(signal, name, _noted(getattr(signal, name)))


def forget() -> None:
    """What importing the function did is no matter."""
    _used.clear()


def is_needed() -> bool:
    """Whether any call has used signals so far."""
    return _used.is_set()


def begin_call() -> None:
    """A call begins in this thread."""
    _thread.was_refused = False


def was_refused() -> bool:
    """Whether this thread's call wanted what only the main thread can do."""
    return bool(getattr(_thread, "was_refused", False))


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def noted(*args: Any) -> Any:
        _used.set()
        if threading.current_thread() is not threading.main_thread():
            _thread.was_refused = True
            raise ValueError("signal only works in main thread of the main interpreter")
        return function(*args)

    return noted
