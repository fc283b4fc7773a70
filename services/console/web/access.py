"""Who may look, and what a browser may do with a page.

Guarantees: nothing is written; a page is sent to nobody without the token where one is required; a site that
a visitor happens to have open cannot read pages through the visitor's browser; nothing but the page's own
files is loaded or run, whatever the text on the page holds.
"""

import base64
import binascii
import hmac
import ipaddress
import secrets
import socket
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.common.errors import ConfigError

TOKEN_VARIABLE = "TIDEMILL_WEB_TOKEN"
LEAST_TOKEN_CHARACTERS = 16
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
ASK = {"WWW-Authenticate": 'Basic realm="tidemill web: the token is the password", charset="UTF-8"'}
"""Makes a browser ask for a name and a password, which it then sends with every request to this server."""


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server."""

    token: str = ""
    """Empty: everybody who reaches the port, which listens on this machine only."""
    host_names: frozenset[str] = frozenset()
    """Names, besides addresses and localhost, under which visitors may ask."""

    @classmethod
    def of(
        cls, host: str, host_names: tuple[str, ...] = (), fixed_token: str = "", *, asks_always: bool = False
    ) -> "Access":
        """Rules for a server that listens on `host`; a fixed token is asked for on this machine too.

        Raises:
            ConfigError: the fixed token is one that can be guessed, or that no header can carry.
        """
        if fixed_token and (len(fixed_token) < LEAST_TOKEN_CHARACTERS or not fixed_token.isascii()):
            raise ConfigError(
                f"{TOKEN_VARIABLE} has {len(fixed_token)} characters; it needs {LEAST_TOKEN_CHARACTERS} or "
                "more, all ASCII. `openssl rand -hex 24` makes a good one."
            )
        is_here = is_loopback(host)
        token = fixed_token or ("" if is_here and not asks_always else secrets.token_urlsafe(32))
        own = () if is_here else (socket.gethostname(), socket.getfqdn())
        return cls(token, frozenset(name.lower() for name in (host, *own, *host_names)))

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

    def admits(self, authorization: str) -> bool:
        """Whether this header has the token: `Bearer TOKEN`, or `Basic` with the token as the password."""
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).decode("utf-8", "replace").partition(":")[2]
            except (binascii.Error, ValueError):
                return False
        elif scheme.lower() != "bearer":
            return False
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


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
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        refusal = self._refusal(Headers(scope=scope), scope["method"])

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (refusal or self.app)(scope, receive, send_with_headers)

    def _refusal(self, headers: Headers, method: str) -> Response | None:
        if method not in READING_METHODS:
            return PlainTextResponse(
                "These pages are read only.\n", 405, {"Allow": ", ".join(READING_METHODS)}
            )
        if not self.access.knows_host(headers.get("host", "")):
            return PlainTextResponse(
                "This server does not answer under that name. Use its address, or start it with "
                "--allow-host NAME.\n",
                421,
            )
        if self.access.token and not self.access.admits(headers.get("authorization", "")):
            return PlainTextResponse("This page needs its token: give it as the password.\n", 401, ASK)
        return None
