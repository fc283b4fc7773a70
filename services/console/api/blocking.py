"""Coroutines for callers that cannot await: also inside of a notebook, where a loop is running already."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tidemill.common.process.programs import run_main

T = TypeVar("T")


def wait_for(make: Callable[[], Coroutine[Any, Any, T]], stop: Callable[[], None] = lambda: None) -> T:
    """The result of the coroutine that `make` makes: on a loop of its own, in a thread where one runs here.

    Ctrl-C calls `stop` in that case, and waits for what the coroutine makes of it.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run_main(make())
    with ThreadPoolExecutor(1, "tidemill") as threads:
        future = threads.submit(lambda: run_main(make()))
        while True:
            try:
                return future.result()
            except KeyboardInterrupt:
                stop()
