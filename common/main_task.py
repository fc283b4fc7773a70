"""One run of an event loop, whatever the size of its result. Programs use it in place of `asyncio.run`."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_main(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on an event loop of its own to its end, and return its result.

    `asyncio.run` gives its main task to the handler of Ctrl-C. When it takes that handler away again,
    Python's signal module puts it into words, and with it the task's whole result: for the records of a run
    these are gigabytes. Here the main task has no result.
    """
    results: list[T] = []

    async def keep_result() -> None:
        results.append(await work)

    asyncio.run(keep_result())  # noqa: TID251
    (result,) = results
    return result
