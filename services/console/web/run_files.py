"""What lies in a run's folder, to read and to keep: config, logs, numbers and groups as CSV and JSON.

Guarantee: of the folder, only its config, its numbers and the plain files of `logs` are ever sent.
"""

import asyncio
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from tidemill.common.history.records import read_group
from tidemill.common.wire.messages import Lane
from tidemill.services.console.records.trace import group_json
from tidemill.services.console.status.snapshot import StepPoint, read_points
from tidemill.services.console.text.tree import jsonable
from tidemill.services.console.web.compare_pages import attached, csv_response
from tidemill.services.console.web.curves import flatten
from tidemill.services.console.web.formats import sendable
from tidemill.services.console.web.group_index import GroupRow
from tidemill.services.console.web.group_pages import find_row
from tidemill.services.console.web.group_query import GroupQuery
from tidemill.services.console.web.site import Page, Site, history_of
from tidemill.services.console.web.watched_run import WatchedRun

PART_BYTES = 96 << 10
"""Of a log on one page."""
MAX_TEXT_CHARACTERS = 200
LOG_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


async def config(site: Site, run: WatchedRun, request: Request) -> Response:
    """All fields of the run's config."""
    text = request.query_params.get("text", "")[:MAX_TEXT_CHARACTERS]
    fields = flatten(await _config_tree(run))
    needle = text.casefold()
    shown = [(name, value) for name, value in fields.items() if needle in f"{name} {value}".casefold()]
    return site.page("config.html", run, "config", text=text, fields=shown, num_all=len(fields))


async def config_file(site: Site, run: WatchedRun, request: Request) -> Response:
    """The config as it is written."""
    text = yaml.safe_dump(await _config_tree(run), sort_keys=False, allow_unicode=True)
    return Response(sendable(text), media_type="application/yaml", headers=attached(f"{run.run_id}.yaml"))


async def _config_tree(run: WatchedRun) -> dict[str, Any]:
    known = run.config or await asyncio.to_thread(run.folder.config)
    if known is None:
        raise HTTPException(404, "Neither the run's folder nor its Redis has a config.")
    return known.model_dump(mode="json")


@dataclass(frozen=True, slots=True)
class LogPart:
    """Some lines of a log, from byte `first` to `end`."""

    name: str
    text: str
    """Lines without it are left out."""
    first: int
    end: int
    size: int
    lines: list[str]


async def logs(site: Site, run: WatchedRun, request: Request) -> Response:
    """The run's logs; of the one that is named, the newest lines or those before `end`."""
    folder, name = run.folder.logs, request.path_params.get("name")
    found = await asyncio.to_thread(_listed, folder)
    part = None
    if name is not None:
        if name not in dict(found):
            raise HTTPException(404, "The run has no such log.")
        if request.query_params.get("file"):
            return FileResponse(
                folder / name, media_type="text/plain", headers=attached(f"{run.run_id}-{name}")
            )
        end = request.query_params.get("end", "")
        text = request.query_params.get("text", "")[:MAX_TEXT_CHARACTERS]
        last = int(end) if end.isascii() and end.isdigit() and len(end) < 16 else None
        part = await asyncio.to_thread(_read_part, folder / name, text, last)
    return site.page("logs.html", run, "logs", logs=found, log=part)


def _listed(folder: Path) -> list[tuple[str, int]]:
    """Names and sizes of plain files with names as services have them; links lead elsewhere, and are none."""
    try:
        with os.scandir(folder) as entries:
            found = [(e.name, e.stat(follow_symlinks=False)) for e in entries if LOG_NAME.fullmatch(e.name)]
    except OSError:
        return []
    return sorted((name, known.st_size) for name, known in found if stat.S_ISREG(known.st_mode))


def _read_part(path: Path, text: str, last: int | None) -> LogPart:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        end = size if last is None else min(last, size)
        first = max(0, end - PART_BYTES)
        file.seek(first)
        data = file.read(end - first)
    if first and (cut := data.find(b"\n") + 1):
        first, data = first + cut, data[cut:]
    lines = data.decode("utf-8", "replace").removesuffix("\n").split("\n")
    needle = text.casefold()
    return LogPart(path.name, text, first, end, size, [line for line in lines if needle in line.casefold()])


async def metrics_table(site: Site, run: WatchedRun, request: Request) -> Response:
    """Every number of every step, a column for each."""
    points = await _points(run)
    names = list(dict.fromkeys(name for point in points for name in point.metrics if name != "step"))
    rows = ((point.step, *(point.metrics.get(name, "") for name in names)) for point in points)
    return csv_response(f"{run.run_id}-metrics", ("step", *names), rows)


async def metrics_json(site: Site, run: WatchedRun, request: Request) -> Response:
    """The same as JSON, with evaluations."""
    points = await _points(run)
    evaluations = run.snapshot.evaluations if run.snapshot else []
    steps = [{**point.metrics, "step": point.step} for point in points]
    tree = {"run": run.run_id, "steps": steps, "evaluations": evaluations}
    return _json_file(tree, f"{run.run_id}-metrics")


def _json_file(tree: Any, name: str) -> Response:
    """ASCII, so that halves of characters, which UTF-8 does not have, are escapes."""
    text = json.dumps(jsonable(tree))
    return Response(text, media_type="application/json", headers=attached(f"{name}.json"))


async def _points(run: WatchedRun) -> list[StepPoint]:
    """Steps of the folder, and those that only the streams have."""
    points = {point.step: point for point in await asyncio.to_thread(read_points, run.folder)}
    return [
        points.get(step) or run.index.steps[step] for step in sorted(points.keys() | run.index.steps.keys())
    ]


def _row_tree(row: GroupRow) -> dict[str, Any]:
    rewards, lengths = row.rewards, row.lengths
    return {
        "ticket": row.ticket,
        "step": row.at_step,
        "state": row.state,
        "reward_mean": rewards.mean if rewards.count else None,
        "reward_std": rewards.std if rewards.count else None,
        "num_rewards": rewards.count,
        "num_failed": row.num_failed,
        "length_mean": lengths.mean if lengths.count else None,
        "num_cut": row.num_cut,
        "min_version": row.min_version,
        "max_version": row.max_version,
        "workers": " ".join(row.workers),
        "finished_at": row.finished_at,
        "dropped": row.dropped,
        "prompt": row.prompt,
    }


def _rows(run: WatchedRun, request: Request) -> list[GroupRow]:
    query = GroupQuery.parse(request.query_params)
    return query.select(run.index.rows(query.lane))


async def groups_table(site: Site, run: WatchedRun, request: Request) -> Response:
    """All groups that the filters leave, with the beginnings of their prompts."""
    rows: Iterator[Sequence[Any]] = (tuple(_row_tree(row).values()) for row in _rows(run, request))
    return csv_response(f"{run.run_id}-groups", tuple(_row_tree(GroupRow(0))), rows)


async def groups_json(site: Site, run: WatchedRun, request: Request) -> Response:
    return _json_file([_row_tree(row) for row in _rows(run, request)], f"{run.run_id}-groups")


async def whole_group(site: Site, run: WatchedRun, request: Request) -> Response:
    """Everything that is recorded of a group, as `tidemill trace --json` prints it."""
    row, lane = find_row(run, request)
    found = await read_group(history_of(run), row.ticket, lane, row.known_places(True))
    kind = "eval-group" if lane is Lane.EVAL else "group"
    return _json_file(group_json(found), f"{run.run_id}-{kind}-{row.ticket}")


ROUTES: dict[str, Page] = {
    "/run/{run}/config": config,
    "/run/{run}/config.yaml": config_file,
    "/run/{run}/logs": logs,
    "/run/{run}/logs/{name}": logs,
    "/run/{run}/metrics.csv": metrics_table,
    "/run/{run}/metrics.json": metrics_json,
    "/run/{run}/groups.csv": groups_table,
    "/run/{run}/groups.json": groups_json,
    "/run/{run}/{lane:lane}/{ticket:int}.json": whole_group,
}
