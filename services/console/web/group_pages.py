"""The browser of groups, one group, and the tokens of one completion."""

from typing import Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tidemill.common.errors import TidemillError
from tidemill.common.history.records import GroupRecord, read_group, read_trajectories
from tidemill.common.history.sessions import num_completion_tokens
from tidemill.common.wire.messages import Lane, Trajectory
from tidemill.common.wire.segments import Segment
from tidemill.services.console.records.trace import group_tree
from tidemill.services.console.web.formats import TokenTexts, sendable
from tidemill.services.console.web.group_index import STATES, GroupRow
from tidemill.services.console.web.group_query import EXTRA_STATES, PAGE_ROWS, GroupQuery
from tidemill.services.console.web.site import Page, Site, history_of
from tidemill.services.console.web.watched_run import WatchedRun

MAX_SHOWN_SAMPLES = 32
"""Completions on one page of a group."""
SAMPLE_SORTS = ("index", "reward", "length")
MAX_PART_TOKENS = 2000
MAX_TEXT_PART_CHARACTERS = 20_000


async def browser(site: Site, run: WatchedRun, request: Request) -> Response:
    """Groups, filtered and in order, a page at a time."""
    query = GroupQuery.parse(request.query_params)
    found = query.select(run.index.rows(query.lane))
    num_pages = max(1, -(-len(found) // PAGE_ROWS))
    page = min(query.page, num_pages)
    return site.page(
        "groups.html",
        run,
        "groups",
        query=query,
        rows=found[(page - 1) * PAGE_ROWS : page * PAGE_ROWS],
        num_found=len(found),
        num_all=len(run.index.groups[query.lane]),
        page=page,
        num_pages=num_pages,
        states=STATES,
        extra_states=EXTRA_STATES,
    )


async def group(site: Site, run: WatchedRun, request: Request) -> Response:
    """One group, its completions side by side."""
    row, lane = find_row(run, request)
    problem, view = "", GroupRecord(row.ticket, lane)
    has_letters = not run.is_live or bool(run.snapshot and run.snapshot.num_dead)
    try:
        view = await read_group(history_of(run), row.ticket, lane, row.known_places(has_letters))
    except TidemillError as error:
        problem = str(error)
    sort = request.query_params.get("sort", "index")
    first = _number(request.query_params.get("first"), 0)
    samples = sorted(view.samples, key=_SAMPLE_KEYS.get(sort, _SAMPLE_KEYS["index"]))
    return site.page(
        "group.html",
        run,
        "groups",
        view=view,
        recorded=group_tree(view),
        row=row,
        lane=lane.value,
        problem=problem,
        shown=samples[first : first + MAX_SHOWN_SAMPLES],
        first=first,
        most=MAX_SHOWN_SAMPLES,
        sort=sort if sort in SAMPLE_SORTS else "index",
        sorts=SAMPLE_SORTS,
        has_texts=(await run.texts()).is_known,
        previous=row.ticket - 1 if run.index.get(row.ticket - 1, lane) else None,
        following=row.ticket + 1 if run.index.get(row.ticket + 1, lane) else None,
    )


async def tokens(site: Site, run: WatchedRun, request: Request) -> Response:
    """A part of a completion's tokens: texts, ids, logprobs, versions, and which are trained."""
    trajectory = await _trajectory(run, request)
    first = _number(request.query_params.get("first"), 0)
    count = min(MAX_PART_TOKENS, max(1, _number(request.query_params.get("count"), MAX_PART_TOKENS)))
    number = _number(request.query_params.get("segment"), 0)
    if number >= len(trajectory.segments):
        raise HTTPException(404, f"Completion {trajectory.index} has {len(trajectory.forks)} forks.")
    return JSONResponse(token_part(trajectory.segments[number], await run.texts(), first, count))


async def text(site: Site, run: WatchedRun, request: Request) -> Response:
    """A part of a completion's text, as it was recorded."""
    trajectory = await _trajectory(run, request)
    first = _number(request.query_params.get("first"), 0)
    part = trajectory.text[first : first + MAX_TEXT_PART_CHARACTERS]
    return JSONResponse({"next": first + len(part), "total": len(trajectory.text), "text": sendable(part)})


def find_row(run: WatchedRun, request: Request) -> tuple[GroupRow, Lane]:
    """The group of an address.

    Raises:
        HTTPException: the run has none of this number.
    """
    lane, ticket = request.path_params["lane"], request.path_params["ticket"]
    row = run.index.get(ticket, lane)
    if row is None:
        still = "" if run.index.is_complete else " The run is still being read: try again in a moment."
        raise HTTPException(404, f"The run has no ticket {ticket} that anything is known of.{still}")
    return row, lane


async def _trajectory(run: WatchedRun, request: Request) -> Trajectory:
    row, lane = find_row(run, request)
    index = request.path_params["index"]
    window = row.trajectories.ids
    found = await read_trajectories(history_of(run), row.ticket, lane, window)
    trajectory = next((made for made in found if made.index == index), None)
    if trajectory is None:
        raise HTTPException(404, f"Ticket {row.ticket} has no completion {index}.")
    return trajectory


def _length(made: Trajectory | None) -> int:
    return sum(num_completion_tokens(made)) if made else -1


_SAMPLE_KEYS: dict[str, Any] = {
    "index": lambda sample: sample.index,
    "reward": lambda sample: (sample.reward is None, -(sample.reward or 0.0), sample.index),
    "length": lambda sample: (-_length(sample.trajectory), sample.index),
}


def token_part(segment: Segment, texts: TokenTexts, first: int, count: int) -> dict[str, Any]:
    """Tokens `first` to `first + count` of a segment's completion, as JSON. `turns` has the turn that made
    each token, -1 for the environment's; it is None for a single turn."""
    total = len(segment.completion_ids)
    stop = min(first + count, total)
    pieces = texts.pieces(segment.completion_ids.tolist(), first, stop)
    logprobs = segment.logprobs[first:stop]
    turns = np.full(total, -1, dtype=np.int32)
    for number, turn in enumerate(segment.turns):
        turns[turn.first : turn.end] = number
    versions = np.zeros(total, dtype=np.int64)
    for version, begin in segment.spans:
        versions[begin:] = version
    return {
        "first": first,
        "total": total,
        "pieces": [sendable(piece) for piece in pieces] if pieces is not None else None,
        "ids": segment.completion_ids[first:stop].tolist(),
        "logprobs": [round(float(p), 4) if np.isfinite(p) else None for p in logprobs],
        "versions": versions[first:stop].tolist(),
        "trained": segment.mask[first:stop].astype(int).tolist(),
        "turns": turns[first:stop].tolist() if segment.turns else None,
    }


def _number(text: str | None, default: int) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else default


ROUTES: dict[str, Page] = {
    "/run/{run}/groups": browser,
    "/run/{run}/{lane:lane}/{ticket:int}": group,
    "/run/{run}/{lane:lane}/{ticket:int}/{index:int}/tokens.json": tokens,
    "/run/{run}/{lane:lane}/{ticket:int}/{index:int}/text.json": text,
}
"""Evaluation numbers its tickets by itself, so it has addresses of its own."""
