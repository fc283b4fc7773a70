"""Long waits say on stderr what they wait for, so that nobody takes them for a program that hangs."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def said_while_waiting(line: Callable[[float], str], first_s: float) -> Iterator[None]:
    """Print `line(seconds waited)` after `first_s`, and each time it has waited twice as long."""
    has_ended = threading.Event()

    def repeat() -> None:
        waited_s = 0.0
        pause_s = first_s
        while not has_ended.wait(pause_s):
            waited_s += pause_s
            pause_s = waited_s
            print(line(waited_s), file=sys.stderr, flush=True)

    thread = threading.Thread(target=repeat, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
