"""Sends this process a signal at a given call: before it, or when it has returned."""

import asyncio
import os
from collections.abc import Callable
from functools import wraps
from signal import Signals
from typing import Any


def arrange_signal(owner: Any, name: str, is_after: bool, count: int, number: Signals) -> None:
    """At the `count`-th call of the function `name` of `owner`, a module or class."""
    function: Callable[..., Any] = getattr(owner, name)
    num_left = count

    def count_down() -> None:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            os.kill(os.getpid(), number)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_after:
            count_down()
        result = function(*args, **kwargs)
        if is_after:
            count_down()
        return result

    @wraps(function)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        if not is_after:
            count_down()
        result = await function(*args, **kwargs)
        if is_after:
            count_down()
        return result

    setattr(owner, name, call_async if asyncio.iscoroutinefunction(function) else call)
