"""Settings of our HTTP servers: memory and connections of clients are bounded before any token is checked.

A request's head is bounded by h11 (httptools has no bound), the number of connections is bounded, and each
of them has `HEAD_S` for the head of each request: for the first from the connection on, for later ones from
their first byte on. Between two requests uvicorn's own limit for idle connections holds.
"""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tidemill.common.errors import ConfigError

MAX_CONNECTIONS = 4096
HEAD_S = 30.0
MAX_HEAD_BYTES = 32 << 10
BACKLOG = 2048


def listen(host: str, port: int = 0, remedy: str = "Choose another with --host or --port.") -> socket.socket:
    """Listen at an address of IPv4 or IPv6, also in brackets; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be used; the message ends with `remedy`.
    """
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}. {remedy}") from None
    # Accepted connections inherit this. asyncio sets it only for sockets that name their protocol, unlike
    # this one; an answer in two parts would wait 40 ms for the client's acknowledgement.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class BoundedProtocol(H11Protocol):
    """One connection. Those beyond `max_connections` are closed at once."""

    max_connections = MAX_CONNECTIONS
    _head_timer: asyncio.TimerHandle | None = None
    """Ends the connection where a head that is waited for does not come; None while a request is answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self.max_connections:
            self.transport = transport  # used by `connection_lost`
            transport.abort()
            return
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        cycle: Any = self.cycle
        if cycle is not None and not cycle.response_complete:
            self._stop_timer()
        elif self._head_timer is None:
            # A part of the next head. It has ended uvicorn's limit for idle connections, and more parts of it
            # must not begin a new limit.
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class ServerInService(uvicorn.Server):
    """A server that leaves the process's signals to the service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def is_this_machine(host: str) -> bool:
    """Whether a request's `Host` is a loopback address or `localhost`, names that no web site can have."""
    return is_loopback(host_of(host))


def host_of(header: str) -> str:
    """The host that a request's `Host` names, without its port."""
    whole = header.strip().lower()
    name, _, port = whole.rpartition(":")
    return (name if port.isdecimal() else whole).strip("[]")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def server_config(app: Any, **more: Any) -> uvicorn.Config:
    quiet: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "ws": "none"}
    return uvicorn.Config(
        app, http=BoundedProtocol, h11_max_incomplete_event_size=MAX_HEAD_BYTES, **(quiet | more)
    )
