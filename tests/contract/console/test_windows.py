"""Where the entries of a ticket lie in a long stream."""

from collections.abc import Iterable

import numpy as np
import pytest

from tests.support.numbered import append_numbered
from tests.support.trajectories import make_trajectory
from tidemill.common.history import History, StreamName
from tidemill.common.redis.broker import Broker
from tidemill.common.wire import codec
from tidemill.common.wire.codec import SCHEMA
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, SamplingParams, Score, ScoreStatus, Ticket
from tidemill.services.console.records.joins import CLOCK_SPARE_S, near_tickets, read_group

NUM_TICKETS, BEGIN_S, STEP_S = 40, 1_700_000_000, 60


def ms_of(ticket: int) -> int:
    """When its entries are appended; it was issued 20 s before, and is trained 20 s after."""
    return 1000 * (BEGIN_S + ticket * STEP_S)


async def write(broker: Broker, keys: Keys, times_ms: Iterable[int]) -> None:
    """A ticket of one sample for each step."""
    tickets = [
        Ticket(ticket=n, step=n, min_version=n, group_size=1, prompt_ids=np.arange(2, dtype=np.int32),
               sampling=SamplingParams(max_tokens=8), issued_at=ms_of(n) / 1000 - 20)
        for n in range(NUM_TICKETS)
    ]  # fmt: skip
    commits = [
        Commit(
            step=n, version=n + 1, groups=(n,), mini_batches=((((n, 0),),),), finished_at=ms_of(n) / 1000 + 20
        )
        for n in range(NUM_TICKETS)
    ]
    await append_numbered(broker, keys.prompts(), enumerate(tickets))
    await append_numbered(broker, keys.commits, enumerate(commits))
    for ms, n in sorted(zip(times_ms, range(NUM_TICKETS), strict=True)):
        score = Score(ticket=n, index=0, status=ScoreStatus.OK, value=1.0)
        for key, message in (
            (keys.trajectories(), make_trajectory(n, 0, group_size=1)),
            (keys.scores(), score),
        ):
            payload = codec.encode_payload(message)
            await broker.execute("XADD", key, f"{ms}-0", "v", SCHEMA, "p", payload)


@pytest.mark.parametrize("ticket", [0, 7, NUM_TICKETS - 1])
async def test_a_window_holds_the_ticket_and_little_else(broker, keys, ticket):
    await write(broker, keys, map(ms_of, range(NUM_TICKETS)))
    history = History(keys.run_id, None, broker)
    near = await near_tickets(history, ticket, ticket, commit=await history.commit(ticket))
    for stream in (StreamName.TRAJECTORIES, StreamName.SCORES):
        entries = await broker.execute("XRANGE", stream.key(keys), near.first_id, near.last_id)
        assert f"{ms_of(ticket)}-0".encode() in dict(entries)
        assert len(entries) <= 1 + 2 * (1 + CLOCK_SPARE_S // STEP_S)
    in_flight = await near_tickets(history, ticket, ticket)
    assert (in_flight.first_id, in_flight.last_id) == (near.first_id, "+")


async def test_a_group_is_found_wherever_it_lies(broker, keys):
    """Its entries have the times of a clock that is wrong."""
    times_ms = [ms_of(n) for n in range(NUM_TICKETS)]
    times_ms[2] = ms_of(10**4)
    await write(broker, keys, times_ms)
    group = await read_group(History(keys.run_id, None, broker), 2)
    assert group.is_trained and group.is_whole
