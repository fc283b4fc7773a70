"""Which replicas servers have: each says every few seconds that it is there, and is gone when it does not.

Times are those of the Redis server, so that machines need not agree on theirs.
"""

from urllib.parse import urlsplit

from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys

TTL_S = 10.0
"""A replica that is silent this long is gone."""
BEATS_PER_TTL = 3
LANE_HEADER = "x-tidemill-lane"
"""Of requests to servers: `eval` asks for the priority of evaluation."""


class ReplicaRegistry:
    """The registered replicas of one section of `servers` of one run."""

    def __init__(self, broker: Broker, keys: Keys, servers: str, ttl_s: float = TTL_S) -> None:
        self._broker, self._key, self._ttl_s = broker, keys.replicas(servers), ttl_s

    async def announce(self, url: str) -> None:
        """Say that the replica at `url` is there; also forgets those that fell silent."""
        now_s = await self._broker.server_time_s()
        await self._broker.execute("ZADD", self._key, now_s, url)
        await self._broker.execute("ZREMRANGEBYSCORE", self._key, "-inf", f"({now_s - self._ttl_s}")

    async def withdraw(self, url: str) -> None:
        """Leave in an orderly way: no new requests will come."""
        await self._broker.execute("ZREM", self._key, url)

    async def urls(self) -> list[str]:
        """The replicas that spoke lately."""
        now_s = await self._broker.server_time_s()
        # Not those from the future either: they spoke before the server's clock was set back.
        first, last = now_s - self._ttl_s, now_s + self._ttl_s
        found = await self._broker.execute("ZRANGEBYSCORE", self._key, first, last)
        return sorted(url for raw in found if is_address(url := raw.decode(errors="replace")))


def is_address(url: str) -> bool:
    """Whether it is one of a server: whoever has a reward worker's password may register what it likes."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isascii()
        )
    except ValueError:
        return False
