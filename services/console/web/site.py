"""What every page needs: the catalog of runs, templates, and files that a browser keeps."""

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from tidemill.common.command_line import command_line
from tidemill.common.errors import BrokerError
from tidemill.common.history import History
from tidemill.services.console.look import sessions
from tidemill.services.console.text.formats import plural, share, size, took, when
from tidemill.services.console.text.tree import MAX_CHARACTERS, Node, jsonable, lines_together, value_text
from tidemill.services.console.web import texts
from tidemill.services.console.web.runs import Catalog, WatchedRun
from tidemill.services.console.web.texts import sendable, visible


class NotYet(HTTPException):
    """What an address names is not there yet, and may come: its page loads again by itself (`wait.js`)."""

    def __init__(self, detail: str) -> None:
        super().__init__(404, detail)


FOLDER = Path(__file__).parent
MAX_WORDS_CHARACTERS = 20_000
"""Characters of a judge's words or an error on one page."""
MAX_PARTS = 60
"""Turns, forks and lines of one record on one page."""
MAX_CELL_CHARACTERS = 300
ROWS_AT_ONCE = 500
"""Rows of a CSV file that are sent in one part."""
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
"""Text that begins so is a formula for spreadsheets."""
DOTS_LEFT = 4
DOTS_WIDTH = 82
DOTS_LINE = 9
DOTS_HEIGHT = 7
"""Of drawings of dots: where the line begins, its length, its height, and how far from it a dot may be."""


class Site:
    """Makes pages of templates, for the runs of a catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog
        self._templates = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            # Texts of models, data and users' code are on every page, and must not become markup.
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
            "dots": dots,
            "lines_together": lines_together,
            "zip": zip,
            "moment": when,
            "bytes": size,
            "duration": took,
            "percent": share,
            "counted": plural,
            "value_markup": value_markup,
        }
        self._templates.globals |= {
            "span": texts.span, "num_tokens": sessions.num_completion_tokens, "most_parts": MAX_PARTS,
            "command_line": command_line,
        }  # fmt: skip

    def response(self, template: str, status: int = 200, **values: Any) -> Response:
        """A page about no run, unless `run` is given; `here` names its place in the menu."""
        page = self._templates.get_template(template).render(**{"run": None, "here": ""} | values)
        return HTMLResponse(sendable(page), status)

    def page(self, run: WatchedRun, here: str, title: str, tree: Node, **values: Any) -> Response:
        """A page of a run that is a list or a record; without `text`, nothing can be searched on it."""
        defaults = {
            "up": None, "files": (), "note": "", "text": None, "empty": "", "page": 1, "num_pages": 1,
            "waits": False,
        }  # fmt: skip
        return self.response("page.html", run=run, here=here, title=title, root=tree, **defaults | values)

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
    """The run's history. Raises BrokerError: it is not open."""
    if run.history is None:
        raise BrokerError(run.problem or "The run's streams are being opened.")
    return run.history


def dots(rows: Iterable[Sequence[float]]) -> Iterator[str]:
    """The finite numbers of each row as dots on a line, as a path of SVG. All rows share one scale. Equal
    numbers pile up to both sides of the line: [0, 1, 1, 1] is `M4 9h0M86 9h0M86 8h0M86 10h0`."""
    finite_rows = []
    for row in rows:
        finite_rows.append([value for value in row if math.isfinite(value)])
    all_values = [value for row in finite_rows for value in row]
    least = min(all_values, default=0.0)
    scale = (max(all_values, default=0.0) - least) or 1.0
    for row in finite_rows:
        path = []
        num_dots_at: Counter[int] = Counter()
        for value in row:
            x = round(DOTS_LEFT + DOTS_WIDTH * (value - least) / scale)
            y = DOTS_LINE + _beside_line(num_dots_at[x])
            num_dots_at[x] += 1
            # A line without length: its round end is the dot.
            path.append(f"M{x} {y}h0")
        yield "".join(path)


def _beside_line(number: int) -> int:
    """How far from the line the dot is that has this number at its place: 0, -1, 1, -2, 2, ..."""
    distance = min(DOTS_HEIGHT, (number + 1) // 2)
    return -distance if number % 2 else distance


def value_markup(node: Node, kind: str = "text") -> Markup:
    """The value of a node; `kind` is "cell" in a table."""
    limit = MAX_CELL_CHARACTERS if kind == "cell" else MAX_CHARACTERS["text"]
    return visible(value_text(node.value, node.unit), limit)


def words(value: Any, limit: int = MAX_WORDS_CHARACTERS) -> Markup:
    """Anything a user's function may have noted, as text: text as it is, the rest as JSON."""
    if not isinstance(value, str):
        value = json.dumps(jsonable(value), ensure_ascii=False, indent=1)
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
