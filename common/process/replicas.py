"""Which replicas servers have: those whose heartbeats say where they take requests."""

from urllib.parse import urlsplit

from tidemill.common.process.heartbeats import read_heartbeats
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys

LANE_HEADER = "x-tidemill-lane"
"""Of requests to servers: `eval` asks for the priority of evaluation."""


async def read_replicas(broker: Broker, keys: Keys, servers: str) -> list[str]:
    """Addresses of the replicas of one section of `servers`."""
    beats = await read_heartbeats(broker, keys, ("replica",))
    return sorted(b.url for b in beats if b.is_alive and b.servers == servers and is_address(b.url))


def is_address(url: str) -> bool:
    """Whether it is one of a server: whoever has a reward worker's password may write what it likes."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isascii()
        )
    except ValueError:
        return False
