"""Which replicas servers have: each says every few seconds that it is there, and is gone when it does not.

Times are those of the Redis server, so that machines need not agree on theirs.
"""

import hmac
import ipaddress
import os
from urllib.parse import urlsplit

import structlog

from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys

log = structlog.get_logger(__name__)

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


MODEL_TOKEN_VARIABLE = "TIDEMILL_MODEL_TOKEN"  # the variable's name, not a token
MIN_TOKEN_CHARS = 16
LOOPBACK = ("127.", "::1", "localhost")


def model_token() -> str:
    """The token of this process's environment; empty where there is none."""
    return os.environ.get(MODEL_TOKEN_VARIABLE, "")


def key_for(url: str, is_registered: bool, api_key_env: str) -> str:
    """What to show a server: the run's token to one that registered, else the key that the config names.

    Without a token, servers of the run are on this machine: who registers from elsewhere gets no key.
    """
    if is_registered and (model_token() or not _is_here(url)):
        return model_token()
    return os.environ.get(api_key_env, "") if api_key_env else ""


def _is_here(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_shown(authorization: str, token: str) -> bool:
    """Whether a request's header shows the token."""
    scheme, _, shown = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), token.encode())


def complaint(host: str, token: str) -> str:
    """What is wrong with listening on `host` with this token; empty where nothing is."""
    if token and len(token) < MIN_TOKEN_CHARS:
        problem = f"{MODEL_TOKEN_VARIABLE} has {len(token)} characters; expected at least {MIN_TOKEN_CHARS}"
    elif not token and not host.startswith(LOOPBACK):
        problem = f"--host {host} lets everybody in who reaches it: {MODEL_TOKEN_VARIABLE} is not set"
    else:
        return ""
    return f"{problem}. Make one with `openssl rand -base64 24`, and give it to the reward workers too."
