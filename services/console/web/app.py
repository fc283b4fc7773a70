"""The web application: all pages behind the gate."""

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from common.errors import TidemillError
from common.wire.messages import Lane
from services.console.web import group_pages, pages
from services.console.web.access import Access, Gate
from services.console.web.catalog import Catalog
from services.console.web.site import FOLDER, Site


class LaneConvertor(Convertor[Lane]):
    """`groups` are those of training, `eval-groups` those of evaluation."""

    regex = "groups|eval-groups"

    def convert(self, value: str) -> Lane:
        """Address to lane."""
        return Lane.EVAL if value == "eval-groups" else Lane.TRAIN

    def to_string(self, value: Lane) -> str:
        """Lane to address."""
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

    return Starlette(
        routes=[
            Mount("/static", StaticFiles(directory=FOLDER / "static"), name="static"),
            Route("/", runs),
            *(site.route(path, page) for path, page in (pages.ROUTES | group_pages.ROUTES).items()),
        ],
        middleware=[Middleware(Gate, access=access)],
        exception_handlers={HTTPException: missing, TidemillError: away, Exception: broken},
        lifespan=lifespan,
    )
