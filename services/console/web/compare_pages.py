"""Runs overlaid: any of their numbers in one plot, where their configs differ, and their results."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tidemill.common.config.section import flatten
from tidemill.common.run.state import CONFIG_FILE
from tidemill.common.wire.keys import RUN_ID
from tidemill.services.console.look.series import EVALUATION_PREFIX, Columns, Series
from tidemill.services.console.web.curves import columns_in, columns_of, line_of
from tidemill.services.console.web.listing import ListedRun
from tidemill.services.console.web.site import Site, csv_file
from tidemill.services.console.web.texts import sendable

MAX_RUNS = 8
MAX_METRICS = 12
MAX_NAME_CHARACTERS = 200
FIRST_RUNS = 4
"""Runs that are shown where the address names none."""
FIRST_METRICS = ("reward", "kl", "entropy", "completions/mean_length", "grad_norm")
"""Metrics that are shown where the address names none; the first evaluation set's score comes second."""
AXES = {"step": "step", "time": "time since the first step"}
MOST_SMOOTHING = 0.99
LEAST_HOURS = 3
"""From here on, time is shown in hours."""
ABSENT = "\u2013"
"""Stands for a field that a config does not have: it is from another release, or lacks the section."""


@dataclass(frozen=True, slots=True)
class CompareQuery:
    """All that a page's address asks for, so that the address can be kept and shared."""

    runs: tuple[str, ...]
    metrics: tuple[str, ...]
    smoothing: float = 0.0
    x: str = "step"
    text: str = ""
    """The browser lists the metrics whose names have these words."""

    @classmethod
    def parse(cls, values: QueryParams) -> "CompareQuery":
        """The query of an address; what cannot be understood is left out."""
        runs = dict.fromkeys(name for name in values.getlist("run") if RUN_ID.fullmatch(name))
        metrics = dict.fromkeys(name[:MAX_NAME_CHARACTERS] for name in values.getlist("metric") if name)
        smoothing = 0.0
        x = values.get("x", "")
        with contextlib.suppress(ValueError):
            smoothing = float(values.get("smooth", "0"))
        return cls(
            tuple(runs)[:MAX_RUNS],
            tuple(metrics)[:MAX_METRICS],
            min(MOST_SMOOTHING, smoothing) if smoothing > 0 else 0.0,
            x if x in AXES else "step",
            values.get("text", "")[:MAX_NAME_CHARACTERS],
        )


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    query: CompareQuery
    """The query, with only the runs that exist and the metrics that are shown."""
    lines: list[ListedRun]
    """All runs that there are."""
    absent: tuple[str, ...]
    """Runs that were asked for and do not exist."""
    series: dict[str, dict[str, Series]]
    """By run and metric."""
    names: list[str]
    """Every number that any of the runs has."""


async def _read(site: Site, request: Request) -> ComparedRuns:
    query = CompareQuery.parse(request.query_params)
    catalog = site.catalog
    lines = await catalog.lines()
    run_ids = {line.run_id for line in lines}
    wanted = query.runs
    if "run" not in request.query_params:
        wanted = tuple(line.run_id for line in lines[:FIRST_RUNS])
    # A list first: a generator that waits cannot become a tuple.
    runs = tuple([run for run in wanted if run in run_ids or await catalog.exists(run)])
    columns = await asyncio.gather(*(_columns(site, run) for run in runs))
    names = sorted({name for of_run in columns for name in of_run.numbers})
    metrics = query.metrics
    if "metric" not in request.query_params:
        evaluations = [name for name in names if name.startswith(EVALUATION_PREFIX)]
        scores = [name for name in evaluations if name.endswith("/score")]
        first_metrics = (FIRST_METRICS[0], *scores[:1], *FIRST_METRICS[1:])
        metrics = tuple(name for name in first_metrics if name in names)
    series = []
    for of_run in columns:
        series.append({name: of_run.series(name) for name in metrics})
    query = replace(query, runs=runs, metrics=metrics)
    absent = tuple(run for run in wanted if run not in runs)
    return ComparedRuns(
        query=query, lines=lines, absent=absent, series=dict(zip(runs, series, strict=True)), names=names
    )


async def _columns(site: Site, run: str) -> Columns:
    """Numbers of a run, from its folder, or from its streams where it has none here."""
    columns = await asyncio.to_thread(columns_in, site.catalog.runs / run)
    if columns.numbers:
        return columns
    watched = await site.catalog.get(run)
    return columns_of(watched.index.steps.values() if watched else ())


async def _config(site: Site, run: str) -> dict[str, Any]:
    """The run's config, flat: that of its folder, whichever release wrote it, or else that in Redis; empty
    where neither has it."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        text = await asyncio.to_thread((site.catalog.runs / run / CONFIG_FILE).read_text, "utf-8")
        return flatten(await asyncio.to_thread(yaml.safe_load, text))
    watched = await site.catalog.get(run)
    return flatten(watched.config.model_dump(mode="json")) if watched and watched.config else {}


def differing(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """Fields in which configs differ, with the value of each; the run's id is none of them.

    An unknown (empty) config differs in nothing. Of {"seed": 0, "lr": 1.0}, {"seed": 1, "lr": 1.0} and {}:
    [("seed", [0, 1, ABSENT])].
    """
    fields = dict.fromkeys(name for config in configs for name in config if name != "run_id")
    rows = []
    for name in fields:
        compared = [config.get(name, ABSENT) for config in configs if config]
        if any(value != compared[0] for value in compared):
            rows.append((name, [config.get(name, ABSENT) for config in configs]))
    return rows


async def page(site: Site, request: Request) -> Response:
    """The page: what can be chosen, the plots' places, and both tables."""
    comparison = await _read(site, request)
    configs = [await _config(site, run) for run in comparison.series]
    chosen = comparison.query.metrics
    return site.response(
        "compare.html",
        here="compare",
        found=comparison,
        query=comparison.query,
        address=request.url.query,
        listed=[*chosen, *(name for name in comparison.names if name not in chosen)],
        differences=differing(configs) if len(configs) > 1 else [],
        most_runs=MAX_RUNS,
        most_metrics=MAX_METRICS,
        axes=AXES,
    )


async def curves(site: Site, request: Request) -> Response:
    """The plots' points, thinned to what a screen can show."""
    comparison = await _read(site, request)
    query = comparison.query
    lasts = [curve.last for series in comparison.series.values() for curve in series.values()]
    seconds = [time for _, _, time in filter(None, lasts)]
    longest_s = max(seconds, default=0.0)
    has_hours = longest_s > LEAST_HOURS * 3600
    unit = "hour" if has_hours else "minute"
    unit_s = 3600.0 if has_hours else 60.0
    is_timed = query.x == "time"
    x_unit_s = unit_s if is_timed else 0.0  # 0: x is the step

    def make_charts() -> list[dict[str, Any]]:
        charts = []
        for metric in query.metrics:
            by_number = "version" if metric.startswith(EVALUATION_PREFIX) else "step"
            lines = [
                line_of(run, series[metric], query.smoothing, x_unit_s)
                for run, series in comparison.series.items()
            ]
            chart = {
                "key": sendable(metric),
                "title": sendable(metric),
                "unit": "",
                "x": unit if is_timed else by_number,
                "lines": lines,
            }
            charts.append(chart)
        return charts

    is_live = any(line.status == "running" for line in comparison.lines if line.run_id in comparison.series)
    return JSONResponse({"live": is_live, "charts": await asyncio.to_thread(make_charts)})


async def table(site: Site, request: Request) -> Response:
    """All values of the chosen numbers, neither smoothed nor thinned."""
    comparison = await _read(site, request)

    def rows() -> Iterator[Sequence[Any]]:
        for run, numbers in comparison.series.items():
            for metric, series in numbers.items():
                columns = [column.tolist() for column in series]
                for step, value, seconds in zip(*columns, strict=True):
                    yield run, metric, int(step), round(seconds, 3), value

    return csv_file("comparison", ("run", "metric", "step", "seconds", "value"), rows())


SitePage = Callable[[Site, Request], Awaitable[Response]]
ROUTES: dict[str, SitePage] = {"/compare": page, "/compare.json": curves, "/compare.csv": table}
