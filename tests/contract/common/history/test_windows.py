"""Where the entries of a ticket lie in a long stream."""

import numpy as np
import pytest

from tests.support.trajectories import make_trajectory
from tidemill.common.history import History, StreamName
from tidemill.common.history.records import read_group
from tidemill.common.history.windows import near_tickets
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import append_numbered
from tidemill.common.streams.entries import id_order
from tidemill.common.wire import codec
from tidemill.common.wire.codec import SCHEMA
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, SamplingParams, Score, ScoreStatus, Ticket

STEPS, GROUPS = 200, 4
FAR = 10 * (STEPS + 1) * GROUPS


async def write(broker: Broker, keys: Keys, places: dict[int, int]) -> None:
    """Tickets of one sample; one every ten milliseconds, or where `places` has it."""
    ids = np.arange(2, dtype=np.int32)
    tickets = [
        Ticket(ticket=n, step=n // GROUPS, min_version=max(0, n // GROUPS - 1), group_size=1, prompt_ids=ids,
               sampling=SamplingParams(max_tokens=8))
        for n in range(STEPS * GROUPS)
    ]  # fmt: skip
    await append_numbered(broker, keys.prompts(), [(t.ticket, t) for t in tickets])
    commits = [
        Commit(step=s, version=s + 1, groups=tuple(range(s * GROUPS, (s + 1) * GROUPS)),
               mini_batches=((tuple((n, 0) for n in range(s * GROUPS, (s + 1) * GROUPS)),),))
        for s in range(STEPS)
    ]  # fmt: skip
    await append_numbered(broker, keys.commits, [(c.step, c) for c in commits])
    entries = sorted((places.get(n, 10 * n + 1), n) for n in range(STEPS * GROUPS))
    for key, make in (
        (keys.trajectories(), lambda n: make_trajectory(n, 0, group_size=1)),
        (keys.scores(), lambda n: Score(ticket=n, index=0, status=ScoreStatus.OK, value=1.0)),
    ):
        commands = [
            ("XADD", key, f"{ms}-0", "v", SCHEMA, "p", codec.encode_payload(make(n))) for ms, n in entries
        ]
        await broker.pipeline(commands)


@pytest.mark.parametrize("ticket", [0, 3, 401, STEPS * GROUPS - 1])
async def test_a_window_holds_the_ticket_and_little_else(broker, keys, ticket):
    await write(broker, keys, {})
    for stream in (StreamName.TRAJECTORIES, StreamName.SCORES):
        near = await near_tickets(History(keys.run_id, None, broker), stream, ticket, ticket)
        assert near.has_id(f"{10 * ticket + 1}-0")
        entries = await broker.execute("XRANGE", stream.key(keys), near.first_id, near.last_id)
        assert len(entries) <= 2 * (4 * 2 * GROUPS + 64) + 8


async def test_copies_that_come_late_mislead_nobody(broker, keys):
    await write(broker, keys, {})
    for number in (5, 6, 7):
        copy = codec.encode_payload(make_trajectory(number, 0, group_size=1))
        await broker.execute("XADD", keys.trajectories(), f"{FAR + number}-0", "v", SCHEMA, "p", copy)
    history = History(keys.run_id, None, broker)
    near = await near_tickets(history, StreamName.TRAJECTORIES, 790, 790)
    assert id_order(near.first_id) < id_order("7901-0") and near.has_id("7901-0")


async def test_a_trained_group_is_found_wherever_it_lies(broker, keys):
    await write(broker, keys, {2: FAR})
    group = await read_group(History(keys.run_id, None, broker), 2)
    assert group.is_trained and group.is_whole
