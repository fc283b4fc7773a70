"""/metrics and /healthz on one port per process, served by a thread of its own.

/healthz answers 503 when the service's loop has not turned for `STALLED_AFTER_S`: a blocked loop must
look unhealthy from outside, which is why the answer does not come from that loop.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from prometheus_client.registry import Collector

from tidemill.common.errors import ConfigError

STALLED_AFTER_S = 30.0

Page = Callable[[str], tuple[bytes, str]]
"""Makes body and content type, from the request's `Host`: the client's address of this endpoint."""


class HttpEndpoint:
    """Serves until `close`; the service's loop calls `beat` while it is alive."""

    def __init__(
        self,
        port: int,
        host: str = "127.0.0.1",
        collectors: Sequence[Collector] = (REGISTRY,),
        pages: Mapping[str, Page] | None = None,
    ) -> None:
        """/metrics has the metrics of all `collectors`; `pages` are further paths."""
        self.host = host
        self._collectors = collectors
        self._pages: dict[str, Page] = {"/metrics": self._metrics, **(pages or {})}
        self._last_beat = time.monotonic()
        try:
            self._server = ThreadingHTTPServer((host, port), _handler(self._pages, self.is_healthy))
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror}. "
                "Set --metrics-port to a free port, or to 0 to take any."
            ) from None
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def beat(self) -> None:
        self._last_beat = time.monotonic()

    def is_healthy(self) -> bool:
        return time.monotonic() - self._last_beat < STALLED_AFTER_S

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _metrics(self, _: str) -> tuple[bytes, str]:
        # Only `collect` is asked of a registry here, which every collector has.
        return b"".join(generate_latest(collector) for collector in self._collectors), CONTENT_TYPE_LATEST


def _handler(pages: Mapping[str, Page], is_healthy: Callable[[], bool]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 30.0
        """Seconds after which a client that sends nothing is disconnected."""

        def do_GET(self) -> None:
            page = pages.get(self.path)
            if page:
                self._answer(200, *page(self.headers.get("Host", "")))
            elif self.path == "/healthz":
                healthy = is_healthy()
                body = b"ok\n" if healthy else b"the event loop stands still\n"
                self._answer(200 if healthy else 503, body, "text/plain")
            else:
                self._answer(404, f"try {', '.join(pages)} or /healthz\n".encode(), "text/plain")

        def _answer(self, status: int, body: bytes, content_type: str) -> None:
            # A scraper that hung up needs no answer.
            with contextlib.suppress(ConnectionError):
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Scrapes are not logged."""

    return Handler
