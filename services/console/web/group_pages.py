"""The browser of groups, one group, the tokens of one completion, and groups as files."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tidemill.common.errors import BrokenImageError, TidemillError
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import Lane, PromptFields, Trajectory, is_demonstration
from tidemill.common.wire.segments import Segment
from tidemill.services.console.look.joins import GroupRecord, read_group, read_trajectories
from tidemill.services.console.look.sessions import num_completion_tokens
from tidemill.services.console.look.trace import group_json, group_tree, message_lines, sample_parts
from tidemill.services.console.text.formats import plural
from tidemill.services.console.text.tree import part
from tidemill.services.console.web.groups import (
    EXTRA_STATES,
    PAGE_ROWS,
    STATES,
    GroupQuery,
    GroupRow,
    number_of,
)
from tidemill.services.console.web.runs import WatchedRun
from tidemill.services.console.web.site import NotYet, Page, Site, csv_file, history_of, json_file
from tidemill.services.console.web.texts import TokenTexts, prompt_messages, visible

MAX_SHOWN_SAMPLES = 32
"""Completions on one page of a group."""
MAX_PART_TOKENS = 2000
MAX_TEXT_PART_CHARACTERS = 20_000
MAX_SHOWN_PICTURES = 32
"""Pictures of one prompt on a page."""
MAX_PICTURE_BYTES = 64 << 20
"""A larger picture is not sent."""
LIKELY = (0.9, 0.5, 0.2, 0.05, 0.01)
"""Probabilities between the levels of a token's colour."""
OLDEST = 4
"""Steps of age from which on all tokens have one colour."""
UNFINISHED = ("issued", "generating", "generated")
"""States in which a group has not all of its scores yet."""
LANES = {"groups": Lane.TRAIN, "eval-groups": Lane.EVAL}
"""By the part of the address: evaluation numbers its tickets by itself, so it has addresses of its own."""


SAMPLE_SORTS: dict[str, Any] = {
    "index": lambda s: s.index,
    "reward": lambda s: (s.reward is None, -(s.reward or 0.0), s.index),
    "length": lambda s: (-sum(num_completion_tokens(s.trajectory)) if s.trajectory else 1, s.index),
}


async def browser(site: Site, run: WatchedRun, request: Request) -> Response:
    query = GroupQuery.parse(request.query_params)
    rows = query.select(run.index)
    num_pages = max(1, -(-len(rows) // PAGE_ROWS))
    page = min(query.page, num_pages)
    return site.response(
        "groups.html",
        run=run,
        here="groups",
        query=query,
        rows=rows[(page - 1) * PAGE_ROWS : page * PAGE_ROWS],
        num_found=len(rows),
        num_all=len(run.index.groups[query.lane]),
        page=page,
        num_pages=num_pages,
        states=STATES,
        extra_states=EXTRA_STATES,
    )


async def group(site: Site, run: WatchedRun, request: Request) -> Response:
    row, lane = _find_row(run, request)
    problem = ""
    view = GroupRecord(row.ticket, lane)
    try:
        view = await read_group(history_of(run), row.ticket, lane, row.places)
    except TidemillError as error:
        problem = str(error)
    typed = request.query_params.get("sort", "")
    first = number_of(request.query_params.get("first"))
    sort = typed if typed in SAMPLE_SORTS else "index"
    samples = sorted(view.samples, key=SAMPLE_SORTS[sort])[first : first + MAX_SHOWN_SAMPLES]
    is_partial = row.state in UNFINISHED and run.may_change
    messages = prompt_messages(view.prompt_source) if view.prompt_source else []
    return site.response(
        "group.html",
        run=run,
        here="groups",
        view=view,
        recorded=group_tree(view),
        row=row,
        lane=lane.value,
        problem=problem,
        is_partial=is_partial,
        chat=part("", *(message_lines(message) for message in messages)),
        shown=[(sample, part("", sample_parts(view, sample, with_text=False))) for sample in samples],
        has_sessions=any(sample.trajectory and sample.trajectory.session for sample in samples),
        first=first,
        most=MAX_SHOWN_SAMPLES,
        sort=sort,
        sorts=tuple(SAMPLE_SORTS),
        most_pictures=MAX_SHOWN_PICTURES,
        has_texts=(await run.texts()).is_known,
        previous=row.ticket - 1 if run.index.get(row.ticket - 1, lane) else None,
        following=row.ticket + 1 if run.index.get(row.ticket + 1, lane) else None,
    )


async def tokens(site: Site, run: WatchedRun, request: Request) -> Response:
    """A part of a completion, or of one of its forks, token by token."""
    trajectory = await _trajectory(run, request)
    typed = request.query_params
    count = min(MAX_PART_TOKENS, max(1, number_of(typed.get("count"), MAX_PART_TOKENS)))
    number = number_of(typed.get("segment"))
    if number >= len(trajectory.segments):
        raise HTTPException(404, f"Completion {trajectory.index} has {len(trajectory.forks)} forks.")
    segment = trajectory.segments[number]
    first = number_of(typed.get("first"))
    row, _ = _find_row(run, request)
    texts = await run.texts()
    is_sampled = not is_demonstration(row.ticket)
    pieces = list(shown_tokens(segment, texts, row.at_step, first, count, is_sampled))
    total = len(segment.completion_ids)
    return site.response("part.html", tokens=pieces, text="", next=first + len(pieces), total=total)


async def text(site: Site, run: WatchedRun, request: Request) -> Response:
    trajectory = await _trajectory(run, request)
    whole = trajectory.text
    if trajectory.thought:
        whole = f"{trajectory.thought}\n\n[answer]\n{whole}"
    first = number_of(request.query_params.get("first"))
    chunk = whole[first : first + MAX_TEXT_PART_CHARACTERS]
    return site.response("part.html", tokens=(), text=chunk, next=first + len(chunk), total=len(whole))


async def picture(site: Site, run: WatchedRun, request: Request) -> Response:
    """A picture of the group's prompts, as it is stored. No path is made of the address: its digest has to be
    one that a record of the group names."""
    row, lane = _find_row(run, request)
    record = await read_group(history_of(run), row.ticket, lane, row.places)
    image = _pictures_of(record).get(request.path_params["digest"])
    if image is None:
        raise HTTPException(404, f"Ticket {row.ticket} has no such picture.")
    if image.num_bytes > MAX_PICTURE_BYTES:
        raise HTTPException(404, f"The picture has {image.num_bytes:,} bytes, too many for a page.")
    store = run.pictures()
    try:
        png = await store.threads.run(store.read, image)
    except BrokenImageError as error:
        raise HTTPException(404, str(error)) from None
    return Response(png, media_type="image/png")


def _pictures_of(record: GroupRecord) -> dict[str, Image]:
    """By digest."""
    sources: list[PromptFields | None] = [record.prompt_source]
    sources += [sample.trajectory for sample in record.samples]
    pictures = {}
    for source in sources:
        for image in source.images if source else ():
            pictures[image.digest] = image
    return pictures


def _find_row(run: WatchedRun, request: Request) -> tuple[GroupRow, Lane]:
    lane = LANES.get(request.path_params["lane"])
    ticket = request.path_params["ticket"]
    if lane is None:
        raise HTTPException(404)
    row = run.index.get(ticket, lane)
    if row is None:
        raise _no_row(run, ticket, lane)
    return row, lane


def _no_row(run: WatchedRun, ticket: int, lane: Lane) -> HTTPException:
    """Says of a ticket that nothing is known of whether it may come, and when."""
    index = run.index
    kind = "evaluation ticket" if lane is Lane.EVAL else "ticket"
    newest = max((number for number in index.groups[lane] if not is_demonstration(number)), default=-1)
    so_far = f"the newest is {newest:,}" if newest >= 0 else "there is none yet"
    if not run.may_change:
        state = f"{so_far}, and the run does not go on" if newest >= 0 else "nothing is left of its groups"
        return HTTPException(404, f"The run has no {kind} {ticket} that anything is known of: {state}.")
    if not index.is_complete:
        return NotYet(f"The run's streams are still being read; {kind} {ticket} may be among what is left.")
    if index.has_forgotten(ticket, lane):
        return HTTPException(404, f"{kind.capitalize()} {ticket} is too old: it is not kept in memory.")
    if lane is Lane.EVAL or run.config is None:
        return NotYet(f"{kind.capitalize()} {ticket} is not issued yet: {so_far}.")
    trainer = run.config.trainer
    step = ticket // trainer.groups_per_step
    when = f"with {trainer.groups_per_step:,} groups a step it comes about step {step:,}"
    if step >= trainer.steps:
        when = (
            f"it will hardly come, for the run ends about ticket {trainer.steps * trainer.groups_per_step:,}"
        )
    return NotYet(f"Ticket {ticket} is not issued yet: {so_far}, at step {len(index.steps):,}; {when}.")


async def _trajectory(run: WatchedRun, request: Request) -> Trajectory:
    row, lane = _find_row(run, request)
    for trajectory in await read_trajectories(history_of(run), row.ticket, lane, row.trajectories):
        if trajectory.index == request.path_params["index"]:
            return trajectory
    raise HTTPException(404, f"Ticket {row.ticket} has no completion {request.path_params['index']}.")


class ShownToken(NamedTuple):
    text: Markup
    kinds: str
    """CSS classes: how likely it was, how old, and whether it was trained."""
    begins: str
    """The version that begins with it; empty where the one before goes on."""
    tip: str
    """Shown while the mouse is over it."""


def shown_tokens(
    segment: Segment, texts: TokenTexts, step: int, first: int, count: int, is_sampled: bool = True
) -> Iterator[ShownToken]:
    """Tokens `first` to `first + count` of a segment's completion, which no version has sampled where it is a
    demonstration. Ages are those at `step`, unless it is negative."""
    ids = segment.completion_ids.tolist()
    stop = min(first + count, len(ids))
    pieces = texts.pieces(ids, first, stop)
    turns = {at: number for number, turn in enumerate(segment.turns) for at in range(turn.first, turn.end)}
    begins = {begin: version for version, begin in segment.spans}
    version = next((version for version, begin in reversed(segment.spans) if begin <= first), 0)
    for at in range(first, stop):
        version = begins.get(at, version)
        logprob = float(segment.logprobs[at])
        is_known = math.isfinite(logprob)
        is_trained = bool(segment.mask[at])
        probability = math.exp(logprob) if is_known else 1.0
        level = sum(probability < least for least in LIKELY)
        # The version of a demonstration is a placeholder.
        has_age = step >= 0 and is_sampled
        age = max(0, step - version) if has_age else 0
        kinds = f"t l{level} v{min(OLDEST, age)} {'trained' if is_trained else 'untrained'}"
        begins_version = at == first == 0 or at in begins
        if not is_sampled:
            origin = "the demonstration's"
            begins_version = False
        elif segment.turns and at not in turns:
            kinds = f"{kinds} environment"
            origin = "the environment's"
        else:
            likely = f"{logprob:.3f} ({100 * probability:.3g} %)".replace("-", "\u2212")
            origin = f"turn {turns[at]} · " if segment.turns else ""
            origin += f"logprob {likely if is_known else 'unknown'} · version {version}"
            origin += f", {plural(age, 'step')} old" if has_age else ""
        piece = pieces[at - first] if pieces is not None else str(ids[at])
        if not piece:
            origin += " · a part of the character that a later token ends"
        markup = visible(piece) if piece else Markup("\u2060")  # no width, but it can be pointed at
        yield ShownToken(
            markup.replace("\n", Markup('<span class="nl">⏎</span>\n')),
            kinds if pieces is not None else f"{kinds} id",
            str(version) if begins_version else "",
            f"token {at} · id {ids[at]} · {origin}{'' if is_trained else ' · not trained'}",
        )


def _row_tree(row: GroupRow) -> dict[str, Any]:
    rewards = row.rewards
    lengths = row.lengths
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
    record = await read_group(history_of(run), row.ticket, lane, row.places)
    kind = "eval-group" if lane is Lane.EVAL else "group"
    return json_file(f"{run.run_id}-{kind}-{row.ticket}", group_json(record))


ROUTES: dict[str, Page] = {
    "/run/{run}/groups": browser,
    "/run/{run}/groups.csv": groups_file,
    "/run/{run}/groups.json": groups_file,
    "/run/{run}/{lane}/{ticket:int}": group,
    "/run/{run}/{lane}/{ticket:int}.json": whole_group,
    "/run/{run}/{lane}/{ticket:int}/pictures/{digest}.png": picture,
    "/run/{run}/{lane}/{ticket:int}/{index:int}/tokens": tokens,
    "/run/{run}/{lane}/{ticket:int}/{index:int}/text": text,
}
