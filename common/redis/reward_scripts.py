"""The Lua scripts of kept rewards, and of limits of requests; see `scripts.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tidemill.common.redis.broker import Broker
from tidemill.common.redis.scripts import Key


@dataclass(frozen=True, slots=True)
class Admission:
    """What `limits` returns.

    Example: `num_admitted` 0, `wait_ms` 150: the request waits, and asks again in 0.15 s.
    """

    num_admitted: int
    """How many of the waiting requests, from the first on."""
    wait_ms: int
    """After which to ask for the next one; -1 where that depends on a request that ends."""


async def cache_get(broker: Broker, *, rewards: Key, uses: Key, totals: Key, digest: str) -> bytes | None:
    """A cached reward."""
    value: bytes | None = await broker.script("cache_get", [rewards, uses, totals], [digest])
    return value


async def cache_put(
    broker: Broker,
    *,
    rewards: Key,
    uses: Key,
    totals: Key,
    digest: str,
    payload: bytes,
    max_bytes: int,
) -> None:
    """Cache a reward; where there are more than `max_bytes`, those used longest ago are dropped."""
    await broker.script("cache_put", [rewards, uses, totals], [digest, payload, max_bytes])


async def limits(
    broker: Broker,
    *,
    levels: Key,
    in_flight: Key,
    lane: str,
    lease_ms: int,
    concurrency: int,
    requests_per_minute: float,
    tokens_per_minute: float,
    burst_ms: int,
    evaluation_share: float,
    worker: str,
    num_evaluations: int,
    ended: Sequence[tuple[str, int]],
    renewed: Sequence[str],
    waiting: Sequence[tuple[str, int]],
) -> Admission:
    """End requests (id, tokens to give back), renew those that go on, and admit waiting ones (id, tokens)."""
    args: list[Any] = [lane, lease_ms, concurrency, requests_per_minute, tokens_per_minute, burst_ms]
    args += [evaluation_share, worker, num_evaluations, len(ended), len(renewed)]
    args += chain(chain.from_iterable(ended), renewed, chain.from_iterable(waiting))
    num_admitted, wait_ms = await broker.script("limits", [levels, in_flight], args)
    return Admission(num_admitted, wait_ms)
