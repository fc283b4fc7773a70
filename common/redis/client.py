"""Makes a client from an address: plain, TLS, or a unix socket. Clusters and Sentinels: `several_hosts.py`.

Credentials come from environment variables or from the address; no message ever contains them.
"""

import os
import time
from collections import deque
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tidemill.common.errors import BrokerError
from tidemill.common.redis.lines import Client
from tidemill.common.telemetry import metrics
from tidemill.common.telemetry.batched import Batched

URL_VARIABLE = "TIDEMILL_REDIS_URL"
USERNAME_VARIABLE = "TIDEMILL_REDIS_USERNAME"
PASSWORD_VARIABLE = "TIDEMILL_REDIS_PASSWORD"  # the variable's name, not a password
CA_VARIABLE = "TIDEMILL_REDIS_CA"

CONNECT_TIMEOUT_S = 5.0
TLS_SCHEMES = ("rediss", "rediss+sentinel", "rediss+cluster")

FORMS = (
    "redis://host:6379/0, rediss:// for TLS, unix:///path, redis+sentinel://host:26379,host:26379/NAME, or "
    "redis+cluster://host:6379,host:6379 (rediss+sentinel:// and rediss+cluster:// for TLS)"
)


def make_client(url: str) -> Client:
    """A client whose replies stay raw: RESP2, bytes, no conversion by the library.

    Raises:
        BrokerError: the address has no known form, or its authority file is not there.
    """
    options = {**connection_options(url), **credentials(USERNAME_VARIABLE, PASSWORD_VARIABLE)}
    try:
        if "+cluster:" in url or "+sentinel:" in url:
            from tidemill.common.redis.several_hosts import make_client_of_several

            return make_client_of_several(url, options)
        # No retries by redis-py: after an outage hidden from `Broker`, leases get no time to be renewed.
        return Client(ConnectionPool.from_url(url, retry=Retry(NoBackoff(), 0), **options).make_connection)
    except ValueError:  # its text may hold a part of the password
        raise BrokerError(
            f"{URL_VARIABLE} is not an address of Redis. Expected {FORMS}; "
            f"put the password into {PASSWORD_VARIABLE}, or percent-encode it."
        ) from None


def public_address(url: str) -> str:
    """The address without its credentials, which may stand before the host or behind a question mark."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def has_tls(url: str) -> bool:
    return url.partition(":")[0] in TLS_SCHEMES


def connection_options(url: str) -> dict[str, Any]:
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
    if authority and has_tls(url):
        if not Path(authority).is_file():
            raise BrokerError(f"{CA_VARIABLE} is {authority}: no such file. Expected a certificate in PEM.")
        options["ssl_ca_certs"] = authority
    return options


def credentials(username_variable: str, password_variable: str) -> dict[str, Any]:
    """Username and password, as far as the environment has them."""
    values = {"username": os.environ.get(username_variable), "password": os.environ.get(password_variable)}
    return {option: value for option, value in values.items() if value}


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
