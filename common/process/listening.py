"""Sockets that our HTTP servers listen on."""

import socket

BACKLOG = 2048


def listen(host: str, port: int = 0) -> socket.socket:
    """Listen at an address of IPv4 or IPv6; port 0 takes a free one. Raises OSError: not there.

    Accepted connections send at once. asyncio sees to that only for sockets that name their protocol, which
    those of `create_server` do not; an answer in two parts would wait 40 ms for the client's acknowledgement.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted ones inherit it
    return listener
