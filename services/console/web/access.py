"""Who may look, and what a browser may do with a page.

Guarantees: pages are read only; a page is sent to nobody without the token where one is required; a site that
a visitor happens to have open cannot read pages through the visitor's browser; nothing but the page's own
files is loaded or run, whatever the text on the page holds.
"""

import hashlib
import hmac
import ipaddress
import secrets
import socket
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TOKEN_PARAMETER = "token"
READING_METHODS = ("GET", "HEAD")
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
COOKIE_AGE_S = 30 * 86_400


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server."""

    port: int
    token: str = ""
    """Empty: everybody who reaches the port, which listens on this machine only."""
    host_names: frozenset[str] = frozenset()
    """Names, besides addresses and localhost, under which visitors may ask."""
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    @classmethod
    def of(cls, host: str, port: int, host_names: tuple[str, ...] = ()) -> "Access":
        """Rules for a server that listens on `host`."""
        token = "" if is_loopback(host) else secrets.token_urlsafe(32)
        own = (socket.gethostname(), socket.getfqdn()) if token else ()
        return cls(port, token, frozenset(name.lower() for name in (host, *own, *host_names)))

    @property
    def cookie_name(self) -> str:
        """Cookies do not tell ports apart, so the name does."""
        return f"tidemill-{self.port}"

    @property
    def cookie_value(self) -> str:
        """What a browser keeps in place of the token; of no use to another server."""
        return hmac.new(self._key, self.token.encode(), hashlib.sha256).hexdigest()

    def knows_host(self, header: str) -> bool:
        """Whether a Host header is one that a visitor would type.

        Under any other name, a page of somebody else's may have pointed its own name here (DNS rebinding).
        """
        name = header.strip().lower()
        if name.startswith("["):
            name = name[1:].partition("]")[0]
        elif name.count(":") == 1:
            name = name.partition(":")[0]
        if name in ("localhost", *self.host_names):
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return bool(self.token) or address.is_loopback

    def takes_token(self, given: str) -> bool:
        """Whether it is the token, in constant time."""
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())

    def takes_cookie(self, given: str) -> bool:
        """Whether it is the cookie, in constant time."""
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.cookie_value.encode())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens there."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Gate:
    """ASGI middleware that holds the rules."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it; headers go with every answer."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                return
            await self.app(scope, receive, send)
            return
        refusal = self._refusal(HTTPConnection(scope), scope["method"])

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (refusal or self.app)(scope, receive, send_with_headers)

    def _refusal(self, request: HTTPConnection, method: str) -> Response | None:
        access = self.access
        if method not in READING_METHODS:
            return PlainTextResponse(
                "These pages are read only.\n", 405, {"Allow": ", ".join(READING_METHODS)}
            )
        if not access.knows_host(request.headers.get("host", "")):
            return PlainTextResponse(
                "This server does not answer under that name. Use its address, or start it with "
                "--allow-host NAME.\n",
                421,
            )
        if not access.token:
            return None
        if given := request.query_params.get(TOKEN_PARAMETER):
            return self._admit(request) if access.takes_token(given) else self._turned_away()
        if access.takes_cookie(request.cookies.get(access.cookie_name, "")):
            return None
        return self._turned_away()

    def _admit(self, request: HTTPConnection) -> Response:
        """A cookie, and the same page without the token: it stays in no history and no screenshot."""
        query = [pair for pair in parse_qsl(request.url.query) if pair[0] != TOKEN_PARAMETER]
        path = "/" + request.url.path.lstrip("/")  # "//elsewhere" would be another site
        response = RedirectResponse(path + ("?" + urlencode(query) if query else ""), 303)
        response.set_cookie(
            self.access.cookie_name,
            self.access.cookie_value,
            max_age=COOKIE_AGE_S,
            httponly=True,
            samesite="strict",
            secure=request.url.scheme == "https",
        )
        return response

    def _turned_away(self) -> Response:
        return PlainTextResponse(
            "This page needs its token: open the address that `tidemill web` has printed.\n", 401
        )
