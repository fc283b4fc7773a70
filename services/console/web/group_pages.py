"""The browser of groups, one group, the tokens of one completion, and groups as files."""

from typing import Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tidemill.common.errors import TidemillError
from tidemill.common.wire.messages import Lane, Trajectory
from tidemill.common.wire.segments import Segment
from tidemill.services.console.records.joins import GroupRecord, SampleRecord, read_group, read_trajectories
from tidemill.services.console.records.sessions import num_completion_tokens
from tidemill.services.console.records.trace import group_json, group_tree
from tidemill.services.console.web.groups import (
    EXTRA_STATES,
    PAGE_ROWS,
    STATES,
    GroupQuery,
    GroupRow,
    number_of,
)
from tidemill.services.console.web.runs import WatchedRun
from tidemill.services.console.web.site import Page, Site, csv_file, history_of, json_file
from tidemill.services.console.web.texts import TokenTexts, sendable

MAX_SHOWN_SAMPLES = 32
"""Completions on one page of a group."""
MAX_PART_TOKENS = 2000
MAX_TEXT_PART_CHARACTERS = 20_000
LANES = {"groups": Lane.TRAIN, "eval-groups": Lane.EVAL}
"""By the part of the address: evaluation numbers its tickets by itself, so it has addresses of its own."""


def _by_reward(sample: SampleRecord) -> tuple[Any, ...]:
    return sample.reward is None, -(sample.reward or 0.0), sample.index


def _by_length(sample: SampleRecord) -> tuple[Any, ...]:
    made = sample.trajectory
    return -sum(num_completion_tokens(made)) if made else 1, sample.index


SAMPLE_SORTS: dict[str, Any] = {
    "index": lambda sample: sample.index,
    "reward": _by_reward,
    "length": _by_length,
}


async def browser(site: Site, run: WatchedRun, request: Request) -> Response:
    query = GroupQuery.parse(request.query_params)
    found = query.select(run.index)
    num_pages = max(1, -(-len(found) // PAGE_ROWS))
    page = min(query.page, num_pages)
    return site.response(
        "groups.html",
        run=run,
        here="groups",
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
    row, lane = _find_row(run, request)
    problem, view = "", GroupRecord(row.ticket, lane)
    has_letters = not run.is_live or bool(run.snapshot and run.snapshot.num_dead)
    try:
        view = await read_group(history_of(run), row.ticket, lane, row.known_places(has_letters))
    except TidemillError as error:
        problem = str(error)
    typed, first = request.query_params.get("sort", ""), number_of(request.query_params.get("first"))
    sort = typed if typed in SAMPLE_SORTS else "index"
    samples = sorted(view.samples, key=SAMPLE_SORTS[sort])
    return site.response(
        "group.html",
        run=run,
        here="groups",
        view=view,
        recorded=group_tree(view),
        row=row,
        lane=lane.value,
        problem=problem,
        shown=samples[first : first + MAX_SHOWN_SAMPLES],
        first=first,
        most=MAX_SHOWN_SAMPLES,
        sort=sort,
        sorts=tuple(SAMPLE_SORTS),
        has_texts=(await run.texts()).is_known,
        previous=row.ticket - 1 if run.index.get(row.ticket - 1, lane) else None,
        following=row.ticket + 1 if run.index.get(row.ticket + 1, lane) else None,
    )


async def tokens(site: Site, run: WatchedRun, request: Request) -> Response:
    """A part of a completion's tokens: texts, ids, logprobs, versions, and which are trained."""
    trajectory, typed = await _trajectory(run, request), request.query_params
    count = min(MAX_PART_TOKENS, max(1, number_of(typed.get("count"), MAX_PART_TOKENS)))
    number = number_of(typed.get("segment"))
    if number >= len(trajectory.segments):
        raise HTTPException(404, f"Completion {trajectory.index} has {len(trajectory.forks)} forks.")
    segment, first = trajectory.segments[number], number_of(typed.get("first"))
    return JSONResponse(_token_part(segment, await run.texts(), first, count))


async def text(site: Site, run: WatchedRun, request: Request) -> Response:
    whole, first = (await _trajectory(run, request)).text, number_of(request.query_params.get("first"))
    part = whole[first : first + MAX_TEXT_PART_CHARACTERS]
    return JSONResponse({"next": first + len(part), "total": len(whole), "text": sendable(part)})


def _find_row(run: WatchedRun, request: Request) -> tuple[GroupRow, Lane]:
    lane, ticket = LANES.get(request.path_params["lane"]), request.path_params["ticket"]
    if lane is None:
        raise HTTPException(404)
    row = run.index.get(ticket, lane)
    if row is None:
        still = "" if run.index.is_complete else " The run is still being read: try again in a moment."
        raise HTTPException(404, f"The run has no ticket {ticket} that anything is known of.{still}")
    return row, lane


async def _trajectory(run: WatchedRun, request: Request) -> Trajectory:
    row, lane = _find_row(run, request)
    for made in await read_trajectories(history_of(run), row.ticket, lane, row.trajectories):
        if made.index == request.path_params["index"]:
            return made
    raise HTTPException(404, f"Ticket {row.ticket} has no completion {request.path_params['index']}.")


def _token_part(segment: Segment, texts: TokenTexts, first: int, count: int) -> dict[str, Any]:
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


async def groups_file(site: Site, run: WatchedRun, request: Request) -> Response:
    """All groups that the filters leave, with the beginnings of their prompts, as CSV or JSON."""
    trees = map(_row_tree, GroupQuery.parse(request.query_params).select(run.index))
    if request.url.path.endswith(".json"):
        return json_file(f"{run.run_id}-groups", list(trees))
    return csv_file(f"{run.run_id}-groups", tuple(_row_tree(GroupRow(0))), (t.values() for t in trees))


async def whole_group(site: Site, run: WatchedRun, request: Request) -> Response:
    """Everything that is recorded of a group, as `tidemill trace --json` prints it."""
    row, lane = _find_row(run, request)
    found = await read_group(history_of(run), row.ticket, lane, row.known_places(True))
    kind = "eval-group" if lane is Lane.EVAL else "group"
    return json_file(f"{run.run_id}-{kind}-{row.ticket}", group_json(found))


ROUTES: dict[str, Page] = {
    "/run/{run}/groups": browser,
    "/run/{run}/groups.csv": groups_file,
    "/run/{run}/groups.json": groups_file,
    "/run/{run}/{lane}/{ticket:int}": group,
    "/run/{run}/{lane}/{ticket:int}.json": whole_group,
    "/run/{run}/{lane}/{ticket:int}/{index:int}/tokens.json": tokens,
    "/run/{run}/{lane}/{ticket:int}/{index:int}/text.json": text,
}
