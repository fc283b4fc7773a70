"""Pages of a run: its state, curves, steps, dead letters, config, logs, and its numbers as files.

Guarantee: of the run's folder, only its config, its numbers and the plain files of `logs` are ever sent.
"""

import asyncio
import json
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from tidemill.common.command_line import command_line
from tidemill.common.config.section import flatten
from tidemill.common.errors import TidemillError
from tidemill.common.history import Selection, StreamName
from tidemill.common.history.groups import WHOLE_GROUP
from tidemill.common.run.state import FINISHED, STOPPED
from tidemill.common.wire.messages import Commit, Lane
from tidemill.services.console.commands import DeadFilter
from tidemill.services.console.look.dashboard import (
    flow_lines,
    learning_lines,
    pace,
    process_table,
    warning_line,
)
from tidemill.services.console.look.dead_letters import DeadEntry, dead_table, dead_tree, read_dead
from tidemill.services.console.look.failed_scores import failing_lines
from tidemill.services.console.look.joins import StepRecord
from tidemill.services.console.look.report import spell_lines, verdict_lines
from tidemill.services.console.look.snapshot import RunSnapshot, StepPoint
from tidemill.services.console.look.step import batch_table, outcome_lines, time_table
from tidemill.services.console.text.formats import plural, sample_name
from tidemill.services.console.text.tree import Node, note, part, table
from tidemill.services.console.web.curves import chart_trees
from tidemill.services.console.web.groups import STATES, GroupRow, number_of
from tidemill.services.console.web.listing import OVER, UNEXPECTED
from tidemill.services.console.web.runs import WatchedRun
from tidemill.services.console.web.site import (
    NotYet,
    Page,
    Site,
    attached,
    csv_file,
    history_of,
    json_file,
)
from tidemill.services.console.web.texts import sendable

RECENT_STEPS = 5
PAGE_STEPS = 200
STEP_METRICS = {
    "reward": "reward", "loss": "loss", "gradient norm": "grad_norm", "entropy": "entropy",
    "length": "completions/mean_length", "staleness": "staleness/mean",
}  # fmt: skip
"""Columns of the list of steps: title and metric."""
MAX_DROPPED = 500
"""Samples and groups left out of a step that are listed."""
PAGE_DEAD = 100
MAX_DEAD = 10_000
"""The newest dead letters, which are searched."""
PART_BYTES = 96 << 10
"""Bytes of a log on one page."""
MAX_TEXT_CHARACTERS = 200
"""Characters of a search text."""
LOG_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


async def overview(site: Site, run: WatchedRun, request: Request) -> Response:
    """A run: its state and its curves; at another address the state alone, which changes all the time."""
    counts = Counter(row.state for row in run.index.groups[Lane.TRAIN].values())
    steps = run.index.steps
    return site.response(
        "fresh.html" if request.url.path.endswith("/state.html") else "overview.html",
        run=run,
        here="overview",
        snapshot=run.snapshot,
        **(_state(run, run.snapshot) if run.snapshot else {}),
        counts={name: counts[name] for name in STATES},
        num_eval=len(run.index.groups[Lane.EVAL]),
        recent=part("", table(_step_row(steps[step]) for step in sorted(steps)[-RECENT_STEPS:][::-1])),
    )


def _state(run: WatchedRun, snapshot: RunSnapshot) -> dict[str, Any]:
    """What `tidemill status` shows of a run."""
    return {
        # The time that is left is that of a run which goes on.
        "pace": [words for words in pace(snapshot) if run.is_live or not words.endswith(" left")],
        "remarks": list(_remarks(run, snapshot)),
        "learning": part("", learning_lines(snapshot)),
        "flow": part("", flow_lines(snapshot)),
        "processes": part("", process_table(snapshot)),
    }


def _remarks(run: WatchedRun, snapshot: RunSnapshot) -> Iterator[Node]:
    """Why the run ended, what it warns or has warned of, what makes it slow, and whether it has learned."""
    if run.is_live:
        for warning in snapshot.warnings:
            yield Node("warning", warning_line(warning), style="yellow")
        verdict = snapshot.bottleneck
        if verdict:
            yield Node("slowest", f"{verdict.text}. {verdict.advice}")
        return
    yield from _end_lines(run)
    if run.report:
        yield from failing_lines(run.report)
        yield from verdict_lines(run.report)
        return
    for line in spell_lines(snapshot.state.get("warnings") or []):
        yield Node("warning", line, style="yellow")


def _end_lines(run: WatchedRun) -> Iterator[Node]:
    """How a run that is over ended, why, and what to do; a finished one has its summary for that."""
    if run.end is None or run.status not in OVER or run.status in (FINISHED, UNEXPECTED):
        return
    style = "yellow" if run.status == STOPPED else "bold red"
    lines = run.end.lines
    first = lines[0]
    yield Node("", first[:1].upper() + first[1:], style=style)
    for line in lines[1:]:
        label, _, value = line.partition(": ")
        name = Path(value).name
        link = f"logs/{name}" if label == "log" and LOG_NAME.fullmatch(name) else ""
        yield Node(label, value, style=style, link=link)


async def charts(site: Site, run: WatchedRun, request: Request) -> Response:
    evaluations = run.snapshot.evaluations if run.snapshot else []
    version = run.snapshot.version if run.snapshot else 0
    trees = chart_trees(run.index.steps, evaluations)
    tree = {"live": run.is_live, "changes": run.may_change, "version": version, "charts": trees}
    # A run that is read for the first time changes too, and nothing is wrong with it.
    return JSONResponse(tree | {"problem": bool(run.problem)})


async def changes(site: Site, run: WatchedRun, request: Request) -> Response:
    """Whether anything has changed, for pages that only say so."""
    index = run.index
    num_groups = {lane.value: len(index.groups[lane]) for lane in Lane}
    return JSONResponse({"live": run.may_change, "groups": num_groups, "steps": len(index.steps)})


def _step_row(point: StepPoint) -> dict[str, Any]:
    num_groups = len(point.groups)
    return {
        "step": Node("step", point.step, link=f"steps/{point.step}"),
        **{title: point.metrics.get(name) for title, name in STEP_METRICS.items()},
        "groups": Node("groups", num_groups, link=f"groups?step={point.step}") if num_groups else None,
        "left out": point.num_dropped,
        "time": Node("time", point.metrics.get("step_time_s"), "s"),
        "committed": Node("committed", point.finished_at, "time"),
    }


async def steps(site: Site, run: WatchedRun, request: Request) -> Response:
    numbers = sorted(run.index.steps, reverse=True)
    num_pages = max(1, -(-len(numbers) // PAGE_STEPS))
    page = min(max(1, number_of(request.query_params.get("page"), 1)), num_pages)
    step_numbers = numbers[(page - 1) * PAGE_STEPS : page * PAGE_STEPS]
    rows = table(_step_row(run.index.steps[number]) for number in step_numbers)
    pages = {"page": page, "num_pages": num_pages}
    empty = "No step is committed yet." if run.may_change else "No step was committed."
    waits = run.may_change and not numbers
    tree = part("", [rows] if step_numbers else [])
    return site.page(run, "steps", "Steps", tree, empty=empty, waits=waits, **pages)


async def step(site: Site, run: WatchedRun, request: Request) -> Response:
    """One step: what came out, where the time went, what went in, and in which micro-batches."""
    number = request.path_params["step"]
    row = run.index.steps.get(number)
    if row is None:
        raise _no_step(run, number)
    problem = ""
    commit = None
    try:
        commit = await history_of(run).commit(number)
    except TidemillError as error:
        problem = str(error)
    topics: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, value in row.metrics.items():
        topics[name.partition("/")[0] if "/" in name else ""].append({"metric": name, "value": value})
    return site.response(
        "step.html",
        run=run,
        here="steps",
        row=row,
        commit=commit,
        groups=[run.index.get(ticket) or GroupRow(ticket) for ticket in commit.groups] if commit else [],
        batches=_batches(commit) if commit else None,
        outcome=part(
            "",
            Node("committed", row.finished_at, "time"),
            Node("took", row.metrics.get("step_time_s"), "s"),
            outcome_lines(row.metrics),
            [Node("digest", commit.digest)] if commit else [],
        ),
        times=part("", part("Where the time went", time_table(row.metrics))),
        numbers=part("", (part(topic or "step", table(topics[topic])) for topic in sorted(topics))),
        problem=problem,
        previous=number - 1 if number - 1 in run.index.steps else None,
        following=number + 1 if number + 1 in run.index.steps else None,
    )


def _no_step(run: WatchedRun, number: int) -> HTTPException:
    """Says of a step without a commit whether it will have one, and when."""
    done = run.snapshot.version if run.snapshot else 0
    all_steps = run.config.trainer.steps if run.config else None
    text = f"Step {number} has no commit yet: the run has done {plural(done, 'step')}"
    text += f" of {all_steps:,}." if all_steps else "."
    if all_steps is not None and number >= all_steps:
        return HTTPException(404, f"There is no step {number}: the run has {plural(all_steps, 'step')}.")
    if number < done:
        text = f"Step {number} is not known: its commit is neither in the streams nor in metrics.jsonl."
    if not run.may_change:
        return HTTPException(404, f"{text} The run does not go on.")
    return NotYet(text)


def _batches(commit: Commit) -> Node:
    """What was left out of a step, and its micro-batches with their samples."""
    dropped = sorted(commit.dropped, key=lambda item: (item[1] != WHOLE_GROUP, item))[:MAX_DROPPED]
    left_out = table(
        {"what": Node("what", sample_name(ticket, index), link=f"groups/{ticket}"), "why": reason}
        for ticket, index, reason in dropped
    )
    return part(
        "",
        part(f"Left out: {len(commit.dropped):,}", left_out if dropped else note("Nothing was left out.")),
        part("Micro-batches", batch_table(StepRecord(commit), has_room=True)),
    )


async def dead(site: Site, run: WatchedRun, request: Request) -> Response:
    text = _typed_text(request)
    entries = [
        entry
        for entry in await _read_dead(run)
        if _has(text, f"{entry.content.error}\n{entry.content.worker}\n{entry.content.origin}")
    ]
    more = f", the newest {PAGE_DEAD} are shown" if len(entries) > PAGE_DEAD else ""
    return site.page(
        run,
        "dead",
        "Dead letters",
        part("", [dead_table(entries[:PAGE_DEAD])] if entries else []),
        note=f"Messages that nobody could process. `{command_line('dead')}` puts them back or drops them.",
        text=text,
        searched="Error, worker or stream",
        count=plural(len(entries), "dead letter") + more,
        empty="No dead letter fits." if text else "There are none: every message could be processed.",
    )


async def dead_one(site: Site, run: WatchedRun, request: Request) -> Response:
    wanted = request.path_params["entry"]
    letter = next((entry for entry in await _read_dead(run) if entry.entry_id == wanted), None)
    if letter is None:
        raise HTTPException(404, "There is no such dead letter: it may have been put back or dropped.")
    tree = dead_tree(letter)
    up = ("Dead letters", f"/run/{run.run_id}/dead", "")
    return site.page(run, "dead", tree.label, tree, up=up)


async def _read_dead(run: WatchedRun) -> list[DeadEntry]:
    entries = history_of(run).scan(StreamName.DEAD, Selection(), newest_first=True)
    return await read_dead(entries, DeadFilter(), run.config, MAX_DEAD)


async def config(site: Site, run: WatchedRun, request: Request) -> Response:
    text = _typed_text(request)
    fields = flatten(await _config_tree(run))
    matching = [(name, value) for name, value in fields.items() if _has(text, f"{name} {value}")]
    lines = (Node(n, v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)) for n, v in matching)
    return site.page(
        run,
        "config",
        "Config",
        part("", lines),
        files=[("as YAML", f"/run/{run.run_id}/config.yaml")],
        text=text,
        searched="Field or value",
        count=f"{len(matching)} of {plural(len(fields), 'field')}",
        empty="No field fits.",
    )


async def config_file(site: Site, run: WatchedRun, request: Request) -> Response:
    text = yaml.safe_dump(await _config_tree(run), sort_keys=False, allow_unicode=True)
    return Response(sendable(text), media_type="application/yaml", headers=attached(f"{run.run_id}.yaml"))


async def _config_tree(run: WatchedRun) -> dict[str, Any]:
    run_config = run.config or await asyncio.to_thread(run.folder.config)
    if run_config is None:
        raise HTTPException(404, "Neither the run's folder nor its Redis has a config.")
    return run_config.model_dump(mode="json")


def _typed_text(request: Request) -> str:
    return request.query_params.get("text", "")[:MAX_TEXT_CHARACTERS]


def _has(text: str, whole: str) -> bool:
    return text.casefold() in whole.casefold()


async def logs(site: Site, run: WatchedRun, request: Request) -> Response:
    """The run's logs; of the one that is named, the newest lines or those before `end`."""
    folder = run.folder.logs
    name = request.path_params.get("name")
    log = None
    files = await asyncio.to_thread(_listed, folder)
    # Only what was listed is opened: no name leads out of the folder.
    if name is not None and name not in dict(files):
        raise HTTPException(404, "The run has no such log.")
    if name is not None and request.query_params.get("file"):
        kept_as = attached(f"{run.run_id}-{name}")
        return FileResponse(folder / name, media_type="text/plain", headers=kept_as)
    if name is not None:
        end = number_of(request.query_params.get("end"), -1)
        text = _typed_text(request)
        log = await asyncio.to_thread(_read_part, folder / name, text, end)
    return site.response("logs.html", run=run, here="logs", logs=files, log=log)


def _listed(folder: Path) -> list[tuple[str, int]]:
    """Names and sizes of plain files with names of logs; links, which may lead elsewhere, are left out."""
    try:
        with os.scandir(folder) as entries:
            files = [(e.name, e.stat(follow_symlinks=False)) for e in entries if LOG_NAME.fullmatch(e.name)]
    except OSError:
        return []
    return sorted((name, status.st_size) for name, status in files if stat.S_ISREG(status.st_mode))


def _read_part(path: Path, text: str, last: int) -> dict[str, Any]:
    """The lines that contain `text` in the part of a log that ends at byte `last`; negative: at its end."""
    # Not by a link, which may have taken the file's place since it was listed.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        size = file.seek(0, os.SEEK_END)
        end = size if last < 0 else min(last, size)
        first = max(0, end - PART_BYTES)
        file.seek(first)
        data = file.read(end - first)
    if first and (cut := data.find(b"\n") + 1):
        first += cut
        data = data[cut:]
    lines = data.decode("utf-8", "replace").removesuffix("\n").split("\n")
    kept = [line for line in lines if _has(text, line)]
    return {"name": path.name, "text": text, "first": first, "end": end, "size": size, "lines": kept}


async def metrics_file(site: Site, run: WatchedRun, request: Request) -> Response:
    """The numbers of all steps as CSV or JSON; JSON has evaluations too."""
    steps = [run.index.steps[number].record for number in sorted(run.index.steps)]
    if request.url.path.endswith(".json"):
        evaluations = run.snapshot.evaluations if run.snapshot else []
        tree = {"run": run.run_id, "steps": steps, "evaluations": evaluations}
        return json_file(f"{run.run_id}-metrics", tree)
    names = dict.fromkeys(["step", "time", *(name for step in steps for name in step if name != "kind")])

    def rows() -> Iterator[list[Any]]:
        for step in steps:
            yield [step.get(name, "") for name in names]

    return csv_file(f"{run.run_id}-metrics", tuple(names), rows())


ROUTES: dict[str, Page] = {
    "/run/{run}": overview,
    "/run/{run}/state.html": overview,
    "/run/{run}/charts.json": charts,
    "/run/{run}/changes.json": changes,
    "/run/{run}/steps": steps,
    "/run/{run}/steps/{step:int}": step,
    "/run/{run}/dead": dead,
    "/run/{run}/dead/{entry}": dead_one,
    "/run/{run}/config": config,
    "/run/{run}/config.yaml": config_file,
    "/run/{run}/logs": logs,
    "/run/{run}/logs/{name}": logs,
    "/run/{run}/metrics.csv": metrics_file,
    "/run/{run}/metrics.json": metrics_file,
}
