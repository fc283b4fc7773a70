"""The web application: all pages behind the gate."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Mount
from starlette.staticfiles import StaticFiles

from common.errors import BrokerError, TidemillError
from common.history import History
from common.wire.messages import Lane
from services.console.web import formats
from services.console.web.access import Access, Gate
from services.console.web.catalog import Catalog
from services.console.web.formats import sendable, visible
from services.console.web.group_pages import GroupPages
from services.console.web.pages import DeadPages, RunPages, StepPages
from services.console.web.watched_run import WatchedRun

FOLDER = Path(__file__).parent
MAX_WORDS_CHARACTERS = 20_000
"""Of a judge's words or an error on one page."""


class Templates:
    """Renders templates."""

    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(
            number=formats.number,
            signed=formats.signed,
            percent=formats.percent,
            moment=formats.moment,
            duration=formats.duration,
            counted=formats.counted,
            visible=visible,
            words=words,
        )
        self._environment.globals["span"] = formats.span

    def response(self, template: str, status: int = 200, **values: Any) -> Response:
        """A page."""
        page = self._environment.get_template(template).render(**values)
        return HTMLResponse(sendable(page), status)


def words(value: Any, limit: int = MAX_WORDS_CHARACTERS) -> Markup:
    """Anything a user's function may have noted, as text: text as it is, the rest as JSON."""
    if not isinstance(value, str):
        try:
            value = json.dumps(_plain(value), ensure_ascii=False, indent=1)
        except (TypeError, ValueError, RecursionError):
            value = repr(value)
    return visible(value, limit)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | str | bool | None) else repr(value)


class Site:
    """The catalog of runs, and the templates."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.templates = Templates()

    async def run_of(self, request: Request) -> WatchedRun:
        """The run of an address.

        Raises:
            HTTPException: there is no such run.
        """
        run = await self.catalog.get(request.path_params["run"])
        if run is None:
            raise HTTPException(404, f"There is no run of this name in {self.catalog.runs}.")
        return run

    def page(self, template: str, run: WatchedRun, here: str, **values: Any) -> Response:
        """A page about a run; `here` names its place in the menu."""
        return self.templates.response(template, run=run, here=here, **values)


def history_of(run: WatchedRun) -> History:
    """What can be read of the run.

    Raises:
        BrokerError: nothing can, at this moment.
    """
    if run.history is None:
        raise BrokerError(run.problem or "The run's streams are being opened; load the page again.")
    return run.history


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

    pages = (RunPages(site), GroupPages(site), StepPages(site), DeadPages(site))
    return Starlette(
        routes=[
            Mount("/static", StaticFiles(directory=FOLDER / "static"), name="static"),
            *(route for page in pages for route in page.routes),
        ],
        middleware=[Middleware(Gate, access=access)],
        exception_handlers={HTTPException: missing, TidemillError: away, Exception: broken},
        lifespan=lifespan,
    )
