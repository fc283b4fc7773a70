"""What every page needs: the catalog of runs, and the templates."""

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from tidemill.common.errors import BrokerError
from tidemill.common.history import History, sessions
from tidemill.services.console.text.formats import plural, share, size, took, when
from tidemill.services.console.text.tree import MAX_CHARACTERS, gathered, shown
from tidemill.services.console.web import chat, formats
from tidemill.services.console.web.catalog import Catalog
from tidemill.services.console.web.formats import sendable, visible
from tidemill.services.console.web.metric_files import MetricFiles
from tidemill.services.console.web.watched_run import WatchedRun

FOLDER = Path(__file__).parent
MAX_WORDS_CHARACTERS = 20_000
"""Of a judge's words or an error on one page."""

MAX_TURNS = 40
"""Turns and forks of one session on one page."""


class Templates:
    def __init__(self) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        filters = (formats.number, formats.signed, visible, words, gathered)
        self._environment.filters.update(
            {filter.__name__: filter for filter in filters}
            | {
                "moment": when,
                "bytes": size,
                "duration": took,
                "percent": share,
                "counted": plural,
                "shown": shown_safely,
            }
        )
        readers = (formats.span, sessions.read_session, sessions.session_facts)
        chats = (chat.message_of, chat.prompt_messages, chat.training_of)
        self._environment.globals.update({reader.__name__: reader for reader in (*readers, *chats)})
        self._environment.globals |= {"num_tokens": sessions.num_completion_tokens, "most_turns": MAX_TURNS}

    def response(self, template: str, status: int = 200, **values: Any) -> Response:
        page = self._environment.get_template(template).render(**values)
        return HTMLResponse(sendable(page), status)


def shown_safely(value: Any, unit: str = "") -> Markup:
    """A value of a tree."""
    return visible(shown(value, unit), MAX_CHARACTERS["text"])


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
        self.metric_files = MetricFiles()
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

    def route(self, path: str, page: "Page") -> Route:
        """The route of a page about a run."""

        async def answer(request: Request) -> Response:
            return await page(self, await self.run_of(request), request)

        return Route(path, answer)

    def page(self, template: str, run: WatchedRun, here: str, **values: Any) -> Response:
        """A page about a run; `here` names its place in the menu."""
        return self.templates.response(template, run=run, here=here, **values)


Page = Callable[[Site, WatchedRun, Request], Awaitable[Response]]


def history_of(run: WatchedRun) -> History:
    """What can be read of the run.

    Raises:
        BrokerError: nothing can, at this moment.
    """
    if run.history is None:
        raise BrokerError(run.problem or "The run's streams are being opened; load the page again.")
    return run.history
