"""Makes a client from an address: plain, TLS, unix socket, cluster, or the master that Sentinels name.

Credentials come from environment variables or from the address; no message ever contains them.
"""

import os
import re
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from redis import Connection as BlockingConnection
from redis import Redis as BlockingRedis
from redis import SSLConnection as BlockingSSLConnection
from redis.asyncio import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from tidemill.common.errors import BrokerError
from tidemill.common.redis.lines import Client
from tidemill.common.telemetry import metrics
from tidemill.common.telemetry.batched import Batched
from tidemill.common.threads import BoundedThreads

if TYPE_CHECKING:
    from tidemill.common.redis.cluster import Address, Nodes

URL_VARIABLE = "TIDEMILL_REDIS_URL"
USERNAME_VARIABLE = "TIDEMILL_REDIS_USERNAME"
PASSWORD_VARIABLE = "TIDEMILL_REDIS_PASSWORD"  # the variable's name, not a password
CA_VARIABLE = "TIDEMILL_REDIS_CA"
SENTINEL_USERNAME_VARIABLE = "TIDEMILL_SENTINEL_USERNAME"
SENTINEL_PASSWORD_VARIABLE = "TIDEMILL_SENTINEL_PASSWORD"  # the variable's name, not a password

CONNECT_TIMEOUT_S = 5.0
NUM_THREADS = 4
"""Nodes of a cluster that are asked at once where a slot is: one that is away does not answer in time."""
BLOCKING_TIMEOUT_S = 20.0
"""How long a blocking client waits for an answer. RQ raises it for a worker that waits for jobs."""
BLOCKING_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""A connection whose other end has vanished without a word is given up after 30 s. The last is in ms."""
SENTINEL_TIMEOUT_S = 2.0
"""Short, so that a Sentinel that does not answer delays the question to the next one little."""
DEFAULT_PORTS = {"sentinel": 26379, "cluster": 6379}
TLS_SCHEMES = ("rediss", "rediss+sentinel", "rediss+cluster")
_URL_OF_HOSTS = re.compile(
    r"rediss?\+(?P<kind>sentinel|cluster)://(?:(?P<user>[^@/]*?)(?::(?P<password>[^@/]*))?@)?"
    r"(?P<hosts>[^@/?]+)(?:/(?P<name>[^/?]*)(?:/(?P<db>\d+))?)?"
)
_HOST = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\[\]:,]+)(?::(?P<port>\d{1,5}))?")

FORMS = (
    "redis://host:6379/0, rediss:// for TLS, unix:///path, redis+sentinel://host:26379,host:26379/NAME, or "
    "redis+cluster://host:6379,host:6379 (rediss+sentinel:// and rediss+cluster:// for TLS)"
)


def make_client(url: str) -> Client:
    """A client whose replies stay raw: RESP2, bytes, no conversion by the library.

    Raises:
        BrokerError: the address has no known form, or its authority file is not there.
    """
    options = {**_connection_options(url), **_credentials(USERNAME_VARIABLE, PASSWORD_VARIABLE)}
    try:
        if "+cluster:" in url:
            return _cluster_client(url, options)
        if "+sentinel:" in url:
            return _sentinel_client(url, options)
        # No retries by redis-py: after an outage hidden from `Broker`, leases get no time to be renewed.
        return Client(ConnectionPool.from_url(url, retry=Retry(NoBackoff(), 0), **options).make_connection)
    except ValueError:  # its text may hold a part of the password
        raise BrokerError(
            f"{URL_VARIABLE} is not an address of Redis. Expected {FORMS}; "
            f"put the password into {PASSWORD_VARIABLE}, or percent-encode it."
        ) from None


def make_blocking_client(url: str, run_id: str = "") -> BlockingRedis:
    """A synchronous client for RQ; in a cluster, for one run. Its calls end, also on a connection that is
    dead and was never closed.

    Raises:
        BrokerError: the address has no known form, or is that of Sentinels, which RQ cannot follow.
    """
    if "+sentinel:" in url:
        raise BrokerError(
            f"{URL_VARIABLE} names Sentinels, which sandboxes (RQ) cannot follow. Give sandbox and reward "
            "workers the address of the master, or of a proxy before it."
        )
    options = {**_connection_options(url), **_credentials(USERNAME_VARIABLE, PASSWORD_VARIABLE)}
    options["socket_timeout"] = BLOCKING_TIMEOUT_S
    if not url.startswith("unix:"):
        # A worker waits for jobs for minutes: only probes of the kernel see that the other end is gone.
        names = [name for name in BLOCKING_KEEPALIVE if hasattr(socket, name)]
        probes = {getattr(socket, name): BLOCKING_KEEPALIVE[name] for name in names}
        options |= {"socket_keepalive": True, "socket_keepalive_options": probes}
    try:
        if "+cluster:" in url:
            from tidemill.common.redis.cluster import make_blocking_cluster_client

            return make_blocking_cluster_client(_nodes(url, options), run_id)
        return BlockingRedis.from_url(url, **options)
    except ValueError:  # its text may hold a part of the password
        raise BrokerError(f"{URL_VARIABLE} is not an address of Redis. Expected {FORMS}.") from None


def public_address(url: str) -> str:
    """The address without its credentials, which may stand before the host or behind a question mark."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class _Server:
    """Finds the current server's address; the last one found is shared by all connections of a client."""

    def __init__(self, find: "Callable[[], Awaitable[Address]]") -> None:
        self.find = find
        self.address = ("", 0)


class _ToServer:
    """Connections that look up their server when they connect: a master of Sentinels, the owner of a slot.

    Once one of them has found a new server, the others leave the old one, too. That one may not know yet that
    it was replaced: what it still receives would be lost.
    """

    def __init__(self, server: _Server, **options: Any) -> None:
        super().__init__(**options)
        self._server = server

    @property
    def is_current(self: Any) -> bool:
        return bool((self.host, self.port) == self._server.address)

    async def connect(self: Any) -> None:
        address = await self._server.find()
        self._server.address = address
        self.host, self.port = address
        await super().connect()  # type: ignore[misc]


class _PlainToServer(_ToServer, Connection): ...


class _TlsToServer(_ToServer, SSLConnection): ...


def _has_tls(url: str) -> bool:
    return url.partition(":")[0] in TLS_SCHEMES


def _connection_options(url: str) -> dict[str, Any]:
    """Options of connections to servers and to Sentinels alike."""
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        # A command that blocks is silent for as long as it waits; lines limit their answers themselves.
        "socket_timeout": None,
        "protocol": 2,
        "health_check_interval": 0,
        "driver_info": None,  # or every connection begins with CLIENT SETINFO, which ACL users lack
    }
    authority = os.environ.get(CA_VARIABLE, "")
    if authority and _has_tls(url):
        if not Path(authority).is_file():
            raise BrokerError(f"{CA_VARIABLE} is {authority}: no such file. Expected a certificate in PEM.")
        options["ssl_ca_certs"] = authority
    return options


def _credentials(username_variable: str, password_variable: str) -> dict[str, Any]:
    """Username and password, as far as the environment has them."""
    values = {"username": os.environ.get(username_variable), "password": os.environ.get(password_variable)}
    return {option: value for option, value in values.items() if value}


def _addresses(url: str) -> "tuple[list[Address], dict[str, Any], re.Match[str]]":
    """The hosts of an address with several, the credentials in it, and its parts.

    Raises:
        ValueError: the address does not have the form that `FORMS` gives.
    """
    match = _URL_OF_HOSTS.fullmatch(url)
    hosts = [_HOST.fullmatch(host) for host in match["hosts"].split(",")] if match else []
    is_cluster = match is not None and match["kind"] == "cluster"
    if match is None or not all(hosts) or (is_cluster and (match["name"] or "0") != "0"):
        raise ValueError("not an address of several hosts")
    if not is_cluster and not match["name"]:
        raise ValueError("Sentinels need the name of their master")
    port = DEFAULT_PORTS[match["kind"]]
    addresses = [(host["host"].strip("[]"), int(host["port"] or port)) for host in hosts if host]
    in_address = {"username": match["user"], "password": match["password"]}
    return addresses, {option: unquote(value) for option, value in in_address.items() if value}, match


def _sentinel_client(url: str, options: dict[str, Any]) -> Client:
    """A client of the master that Sentinels name. Raises ValueError: as `_addresses`."""
    addresses, url_options, match = _addresses(url)
    asking = _credentials(SENTINEL_USERNAME_VARIABLE, SENTINEL_PASSWORD_VARIABLE)
    timeouts = {"socket_timeout": SENTINEL_TIMEOUT_S, "socket_connect_timeout": SENTINEL_TIMEOUT_S}
    asking |= {**_connection_options(url), **timeouts, "ssl": _has_tls(url), "retry": Retry(NoBackoff(), 0)}
    sentinel = Sentinel(addresses, sentinel_kwargs=asking)
    server = _Server(lambda: sentinel.discover_master(unquote(match["name"])))
    return _client_of(url, server, {**url_options, **options, "db": int(match["db"] or 0)})


def _cluster_client(url: str, options: dict[str, Any]) -> Client:
    """A client of the nodes that own the slots in use. Raises ValueError: as `_addresses`."""
    from tidemill.common.redis.cluster import ClusterClient

    nodes = _nodes(url, options)
    threads = BoundedThreads("cluster", NUM_THREADS)

    def of_slot(slot: int) -> Client:
        # `Nodes` asks over connections that block.
        return _client_of(url, _Server(lambda: threads.run(nodes.find, slot)), nodes.options)

    return ClusterClient(of_slot)


def _nodes(url: str, options: dict[str, Any]) -> "Nodes":
    from tidemill.common.redis.cluster import Nodes

    seeds, url_options, _ = _addresses(url)
    return Nodes(
        seeds, BlockingSSLConnection if _has_tls(url) else BlockingConnection, **{**url_options, **options}
    )


def _client_of(url: str, server: _Server, options: dict[str, Any]) -> Client:
    kind = _TlsToServer if _has_tls(url) else _PlainToServer
    return Client(lambda: kind(server, retry=Retry(NoBackoff(), 0), **options))


RECENT = 32
"""Latest durations kept for their median, which a single outage does not distort."""

_durations: Batched[float] = Batched(metrics.REDIS_SECONDS.observe_many)


class RoundTrips:
    """A clock of the time with a command under way; commands that overlap are counted once."""

    def __init__(self) -> None:
        self._num_under_way = 0
        self._since = 0.0
        self._covered_until = 0.0
        self._total_s = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)

    @property
    def present_s(self) -> float:
        """Recent median duration of a command, in seconds; 0 before the first."""
        return median(self._recent) if self._recent else 0.0

    def total_s(self) -> float:
        """Seconds with a command under way so far; never falls."""
        if not self._num_under_way:
            return self._total_s
        return self._total_s + time.monotonic() - max(self._since, self._covered_until)

    def begin(self) -> float:
        """Note that a command that does not block was sent; pass the result to `end`."""
        begun = time.monotonic()
        if not self._num_under_way:
            self._since = begun
        self._num_under_way += 1
        return begun

    def end(self, begun: float) -> None:
        now = time.monotonic()
        self._num_under_way -= 1
        if not self._num_under_way:
            self._cover(self._since, now)
        self._recent.append(now - begun)
        _durations.add(now - begun)

    def brought_news(self, begun: float) -> None:
        """Note that a blocking command that began at `begun` (time.monotonic) returned entries."""
        now = time.monotonic()
        if not self._num_under_way:  # or this time is counted anyway
            # Most of that time was waiting for entries; one round trip counts as time of Redis.
            self._cover(max(begun, now - self.present_s), now)

    def _cover(self, since: float, until: float) -> None:
        self._total_s += until - max(since, min(self._covered_until, until))
        self._covered_until = until
