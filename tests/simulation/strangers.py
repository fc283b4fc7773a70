"""Entries that no service of the run has written, as by hand or by a broken worker."""

import random

import numpy as np

from tests.simulation.reward import text_of_tokens
from tests.simulation.world import World
from tidemill.common.wire import codec
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Message, Score, ScoreStatus, Ticket, Trajectory


def write(world: World, stream: str, content: str, rng: random.Random) -> bool:
    """Append one entry under an id of the server's; False where there is nothing to make it of.

    `garbage` and `text` cannot be decoded, `copied` has the bytes of an entry of the stream. The others are
    trajectories of a ticket in flight: `future` and `ahead` of versions that are not there yet, `twin` of the
    oldest allowed one, `old` of one before it, `nan` with logprobs that are no numbers; `nan_score` is a
    score without a finite value.
    """
    fields = _fields(world, stream, content, rng)
    if fields is None:
        return False
    key = world.keys._key(stream) if ":eval" not in stream else f"{world.keys._key(stream[:-5])}:eval"
    world.history.is_foreign_now = True
    try:
        flat = [word for pair in fields.items() for word in pair]
        world.cluster.server.apply([[b"XADD", key.encode(), b"*", *flat]])
    finally:
        world.history.is_foreign_now = False
    return True


def _fields(world: World, stream: str, content: str, rng: random.Random) -> dict[bytes, bytes] | None:
    if content == "garbage":
        return {b"v": b"1.0", b"p": rng.randbytes(20)}
    if content == "text":
        return {b"hello": b"world"}
    if content == "copied":
        records = [record for record in world.history.of(stream) if not record.is_foreign]
        return dict(rng.choice(records[-4:]).fields) if records else None
    message = _poison(world, content, rng)
    return None if message is None else codec.encode(message)


def _poison(world: World, content: str, rng: random.Random) -> Message | None:
    """A message for a ticket that was issued lately."""
    tickets = [record for record in world.history.of("prompts") if not record.is_foreign]
    if not tickets:
        return None
    ticket = codec.decode(rng.choice(tickets[-4:]).fields, Ticket)
    if content in ("old", "ahead"):
        ticket = codec.decode(tickets[-1].fields, Ticket)
    index = rng.randrange(ticket.group_size)
    if content == "nan_score":
        return Score.model_construct(
            ticket=ticket.ticket, index=index, status=ScoreStatus.OK, value=float("nan")
        )
    num_commits = len(world.history.of("commits"))
    versions = {"future": num_commits + 3, "ahead": num_commits + 2, "twin": ticket.min_version}
    version = versions.get(content, max(0, ticket.min_version - 1))
    ids = np.array([rng.randrange(32) for _ in range(4)], np.int32)
    return Trajectory(
        ticket=ticket.ticket,
        index=index,
        step=ticket.step,
        group_size=ticket.group_size,
        prompt_ids=ticket.prompt_ids,
        prompt_text=ticket.prompt_text,
        data_source=ticket.data_source,
        ground_truth=ticket.ground_truth,
        extra=ticket.extra,
        completion_ids=ids,
        logprobs=np.full(4, np.nan if content == "nan" else -1.0, np.float32),
        spans=((version, 0),),
        finish="stop",
        text=text_of_tokens(ids),
        worker="stranger",
        started_at=0.0,
        finished_at=0.0,
    )


__all__ = ["Keys", "write"]
