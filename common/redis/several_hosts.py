"""Clients of addresses with several hosts: of a cluster, or of the master that Sentinels name."""

import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from redis import Connection as BlockingConnection
from redis import SSLConnection as BlockingSSLConnection
from redis.asyncio import Connection, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from tidemill.common.redis.client import connection_options, credentials, has_tls
from tidemill.common.redis.lines import Client
from tidemill.common.threads import BoundedThreads

if TYPE_CHECKING:
    from tidemill.common.redis.cluster import Nodes

Address = tuple[str, int]

SENTINEL_USERNAME_VARIABLE = "TIDEMILL_SENTINEL_USERNAME"
SENTINEL_PASSWORD_VARIABLE = "TIDEMILL_SENTINEL_PASSWORD"  # the variable's name, not a password

NUM_THREADS = 4
"""Nodes of a cluster that are asked at once where a slot is: one that is away does not answer in time."""
SENTINEL_TIMEOUT_S = 2.0
"""Short, so that a Sentinel that does not answer delays the question to the next one little."""
DEFAULT_PORTS = {"sentinel": 26379, "cluster": 6379}
_URL_OF_HOSTS = re.compile(
    r"rediss?\+(?P<kind>sentinel|cluster)://(?:(?P<user>[^@/]*?)(?::(?P<password>[^@/]*))?@)?"
    r"(?P<hosts>[^@/?]+)(?:/(?P<name>[^/?]*)(?:/(?P<db>\d+))?)?"
)
_HOST = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\[\]:,]+)(?::(?P<port>\d{1,5}))?")


def make_client_of_several(url: str, options: dict[str, Any]) -> Client:
    """A client of the cluster, or of the Sentinels' master. Raises ValueError: as `_addresses`."""
    return _cluster_client(url, options) if "+cluster:" in url else _sentinel_client(url, options)


class _Server:
    """Finds the current server's address; the last one found is shared by all connections of a client."""

    def __init__(self, find: Callable[[], Awaitable[Address]]) -> None:
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


def _addresses(url: str) -> tuple[list[Address], dict[str, Any], re.Match[str]]:
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
    asking = credentials(SENTINEL_USERNAME_VARIABLE, SENTINEL_PASSWORD_VARIABLE)
    timeouts = {"socket_timeout": SENTINEL_TIMEOUT_S, "socket_connect_timeout": SENTINEL_TIMEOUT_S}
    asking |= {**connection_options(url), **timeouts, "ssl": has_tls(url), "retry": Retry(NoBackoff(), 0)}
    sentinel = Sentinel(addresses, sentinel_kwargs=asking)
    server = _Server(lambda: sentinel.discover_master(unquote(match["name"])))
    return _client_of(url, server, {**url_options, **options, "db": int(match["db"] or 0)})


def _cluster_client(url: str, options: dict[str, Any]) -> Client:
    """A client of the nodes that own the slots in use. Raises ValueError: as `_addresses`."""
    from tidemill.common.redis.cluster import ClusterClient

    nodes = nodes_of(url, options)
    threads = BoundedThreads("cluster", NUM_THREADS)

    def of_slot(slot: int) -> Client:
        # `Nodes` asks over connections that block.
        return _client_of(url, _Server(lambda: threads.run(nodes.find, slot)), nodes.options)

    return ClusterClient(of_slot)


def nodes_of(url: str, options: dict[str, Any]) -> "Nodes":
    from tidemill.common.redis.cluster import Nodes

    seeds, url_options, _ = _addresses(url)
    return Nodes(
        seeds, BlockingSSLConnection if has_tls(url) else BlockingConnection, **{**url_options, **options}
    )


def _client_of(url: str, server: _Server, options: dict[str, Any]) -> Client:
    kind = _TlsToServer if has_tls(url) else _PlainToServer
    return Client(lambda: kind(server, retry=Retry(NoBackoff(), 0), **options))
