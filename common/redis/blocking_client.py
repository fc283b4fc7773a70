"""Clients that block, for sandboxes: RQ needs one."""

import socket

from redis import Redis as BlockingRedis

from tidemill.common.errors import BrokerError
from tidemill.common.redis.client import (
    FORMS,
    PASSWORD_VARIABLE,
    URL_VARIABLE,
    USERNAME_VARIABLE,
    connection_options,
    credentials,
)

BLOCKING_TIMEOUT_S = 20.0
"""How long a blocking client waits for an answer. RQ raises it for a worker that waits for jobs."""
BLOCKING_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""A connection whose other end has vanished without a word is given up after 30 s. The last is in ms."""


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
    options = {**connection_options(url), **credentials(USERNAME_VARIABLE, PASSWORD_VARIABLE)}
    options["socket_timeout"] = BLOCKING_TIMEOUT_S
    if not url.startswith("unix:"):
        # A worker waits for jobs for minutes: only probes of the kernel see that the other end is gone.
        names = [name for name in BLOCKING_KEEPALIVE if hasattr(socket, name)]
        probes = {getattr(socket, name): BLOCKING_KEEPALIVE[name] for name in names}
        options |= {"socket_keepalive": True, "socket_keepalive_options": probes}
    try:
        if "+cluster:" in url:
            from tidemill.common.redis.cluster import make_blocking_cluster_client
            from tidemill.common.redis.several_hosts import nodes_of

            return make_blocking_cluster_client(nodes_of(url, options), run_id)
        return BlockingRedis.from_url(url, **options)
    except ValueError:  # its text may hold a part of the password
        raise BrokerError(f"{URL_VARIABLE} is not an address of Redis. Expected {FORMS}.") from None
