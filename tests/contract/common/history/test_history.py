"""A run's history, as its readers see it: one stream, in order, selected."""

import pytest

from tests.support.numbered import append_numbered
from tests.support.trajectories import make_trajectory
from tidemill.common.history import History, Selection, StreamName
from tidemill.common.history.records import read_group
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Entry, append
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, Score, ScoreStatus


def score(ticket: int, index: int, value: float) -> Score:
    return Score(ticket=ticket, index=index, status=ScoreStatus.OK, value=value)


@pytest.fixture
async def history(broker: Broker, keys: Keys) -> History:
    made = [make_trajectory(ticket, index) for ticket in range(4) for index in (1, 0, 1)]
    await append(broker, keys.trajectories(), *made)
    await append(broker, keys.scores(), *(score(t, 0, float(t)) for t in range(4)))
    groups = [(0, 1), (2, 3)]
    commits = [
        (step, Commit(step=step, version=step + 1, mini_batches=(), groups=groups[step])) for step in (0, 1)
    ]
    await append_numbered(broker, keys.commits, commits)
    return History(keys.run_id, None, broker)


async def found(history: History, stream: StreamName, selection: Selection) -> list[int]:
    records = [record async for record in history.scan(stream, selection)]
    return [record.message.ticket for record in records if isinstance(record, Entry)]  # type: ignore[attr-defined]


async def test_a_ticket_has_the_first_trajectory_of_each_index(history: History) -> None:
    group = await read_group(history, 2)
    assert [s.trajectory.key for s in group.samples if s.trajectory] == [(2, 0), (2, 1)]


async def test_a_selection_by_ticket_and_by_reward(history: History) -> None:
    assert await found(history, StreamName.SCORES, Selection(rewards=(1.5, None))) == [2, 3]
    assert await found(history, StreamName.TRAJECTORIES, Selection(tickets=(1, 2), index=0)) == [1, 2]


async def test_a_commit_is_found_by_step_and_by_ticket(history: History) -> None:
    by_step, by_ticket = await history.commit(1), await history.commit_of_ticket(3)
    assert by_step is not None and by_step == by_ticket
    assert await history.commit(7) is None
