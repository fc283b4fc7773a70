"""`tidemill web`: serves the pages until Ctrl-C, to those who may read them.

Guarantees: nothing is written; where a token is required, no page is sent without it; another site that is
open in the same browser cannot read pages through it; nothing but the page's own files is loaded or run,
whatever the text on the page holds.
"""

import base64
import binascii
import contextlib
import functools
import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.process.http_server import host_of, is_loopback, listen, server_config
from tidemill.common.process.programs import run_main
from tidemill.services.console.commands import WebOptions
from tidemill.services.console.run.folder import find_run, folder_of_runs, log_nothing
from tidemill.services.console.web import compare_pages, group_pages, run_pages
from tidemill.services.console.web.runs import Catalog
from tidemill.services.console.web.site import FOLDER, NotYet, Site

TOKEN_VARIABLE = "TIDEMILL_WEB_TOKEN"
LEAST_TOKEN_CHARACTERS = 16
READING_METHODS = ("GET", "HEAD")
# No inline scripts or styles: text that reached a page unescaped would still not run.
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
    # Texts of a run stay in no browser's or proxy's cache after the token was taken back.
    "Cache-Control": "no-store",
}
ASK = {"WWW-Authenticate": 'Basic realm="tidemill web: the token is the password", charset="UTF-8"'}
"""Makes a browser ask for a name and a password, which it then sends with every request to this server."""
CLOSE_S = 3


@dataclass(frozen=True, slots=True)
class Access:
    token: str = ""
    """Empty: no token is asked for, and the port listens on this machine only."""
    host_names: frozenset[str] = frozenset()
    """Names, besides addresses and localhost, under which visitors may ask."""

    @classmethod
    def of(
        cls, host: str, host_names: tuple[str, ...] = (), fixed_token: str = "", *, asks_always: bool = False
    ) -> "Access":
        """Rules for a server that listens on `host`; a fixed token is asked for on this machine too."""
        if fixed_token and (len(fixed_token) < LEAST_TOKEN_CHARACTERS or not fixed_token.isascii()):
            raise ConfigError(
                f"{TOKEN_VARIABLE} has {len(fixed_token)} characters; it needs {LEAST_TOKEN_CHARACTERS} or "
                "more, all ASCII. `openssl rand -hex 24` makes a good one."
            )
        is_here = is_loopback(host.strip("[]"))
        token = fixed_token or ("" if is_here and not asks_always else secrets.token_urlsafe(32))
        own_names = () if is_here else (socket.gethostname(), socket.getfqdn())
        return cls(token, frozenset(name.lower() for name in (host, *own_names, *host_names)))

    def knows_host(self, header: str) -> bool:
        """Whether a Host header is one that a visitor would type.

        Any other name may be that of a foreign site, which points it to this server (DNS rebinding).
        """
        name = host_of(header)
        if is_loopback(name) or name in self.host_names:
            return True
        # An address cannot be rebound as a name can; without a token only this machine's own names count.
        with contextlib.suppress(ValueError):
            return bool(self.token and ipaddress.ip_address(name))
        return False

    def admits(self, authorization: str) -> bool:
        """Whether this header has the token: `Bearer TOKEN`, or `Basic` with the token as the password."""
        scheme, _, password = authorization.partition(" ")
        if scheme.lower() == "basic":
            try:
                password = (
                    base64.b64decode(password, validate=True).decode("utf-8", "replace").partition(":")[2]
                )
            except (binascii.Error, ValueError):
                return False
        elif scheme.lower() != "bearer":
            return False
        # In constant time: how long a comparison takes tells nothing of the token.
        return hmac.compare_digest(password.encode("utf-8", "replace"), self.token.encode())


class Gate:
    """ASGI middleware that enforces the access rules, and adds `HEADERS` to every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self.app = app
        self.access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # No page has a websocket: other scopes reach nothing behind the gate.
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        answer = self._refusal(Headers(scope=scope), scope["method"]) or self.app
        await answer(scope, receive, send_with_headers)

    def _refusal(self, headers: Headers, method: str) -> Response | None:
        if method not in READING_METHODS:
            allowed = {"Allow": ", ".join(READING_METHODS)}
            return PlainTextResponse("These pages are read only.\n", 405, allowed)
        # Before the token: under a foreign name the browser is not even asked for it.
        if not self.access.knows_host(headers.get("host", "")):
            return PlainTextResponse(
                "This server does not answer under that name. Use its address, or start it with "
                "--allow-host NAME.\n",
                421,
            )
        if self.access.token and not self.access.admits(headers.get("authorization", "")):
            return PlainTextResponse("This page needs its token: give it as the password.\n", 401, ASK)
        return None


def create_app(catalog: Catalog, access: Access) -> Starlette:
    site = Site(catalog)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await catalog.close()

    async def missing(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        is_plain = error.detail == "Not Found"
        text = "There is nothing at this address." if is_plain else error.detail
        waits = isinstance(error, NotYet)
        run = catalog.opened(request.path_params.get("run", ""))
        return site.response("missing.html", error.status_code, run=run, what=text, waits=waits)

    async def away(request: Request, error: Exception) -> Response:
        run = catalog.opened(request.path_params.get("run", ""))
        waits = run is not None and run.may_change
        return site.response("missing.html", 503, run=run, what=str(error), waits=waits)

    async def broken(request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"This page failed: {type(error).__name__}.\n", 500)

    async def runs(request: Request) -> Response:
        lines = await catalog.lines()
        return site.response("runs.html", here="runs", lines=lines, folder=str(catalog.runs))

    return Starlette(
        routes=[
            Mount("/static", StaticFiles(directory=FOLDER / "static"), name="static"),
            Route("/", runs),
            *(Route(path, functools.partial(page, site)) for path, page in compare_pages.ROUTES.items()),
            *(site.route(path, page) for path, page in (run_pages.ROUTES | group_pages.ROUTES).items()),
        ],
        middleware=[Middleware(Gate, access=access)],
        exception_handlers={HTTPException: missing, TidemillError: away, Exception: broken},
        lifespan=lifespan,
    )


def serve(options: WebOptions) -> None:
    log_nothing()
    run_main(_serve(options))


async def _serve(options: WebOptions) -> None:
    listener = listen(options.host, options.port)
    catalog = Catalog(folder_of_runs(options.runs_dir))
    path = ""
    if options.run_id is not None:
        run_id = find_run(options.run_id, catalog.runs).run_id
        if await catalog.get(run_id) is None:
            raise ConfigError(
                f"there is no run {run_id!r} in {catalog.runs}. Give its id, or its folder of runs "
                "with --runs-dir."
            )
        path = f"run/{run_id}"
    names = tuple(options.host_names)
    fixed = os.environ.get(TOKEN_VARIABLE, "").strip()
    access = Access.of(options.host, names, fixed, asks_always=options.asks_token)
    name = socket.gethostname() if options.host in ("0.0.0.0", "::") else options.host
    url_host = f"[{name}]" if ":" in name else name
    print(f"Pages to look at: http://{url_host}:{listener.getsockname()[1]}/{path}")
    if access.token and not fixed:
        print(f"Browsers ask for a name and a password: any name, and this token: {access.token}")
    if not is_loopback(options.host.strip("[]")):
        print("Others reach this port. Who has the token may read everything; it is sent unencrypted.")
    print("Ctrl-C ends the pages only; runs go on.", flush=True)
    config = server_config(
        create_app(catalog, access),
        lifespan="auto",
        log_level="error",
        server_header=False,
        date_header=False,
        # Without a limit uvicorn waits for the slowest page before it ends.
        timeout_graceful_shutdown=CLOSE_S,
    )
    await uvicorn.Server(config).serve(sockets=[listener])
