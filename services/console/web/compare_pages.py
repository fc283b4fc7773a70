"""Runs overlaid: any of their numbers in one plot, where their configs differ, and what they came to."""

import asyncio
import contextlib
import csv
import io
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

import yaml
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tidemill.common.run.state import CONFIG_FILE
from tidemill.common.wire.keys import RUN_ID
from tidemill.services.console.web.catalog import RunLine
from tidemill.services.console.web.curves import differing, flatten, line_of
from tidemill.services.console.web.formats import sendable
from tidemill.services.console.web.metric_files import EVALUATION_PREFIX, Series, columns_of
from tidemill.services.console.web.site import Site

MAX_RUNS = 8
MAX_METRICS = 12
MAX_NAME_CHARACTERS = 200
FIRST_RUNS = 4
"""That are shown where the address names none."""
FIRST_METRICS = ("reward", "kl", "entropy", "completions/mean_length", "grad_norm")
"""That are shown where the address names none, after the score of the first evaluation set."""
SCORE = "/score"
AXES = {"step": "step", "time": "time since the first step"}
MOST_SMOOTHING = 0.99
LEAST_HOURS = 3
"""From here on, time is shown in hours."""


@dataclass(frozen=True, slots=True)
class CompareQuery:
    """What the address asks for; all of it, so that it can be kept and sent."""

    runs: tuple[str, ...]
    metrics: tuple[str, ...]
    smoothing: float = 0.0
    x: str = "step"
    text: str = ""
    """Names of metrics with these words are listed."""

    @classmethod
    def parse(cls, values: QueryParams) -> "CompareQuery":
        """The query of an address; what cannot be understood is left out."""
        runs = dict.fromkeys(name for name in values.getlist("run") if RUN_ID.fullmatch(name))
        metrics = dict.fromkeys(name[:MAX_NAME_CHARACTERS] for name in values.getlist("metric") if name)
        try:
            smoothing = float(values.get("smooth", "0"))
        except ValueError:
            smoothing = 0.0
        smoothing = min(MOST_SMOOTHING, smoothing) if smoothing > 0 else 0.0
        x = values.get("x", "step")
        text = values.get("text", "")[:MAX_NAME_CHARACTERS]
        return cls(
            tuple(runs)[:MAX_RUNS], tuple(metrics)[:MAX_METRICS], smoothing, x if x in AXES else "step", text
        )

    @property
    def address(self) -> str:
        """The query part of the address."""
        pairs = [("run", run) for run in self.runs] + [("metric", name) for name in self.metrics]
        if self.smoothing:
            pairs.append(("smooth", f"{self.smoothing:g}"))
        if self.x != "step":
            pairs.append(("x", self.x))
        return urlencode(pairs)


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is known of the runs that were asked for."""

    query: CompareQuery
    lines: list[RunLine]
    """All runs that there are."""
    absent: tuple[str, ...]
    """Asked for, and not there."""
    series: dict[str, dict[str, Series]]
    """By run and metric."""
    names: list[str]
    """Every number that any of the runs has."""

    @property
    def runs(self) -> list[str]:
        """Those that are there, in the order of the address."""
        return list(self.series)

    @property
    def is_live(self) -> bool:
        """Whether there may be news."""
        return any(line.status == "running" for line in self.lines if line.run_id in self.series)

    @property
    def longest_s(self) -> float:
        """Seconds until the last value of any of them."""
        lasts = (one.last for found in self.series.values() for one in found.values())
        return max((last[2] for last in lasts if last), default=0.0)


async def _read(site: Site, request: Request) -> Comparison:
    query = CompareQuery.parse(request.query_params)
    lines = await site.catalog.lines()
    known = {line.run_id for line in lines}
    names_runs, names_metrics = "run" in request.query_params, "metric" in request.query_params
    wanted = query.runs if names_runs else tuple(line.run_id for line in lines[:FIRST_RUNS])
    chosen = tuple([run for run in wanted if run in known or await site.catalog.exists(run)])
    names_of_runs = await asyncio.gather(*(names_of(site, run) for run in chosen))
    names = sorted({name for names in names_of_runs for name in names})
    metrics = query.metrics if names_metrics else _first_metrics(names)
    series = await asyncio.gather(*(series_of(site, run, metrics) for run in chosen))
    absent = tuple(run for run in wanted if run not in chosen)
    query = replace(query, runs=chosen, metrics=metrics)
    return Comparison(query, lines, absent, dict(zip(chosen, series, strict=True)), names)


def _first_metrics(names: Sequence[str]) -> tuple[str, ...]:
    scores = [name for name in names if name.startswith(EVALUATION_PREFIX) and name.endswith(SCORE)]
    return tuple(name for name in (FIRST_METRICS[0], *scores[:1], *FIRST_METRICS[1:]) if name in names)


async def names_of(site: Site, run: str) -> list[str]:
    """Every number that a run has."""
    found = await asyncio.to_thread(site.metric_files.names, site.catalog.runs / run)
    if not found and (watched := await site.catalog.get(run)):
        return sorted({name for point in watched.index.steps.values() for name in point.metrics})
    return found


async def series_of(site: Site, run: str, metrics: Sequence[str]) -> dict[str, Series]:
    """Numbers of a run, from its folder, or from its streams where it has none here."""
    if await asyncio.to_thread(site.metric_files.names, site.catalog.runs / run):
        return await asyncio.to_thread(site.metric_files.series, site.catalog.runs / run, metrics)
    watched = await site.catalog.get(run)
    columns = columns_of(watched.index.steps.values() if watched else ())
    return {name: columns.series(name) for name in metrics}


async def _config(site: Site, run: str) -> dict[str, Any]:
    """The config as the folder has it, whichever release wrote it, else as Redis has it; empty: not known."""

    def read() -> dict[str, Any]:
        text = (site.catalog.runs / run / CONFIG_FILE).read_text(encoding="utf-8")
        return flatten(yaml.safe_load(text))

    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        return await asyncio.to_thread(read)
    watched = await site.catalog.get(run)
    return flatten(watched.config.model_dump(mode="json")) if watched and watched.config else {}


async def page(site: Site, request: Request) -> Response:
    """The page: what can be chosen, the plots' places, and both tables."""
    found = await _read(site, request)
    configs = [await _config(site, run) for run in found.runs]
    words = found.query.text.casefold().split()
    shown = {name for name in found.names if all(word in name.casefold() for word in words)}
    return site.templates.response(
        "compare.html",
        run=None,
        here="compare",
        found=found,
        query=found.query,
        listed=[*found.query.metrics, *(name for name in found.names if name not in found.query.metrics)],
        shown=shown,
        differences=differing(configs) if len(configs) > 1 else [],
        most_runs=MAX_RUNS,
        most_metrics=MAX_METRICS,
        axes=AXES,
    )


async def curves(site: Site, request: Request) -> Response:
    """The plots' points, thinned to what a screen can show."""
    found = await _read(site, request)
    query = found.query

    unit, unit_s = ("hour", 3600.0) if found.longest_s > LEAST_HOURS * 3600 else ("minute", 60.0)

    def trees() -> list[dict[str, Any]]:
        is_timed = query.x == "time"
        return [
            {
                "key": sendable(metric),
                "title": sendable(metric),
                "unit": "",
                "x": unit if is_timed else "version" if metric.startswith(EVALUATION_PREFIX) else "step",
                "lines": [
                    line_of(run, found.series[run][metric], query.smoothing, unit_s if is_timed else 0.0)
                    for run in found.runs
                ],
            }
            for metric in query.metrics
        ]

    return JSONResponse({"live": found.is_live, "charts": await asyncio.to_thread(trees)})


async def table(site: Site, request: Request) -> Response:
    """All values of the chosen numbers, neither smoothed nor thinned."""
    found = await _read(site, request)

    def rows() -> Iterator[Sequence[Any]]:
        for run in found.runs:
            for metric, series in found.series[run].items():
                columns = (column.tolist() for column in (series.x, series.time, series.y))
                for x, time, y in zip(*columns, strict=True):
                    yield run, metric, int(x), round(time, 3), y

    return csv_response("comparison", ("run", "metric", "step", "seconds", "value"), rows())


FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def csv_response(name: str, titles: Sequence[str], rows: Iterator[Sequence[Any]]) -> Response:
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
            if number % 500 == 0:
                yield buffer.getvalue()
                buffer.seek(0)
                buffer.truncate()
        yield buffer.getvalue()

    return StreamingResponse(parts(), media_type="text/csv", headers=attached(f"{name}.csv"))


def attached(name: str) -> dict[str, str]:
    """The header that makes a browser keep a file in place of showing it; names are ours, or ids of runs."""
    return {"Content-Disposition": f'attachment; filename="{name}"'}


SitePage = Callable[[Site, Request], Awaitable[Response]]
ROUTES: dict[str, SitePage] = {"/compare": page, "/compare.json": curves, "/compare.csv": table}
