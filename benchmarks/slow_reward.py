"""A reward that takes its time: uniform between two bounds, the same for a text in every run."""

import asyncio
import random
import zlib
from typing import Any


async def compute_score(solution_str: str, shortest_s: float, longest_s: float, **_: Any) -> float:
    """A number from the text, after `shortest_s` to `longest_s` seconds."""
    await asyncio.sleep(random.Random(solution_str).uniform(shortest_s, longest_s))
    return (zlib.crc32(solution_str.encode()) & 0xFFFF) / 0xFFFF
