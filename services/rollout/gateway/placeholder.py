"""The model's address for what an agent's file makes while it is imported, such as `client = OpenAI()`.

The host imports the file once, before there is a session. It gives out a port of this machine that nothing
listens on. In the process of a session, connections to that port reach a listener of this process, which
writes the session's address and key into each request.

Guarantees: no client of the file reaches a provider, whichever keys the worker has; what asks while the file
is imported is refused at once; a listener answers only who knows the host's key.
"""

import contextlib
import hmac
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = "127.0.0.1"
MAX_HEAD_BYTES = 1 << 16
CHUNK_BYTES = 1 << 16
END_OF_HEAD = b"\r\n\r\n"
REWRITTEN = (b"authorization", b"x-api-key", b"connection", b"host")

Address = tuple[str, int]


class Placeholder:
    """Made once in the host; `route` is called in the process of each session."""

    def __init__(self) -> None:
        self.key = secrets.token_urlsafe(24)
        self._reserved = socket.socket()  # bound for as long as the host lives, and never listened on
        self._reserved.bind((LOOPBACK, 0))
        self.address: Address = self._reserved.getsockname()

    @property
    def root(self) -> str:
        """As a session's, without `/v1`."""
        return f"http://{self.address[0]}:{self.address[1]}"

    def route(self, root: str, key: str) -> None:
        """From now on, this process's connections to the placeholder are the session's."""
        router = _Router(root, key, self.key)
        for name in ("connect", "connect_ex"):
            setattr(socket.socket, name, self._redirected(getattr(socket.socket, name), router))

    def _redirected(self, connect: Callable[..., Any], router: "_Router") -> Callable[..., Any]:
        def redirected(caller: socket.socket, address: Any) -> Any:
            is_ours = isinstance(address, tuple) and address[:2] == self.address
            return connect(caller, router.listening() if is_ours else address)

        return redirected


class _Router:
    """Hands each request to the session's address, one a connection."""

    def __init__(self, root: str, key: str, expected: str) -> None:
        parts = urlsplit(root)
        self._target: Address = (parts.hostname or LOOPBACK, parts.port or 80)
        self._path, self._key, self._expected = parts.path.encode(), key.encode(), expected.encode()
        self._starting = threading.Lock()
        self._listener: socket.socket | None = None

    def listening(self) -> Address:
        """Where it listens; it begins with the first connection."""
        with self._starting:
            if self._listener is None:
                self._listener = socket.create_server((LOOPBACK, 0))
                threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        address: Address = self._listener.getsockname()
        return address

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            head = b""
            while END_OF_HEAD not in head:
                part = client.recv(CHUNK_BYTES)
                if not part or len(head) > MAX_HEAD_BYTES:
                    return
                head += part
            head, _, body = head.partition(END_OF_HEAD)
            if (rewritten := self._rewritten(head)) is None:
                client.sendall(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                return
            with socket.create_connection(self._target) as server:
                server.sendall(rewritten + END_OF_HEAD + body)
                threading.Thread(target=_pump, args=(client, server), daemon=True).start()
                _pump(server, client)  # until the gateway closes, which it does after one answer

    def _rewritten(self, head: bytes) -> bytes | None:
        """The head for the session; None where the key is not the placeholder's."""
        first, *lines = head.split(b"\r\n")
        headers = [
            (name.strip().lower(), value.strip()) for name, _, value in (x.partition(b":") for x in lines)
        ]
        given = dict(headers)
        key = given.get(b"x-api-key") or given.get(b"authorization", b"").removeprefix(b"Bearer ")
        if not hmac.compare_digest(key, self._expected):
            return None
        method, _, rest = first.partition(b" ")
        kept = [b"%s: %s" % header for header in headers if header[0] not in REWRITTEN]
        own = [b"host: %s:%d" % (self._target[0].encode(), self._target[1]), b"connection: close"]
        return b"\r\n".join(
            [method + b" " + self._path + rest, *own, b"authorization: Bearer " + self._key, *kept]
        )


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(CHUNK_BYTES):
            sink.sendall(chunk)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
