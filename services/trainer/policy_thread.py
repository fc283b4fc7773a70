"""The thread that does the policy's work, so that streams keep flowing meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class PolicyThread:
    """Runs the policy's calls one at a time."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="policy")

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Run one call to its end, also when the caller is cancelled."""
        return await asyncio.shield(
            asyncio.get_running_loop().run_in_executor(self._executor, function, *args)
        )
