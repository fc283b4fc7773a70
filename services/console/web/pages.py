"""The list of runs, and of a run its state, its steps and its dead letters."""

from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from tidemill.common.errors import TidemillError
from tidemill.common.history import Selection, StreamName
from tidemill.common.history.groups import WHOLE_GROUP, micro_batches_of
from tidemill.common.process.activity import times_of
from tidemill.common.wire.messages import Commit, DeadLetter, Lane
from tidemill.services.console.dead.commands import dead_table, dead_tree
from tidemill.services.console.dead.entries import DeadEntry, read_dead
from tidemill.services.console.options import DeadFilter
from tidemill.services.console.status.render import flow_lines, process_table
from tidemill.services.console.text.tree import part
from tidemill.services.console.web.charts import chart_trees
from tidemill.services.console.web.group_index import STATES, GroupRow
from tidemill.services.console.web.site import Page, Site, history_of
from tidemill.services.console.web.watched_run import WatchedRun

TOPICS = (
    ("Reward", ("reward", "scores/", "frac_reward", "rewards/")),
    ("Sources", ("source/", "curriculum/")),
    ("Update", ("loss", "grad_norm", "learning_rate", "update_skipped", "mini_batches", "micro_batches")),
    (
        "Policy",
        (
            "entropy",
            "kl",
            "rollout_kl",
            "clip_ratio/",
            "sampling/",
            "selection/",
            "logprob_gap/",
            "value",
            "teacher",
        ),
    ),
    ("Completions", ("completion", "step_tokens", "groups_dropped")),
    ("Staleness", ("staleness/",)),
    ("Time", ("step_time_s", "time/", "trainer_idle_share")),
)
OTHER = "Other"


def sort_metrics(metrics: Mapping[str, float]) -> list[tuple[str, list[tuple[str, float]]]]:
    """Metrics by topic; what belongs to none comes last."""
    topics: dict[str, list[tuple[str, float]]] = {name: [] for name, _ in TOPICS}
    topics[OTHER] = []
    for name, value in metrics.items():
        topics[_topic(name)].append((name, value))
    return [(topic, found) for topic, found in topics.items() if found]


def _topic(name: str) -> str:
    return next((topic for topic, starts in TOPICS if name.startswith(starts)), OTHER)


def _times(metrics: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Parts of a step, with their seconds and shares."""
    whole, parts = metrics.get("step_time_s", 0.0), times_of(metrics)
    if (rest := whole - sum(parts.values())) > 0:
        parts["waiting and all else"] = rest
    return [(name, value, min(1.0, value / whole) if whole else 0.0) for name, value in parts.items()]


RECENT_STEPS = 5


async def runs(site: Site) -> Response:
    lines = await site.catalog.lines()
    return site.templates.response(
        "runs.html", run=None, here="runs", lines=lines, folder=str(site.catalog.runs)
    )


async def without_slash(site: Site, run: WatchedRun, request: Request) -> Response:
    return RedirectResponse(request.url.path.rstrip("/"), 301)


async def overview(site: Site, run: WatchedRun, request: Request) -> Response:
    """A run: its state and its curves."""
    return site.page("overview.html", run, "overview", **_state(run))


async def state(site: Site, run: WatchedRun, request: Request) -> Response:
    """The part of the overview that changes all the time."""
    return site.page("state.html", run, "overview", **_state(run))


async def charts(site: Site, run: WatchedRun, request: Request) -> Response:
    evaluations = run.snapshot.evaluations if run.snapshot else []
    return JSONResponse(
        {
            "live": run.is_live,
            "version": run.snapshot.version if run.snapshot else 0,
            "charts": chart_trees(run.index.steps, evaluations),
        }
    )


async def news(site: Site, run: WatchedRun, request: Request) -> Response:
    """Whether anything has changed, for pages that only say so."""
    return JSONResponse(
        {
            "live": run.is_live or not run.index.is_complete,
            "groups": {lane.value: len(run.index.groups[lane]) for lane in Lane},
            "steps": len(run.index.steps),
        }
    )


def _state(run: WatchedRun) -> dict[str, Any]:
    counts = dict.fromkeys(STATES, 0)
    for row in run.index.rows(Lane.TRAIN):
        counts[row.state] += 1
    steps = run.index.steps
    return {
        "snapshot": run.snapshot,
        "flow": part("", flow_lines(run.snapshot)) if run.snapshot else None,
        "processes": part("", process_table(run.snapshot)) if run.snapshot else None,
        "counts": counts,
        "num_eval": len(run.index.groups[Lane.EVAL]),
        "recent": [steps[step] for step in sorted(steps)[-RECENT_STEPS:][::-1]],
    }


PAGE_STEPS = 200
MAX_DROPPED = 500


async def steps(site: Site, run: WatchedRun, request: Request) -> Response:
    """All steps, the newest first, a page at a time."""
    numbers = sorted(run.index.steps, reverse=True)
    typed = request.query_params.get("page", "1")
    num_pages = max(1, -(-len(numbers) // PAGE_STEPS))
    page = min(max(1, int(typed)), num_pages) if typed.isascii() and typed.isdigit() and len(typed) < 9 else 1
    shown = numbers[(page - 1) * PAGE_STEPS : page * PAGE_STEPS]
    rows = [run.index.steps[number] for number in shown]
    return site.page("steps.html", run, "steps", rows=rows, page=page, num_pages=num_pages)


async def step(site: Site, run: WatchedRun, request: Request) -> Response:
    """One step: what went in, in which micro-batches, where the time went, what came out."""
    number = request.path_params["step"]
    row = run.index.steps.get(number)
    if row is None:
        raise HTTPException(404, f"Step {number} has no commit yet.")
    problem = ""
    commit: Commit | None = None
    try:
        commit = await history_of(run).commit(number)
    except TidemillError as error:
        problem = str(error)
    return site.page(
        "step.html",
        run,
        "steps",
        row=row,
        commit=commit,
        groups=[run.index.get(t, Lane.TRAIN) or GroupRow(t) for t in commit.groups] if commit else [],
        dropped=sorted(commit.dropped, key=lambda item: (item[1] != WHOLE_GROUP, item)) if commit else [],
        micro_batches=list(micro_batches_of(commit)) if commit else [],
        times=_times(row.metrics),
        topics=sort_metrics(row.metrics),
        problem=problem,
        most_dropped=MAX_DROPPED,
        previous=number - 1 if number - 1 in run.index.steps else None,
        following=number + 1 if number + 1 in run.index.steps else None,
    )


PAGE_DEAD = 100
MAX_DEAD = 10_000
"""Dead letters that are looked through, the newest."""


async def dead(site: Site, run: WatchedRun, request: Request) -> Response:
    """All dead letters, the newest first."""
    text = request.query_params.get("text", "")[:200]
    needle = text.casefold()
    found = [entry for entry in await _read_dead(run) if needle in _searched(entry.content).casefold()]
    listed = part("", dead_table(found[:PAGE_DEAD]))
    return site.page("dead.html", run, "dead", listed=listed, num_found=len(found), text=text, most=PAGE_DEAD)


async def dead_one(site: Site, run: WatchedRun, request: Request) -> Response:
    """One dead letter with the message that died."""
    wanted = request.path_params["entry"]
    found = next((entry for entry in await _read_dead(run) if entry.entry_id == wanted), None)
    if found is None:
        raise HTTPException(404, "There is no such dead letter: it may have been put back or dropped.")
    return site.page("letter.html", run, "dead", found=dead_tree(found))


async def _read_dead(run: WatchedRun) -> list[DeadEntry]:
    max_bytes = (run.config.streams.max_message_mb if run.config else 64) << 20
    entries = history_of(run).scan(StreamName.DEAD, Selection(), newest_first=True)
    return await read_dead(entries, DeadFilter(), max_bytes, MAX_DEAD)


def _searched(content: DeadLetter) -> str:
    return f"{content.error}\n{content.worker}\n{content.origin}"


ROUTES: dict[str, Page] = {
    "/run/{run}": overview,
    "/run/{run}/": without_slash,
    "/run/{run}/state.html": state,
    "/run/{run}/charts.json": charts,
    "/run/{run}/news.json": news,
    "/run/{run}/steps": steps,
    "/run/{run}/steps/{step:int}": step,
    "/run/{run}/dead": dead,
    "/run/{run}/dead/{entry}": dead_one,
}
