"""What every page needs: the catalog of runs, templates, and files that a browser keeps."""

import csv
import io
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from tidemill.common.errors import BrokerError
from tidemill.common.history import History
from tidemill.services.console.records import sessions
from tidemill.services.console.text.formats import plural, share, size, took, when
from tidemill.services.console.text.tree import MAX_CHARACTERS, gathered, jsonable, shown
from tidemill.services.console.web import texts
from tidemill.services.console.web.curves import MetricFiles
from tidemill.services.console.web.runs import Catalog, WatchedRun
from tidemill.services.console.web.texts import sendable, visible

FOLDER = Path(__file__).parent
MAX_WORDS_CHARACTERS = 20_000
"""Of a judge's words or an error on one page."""
MAX_TURNS = 40
"""Turns and forks of one session on one page."""
ROWS_AT_ONCE = 500
"""Of a CSV, sent in one part."""
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


class Site:
    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self.metric_files = MetricFiles()
        self._templates = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            # Texts of models, data and users' code are on every page.
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {
            "number": texts.number,
            "signed": texts.signed,
            "visible": visible,
            "words": words,
            "gathered": gathered,
            "moment": when,
            "bytes": size,
            "duration": took,
            "percent": share,
            "counted": plural,
            "shown": shown_safely,
        }
        readers = (texts.span, texts.message_of, texts.prompt_messages, texts.training_of)
        self._templates.globals |= {
            reader.__name__: reader for reader in (*readers, sessions.read_session, sessions.session_facts)
        }
        self._templates.globals |= {"num_tokens": sessions.num_completion_tokens, "most_turns": MAX_TURNS}

    def response(self, template: str, status: int = 200, **values: Any) -> Response:
        """A page about no run, unless `run` is given; `here` names its place in the menu."""
        page = self._templates.get_template(template).render(**{"run": None, "here": ""} | values)
        return HTMLResponse(sendable(page), status)

    async def run_of(self, request: Request) -> WatchedRun:
        run = await self.catalog.get(request.path_params["run"])
        if run is None:
            raise HTTPException(404, f"There is no run of this name in {self.catalog.runs}.")
        return run

    def route(self, path: str, page: "Page") -> Route:

        async def answer(request: Request) -> Response:
            return await page(self, await self.run_of(request), request)

        return Route(path, answer)


Page = Callable[[Site, WatchedRun, Request], Awaitable[Response]]


def history_of(run: WatchedRun) -> History:
    """What can be read of the run."""
    if run.history is None:
        raise BrokerError(run.problem or "The run's streams are being opened; load the page again.")
    return run.history


def shown_safely(value: Any, unit: str = "") -> Markup:
    return visible(shown(value, unit), MAX_CHARACTERS["text"])


def words(value: Any, limit: int = MAX_WORDS_CHARACTERS) -> Markup:
    """Anything a user's function may have noted, as text: text as it is, the rest as JSON."""
    if not isinstance(value, str):
        try:
            value = json.dumps(value, ensure_ascii=False, indent=1, default=repr)
        except (TypeError, ValueError, RecursionError):
            value = repr(value)
    return visible(value, limit)


def attached(name: str) -> dict[str, str]:
    """The header that makes a browser keep a file in place of showing it; names are ours, or ids of runs."""
    return {"Content-Disposition": f'attachment; filename="{name}"'}


def json_file(name: str, tree: Any) -> Response:
    text = json.dumps(jsonable(tree))
    return Response(text, media_type="application/json", headers=attached(f"{name}.json"))


def csv_file(name: str, titles: Sequence[str], rows: Iterable[Iterable[Any]]) -> Response:
    """Rows as CSV, part by part. Text that a spreadsheet would take for a formula is quoted."""

    def cell(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return sendable("'" + value if value.startswith(FORMULA_STARTS) else value)

    def parts() -> Iterator[str]:
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerow(map(cell, titles))
        for number, row in enumerate(rows, 1):
            writer.writerow(map(cell, row))
            if number % ROWS_AT_ONCE == 0:
                yield buffer.getvalue()
                # The same buffer again: the writer holds it.
                buffer.seek(0)
                buffer.truncate()
        yield buffer.getvalue()

    return StreamingResponse(parts(), media_type="text/csv", headers=attached(f"{name}.csv"))
