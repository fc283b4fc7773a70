"""`tidemill web`: serves the pages until Ctrl-C."""

import contextlib
import functools
import os
import socket
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.process.http_server import server_config
from tidemill.common.process.programs import run_main
from tidemill.common.wire.messages import Lane
from tidemill.services.console.options import WebOptions
from tidemill.services.console.run.folder import find_run, folder_of_runs, log_nothing
from tidemill.services.console.web import compare_pages, group_pages, pages, run_files
from tidemill.services.console.web.access import TOKEN_VARIABLE, Access, Gate, is_loopback
from tidemill.services.console.web.catalog import Catalog
from tidemill.services.console.web.site import FOLDER, Site


class LaneConvertor(Convertor[Lane]):
    """`groups` are those of training, `eval-groups` those of evaluation."""

    regex = "groups|eval-groups"

    def convert(self, value: str) -> Lane:
        return Lane.EVAL if value == "eval-groups" else Lane.TRAIN

    def to_string(self, value: Lane) -> str:
        return "eval-groups" if value is Lane.EVAL else "groups"


def create_app(catalog: Catalog, access: Access) -> Starlette:
    """The application; it closes the catalog when it ends."""
    register_url_convertor("lane", LaneConvertor())
    site = Site(catalog)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await catalog.close()

    async def missing(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = error.detail if isinstance(error, HTTPException) else str(error)
        what = "There is nothing at this address." if detail == "Not Found" else detail
        return site.templates.response("missing.html", status, run=None, here="", what=what)

    async def away(request: Request, error: Exception) -> Response:
        return site.templates.response("missing.html", 503, run=None, here="", what=str(error))

    async def broken(request: Request, error: Exception) -> Response:
        return PlainTextResponse(f"This page failed: {type(error).__name__}.\n", 500)

    async def runs(request: Request) -> Response:
        return await pages.runs(site)

    run_pages = pages.ROUTES | group_pages.ROUTES | run_files.ROUTES
    return Starlette(
        routes=[
            Mount("/static", StaticFiles(directory=FOLDER / "static"), name="static"),
            Route("/", runs),
            *(Route(path, functools.partial(page, site)) for path, page in compare_pages.ROUTES.items()),
            *(site.route(path, page) for path, page in run_pages.items()),
        ],
        middleware=[Middleware(Gate, access=access)],
        exception_handlers={HTTPException: missing, TidemillError: away, Exception: broken},
        lifespan=lifespan,
    )


CLOSE_S = 3
EVERYWHERE = ("0.0.0.0", "::")


def serve(options: WebOptions) -> None:
    """Serve until Ctrl-C.

    Raises:
        ConfigError: there is no such run, or the address cannot be had.
    """
    log_nothing()
    run_main(_serve(options))


async def _serve(options: WebOptions) -> None:
    listener = _listen(options.host, options.port)
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
    port = listener.getsockname()[1]
    names, fixed = tuple(options.host_names), os.environ.get(TOKEN_VARIABLE, "").strip()
    access = Access.of(options.host, names, fixed, asks_always=options.asks_token)
    shown_token = "" if fixed else access.token
    print(_greeting(options.host, port, path, shown_token), flush=True)
    config = server_config(
        create_app(catalog, access),
        lifespan="auto",
        log_level="error",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=CLOSE_S,
    )
    await uvicorn.Server(config).serve(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host.strip("[]"), port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Choose another with --host or "
            "--port."
        ) from None
    return listener


def _greeting(host: str, port: int, path: str, token: str) -> str:
    name = socket.gethostname() if host in EVERYWHERE else host
    shown = f"[{name}]" if ":" in name else name
    lines = [f"Pages to look at: http://{shown}:{port}/{path}"]
    if token:
        lines.append(f"Browsers ask for a name and a password: any name, and this token: {token}")
    if not is_loopback(host):
        lines.append("Others reach this port. Who has the token may read everything; it is sent unencrypted.")
    lines.append("Ctrl-C ends the pages only; runs go on.")
    return "\n".join(lines)
