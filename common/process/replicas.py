"""Finds the replicas of servers: those whose heartbeats have an address for requests."""

from urllib.parse import urlsplit

from tidemill.common.process.heartbeats import read_heartbeats
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys

LANE_HEADER = "x-tidemill-lane"
"""Header of requests to servers; `eval` asks for the priority of evaluation."""


async def read_replicas(broker: Broker, keys: Keys, servers: str) -> list[str]:
    """Addresses of the replicas of one section of `servers`."""
    beats = await read_heartbeats(broker, keys, ("replica",))
    return sorted(b.url for b in beats if b.is_alive and b.servers == servers and is_address(b.url))


def is_address(url: str) -> bool:
    """Whether it is a server's address: a process with a reward worker's password may write anything."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isascii()
        )
    except ValueError:
        return False
