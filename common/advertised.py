"""Under which address others reach this process: what a heartbeat says, for scrapers that follow scaling."""

import os
import socket
from urllib.parse import urlsplit

from common.redis_client import URL_VARIABLE

ADVERTISE_VARIABLE = "TIDEMILL_ADVERTISE_HOST"
LOOPBACK = "127.0.0.1"
ANYWHERE = ("", "0.0.0.0", "::")
ANY_PORT = 9
"""Nothing is sent to it: it only makes the kernel choose a route."""


def advertised_host(listens_on: str) -> str:
    """The host to tell others, for a server that listens on `listens_on`.

    TIDEMILL_ADVERTISE_HOST, where it is set; the address it listens on, if that is one; otherwise the address
    of this machine or container on the way to Redis, where everybody else is too.
    """
    if chosen := os.environ.get(ADVERTISE_VARIABLE):
        return chosen
    if listens_on not in ANYWHERE:
        return listens_on
    return _address_towards(_redis_host()) or socket.gethostname()


def _redis_host() -> str:
    """Host of the run's Redis, or of its first Sentinel; empty for a unix socket."""
    place = urlsplit(os.environ.get(URL_VARIABLE, "")).netloc.rpartition("@")[2].split(",")[0]
    return place[1:].partition("]")[0] if place.startswith("[") else place.partition(":")[0]


def _address_towards(host: str) -> str:
    """This machine's own address on the route to `host`; empty where there is no route."""
    if not host:
        return LOOPBACK
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
