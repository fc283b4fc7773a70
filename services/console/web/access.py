"""Who may look, and what a browser may do with a page.

Guarantees: nothing is written but notes, and these only by who has the token; a page is sent to nobody
without the token where one is required; a site that a visitor happens to have open can neither read pages nor
write notes through the visitor's browser; nothing but the page's own files is loaded or run, whatever the
text on the page holds.
"""

import hashlib
import hmac
import ipaddress
import secrets
import socket
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode, urlsplit

from markupsafe import Markup
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.common.errors import ConfigError

TOKEN_PARAMETER = "token"
TOKEN_VARIABLE = "TIDEMILL_WEB_TOKEN"
LEAST_TOKEN_CHARACTERS = 16
BEARER = "Bearer "
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
DOOR = Markup(
    """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Token · Tidemill</title><h1>This page needs its token</h1>
<p>Open the address that <code>tidemill web</code> has printed, or give the token here.</p>
<form method="get">{}
<label>Token <input type="password" name="token" autocomplete="current-password" required autofocus></label>
<button>Open</button></form></html>"""
)
FIELD = Markup('<input type="hidden" name="{}" value="{}">')


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one server."""

    port: int
    token: str = ""
    """Empty: everybody who reaches the port, which listens on this machine only."""
    host_names: frozenset[str] = frozenset()
    """Names, besides addresses and localhost, under which visitors may ask."""
    is_fixed: bool = False
    """Whether somebody has chosen the token, so that it is the same after the next start."""
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    @classmethod
    def of(
        cls,
        host: str,
        port: int,
        host_names: tuple[str, ...] = (),
        fixed_token: str = "",
        *,
        asks_always: bool = False,
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
        names = frozenset(name.lower() for name in (host, *own, *host_names))
        if not fixed_token:
            return cls(port, token, names)
        # With a key of its own for each start, cookies of a fixed token would end with the server.
        return cls(port, token, names, True, hashlib.sha256(f"tidemill web {token}".encode()).digest())

    @property
    def cookie_name(self) -> str:
        """Cookies do not tell ports apart, so the name does."""
        return f"tidemill-{self.port}"

    @property
    def cookie_value(self) -> str:
        """What a browser keeps in place of the token; of no use to a server with another one."""
        return self._sealed("cookie")

    @property
    def form_key(self) -> str:
        """What a form of ours holds, and a form of another site cannot know; empty where nobody may write."""
        return self._sealed("form") if self.token else ""

    def _sealed(self, purpose: str) -> str:
        return hmac.new(self._key, f"{purpose} {self.token}".encode(), hashlib.sha256).hexdigest()

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

    def takes_form(self, given: str) -> bool:
        """Whether it is the key of our forms, in constant time."""
        return bool(self.token) and hmac.compare_digest(
            given.encode("utf-8", "replace"), self.form_key.encode()
        )

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
        if method not in READING_METHODS and not (method == "POST" and access.token):
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
        if method == "POST" and not _is_own_page(request):
            return PlainTextResponse("Notes are written from the pages of this server only.\n", 403)
        if (given := request.headers.get("authorization", "")).startswith(BEARER):
            return None if access.takes_token(given.removeprefix(BEARER)) else self._turned_away(request)
        if method != "POST" and (given := request.query_params.get(TOKEN_PARAMETER, "")):
            return self._admit(request) if access.takes_token(given) else self._turned_away(request)
        if access.takes_cookie(request.cookies.get(access.cookie_name, "")):
            return None
        return self._turned_away(request)

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

    def _turned_away(self, request: HTTPConnection) -> Response:
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(
                "This page needs its token: open the address that `tidemill web` has printed.\n", 401
            )
        query = [pair for pair in parse_qsl(request.url.query) if pair[0] != TOKEN_PARAMETER]
        return HTMLResponse(DOOR.format(Markup("").join(FIELD.format(*pair) for pair in query)), 401)


def _is_own_page(request: HTTPConnection) -> bool:
    """Whether a browser says that another site sent this. Forms of ours say `null`: they send no referrer."""
    origin = request.headers.get("origin", "null")
    if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
        return False
    return origin == "null" or urlsplit(origin).netloc == request.headers.get("host", "")
