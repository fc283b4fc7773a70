"""Which replicas a reward has: each says every few seconds that it is there, and is gone when it does not.

Times are those of the Redis server, so that machines need not agree on theirs.
"""

import asyncio

import structlog

from common.broker import Broker
from common.keys import Keys
from common.presence import server_time_s

log = structlog.get_logger(__name__)

BEATS_PER_TTL = 3


class ReplicaRegistry:
    """The replicas of one reward of one run."""

    def __init__(self, broker: Broker, keys: Keys, reward: str, ttl_s: float) -> None:
        self._broker, self._key, self._ttl_s = broker, keys.replicas(reward), ttl_s

    async def announce(self, url: str) -> None:
        """Say that the replica at `url` is there; also forgets those that fell silent."""
        now_s = await server_time_s(self._broker)
        await self._broker.execute("ZADD", self._key, now_s, url)
        await self._broker.execute("ZREMRANGEBYSCORE", self._key, "-inf", f"({now_s - self._ttl_s}")

    async def withdraw(self, url: str) -> None:
        """Leave in an orderly way: no new requests will come."""
        await self._broker.execute("ZREM", self._key, url)

    async def urls(self) -> list[str]:
        """The replicas that spoke lately."""
        now_s = await server_time_s(self._broker)
        # Not those from the future either: they spoke before the server's clock was set back.
        first, last = now_s - self._ttl_s, now_s + self._ttl_s
        found = await self._broker.execute("ZRANGEBYSCORE", self._key, first, last)
        return sorted(url.decode() for url in found)

    async def keep_announcing(self, url: str) -> None:
        """Announce until cancelled."""
        while True:
            await self.announce(url)
            await asyncio.sleep(self._ttl_s / BEATS_PER_TTL)
