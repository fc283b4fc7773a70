"""Recorded trajectories enter a sandbox once, in order, not before their time, and not more than may wait."""

import asyncio
import io
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rich.console import Console

from tests.support.recorded_sessions import as_session
from tests.support.trajectories import make_config, make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.errors import ConfigError
from tidemill.common.history import ALL, History
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Entry, append, append_dead_letter, dead_letter, id_order, read_range
from tidemill.common.streams.code_errors import CodeErrors
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Score, ScoreStatus, Trajectory
from tidemill.services.console.compare.emission import MAX_BACKLOG, Emission, progress_text, shown

SPACING_MS = 100


class Recorded(History):
    """A history of trajectories that were published at known times."""

    def __init__(self, trajectories: list[Trajectory]) -> None:
        super().__init__("recorded", None, None)
        self._trajectories = trajectories

    async def scan(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
        for number, trajectory in enumerate(self._trajectories):
            yield Entry(f"{1_000_000 + SPACING_MS * number}-0", trajectory)


async def emitted(broker: Broker, keys: Keys) -> list[Entry[Trajectory]]:
    entries = await read_range(broker, keys.trajectories(), Trajectory)
    return [entry for entry in entries if isinstance(entry, Entry)]


async def score(broker: Broker, keys: Keys, *tickets: int) -> None:
    scores = [Score(ticket=ticket, index=0, status=ScoreStatus.OK, value=1.0) for ticket in tickets]
    await append(broker, keys.scores(), *scores)


def nothing(_: Emission) -> None:
    pass


async def test_at_the_recorded_pace_trajectories_keep_their_distances(broker: Broker, keys: Keys) -> None:
    recorded = [make_trajectory(0), *(as_session(make_trajectory(ticket)) for ticket in (1, 2, 3))]
    history = Recorded(recorded)
    emission = Emission(broker, keys, history, ALL, keeps_pace=True)
    await score(broker, keys, 0, 1, 2, 3)  # before they are asked for, which must not be taken for an answer
    running = asyncio.create_task(emission.run(nothing))
    await wait_until(lambda: emission.is_complete)
    await score(broker, keys, 0, 1, 2, 3)
    await running
    entries = await emitted(broker, keys)
    assert [entry.message for entry in entries] == recorded, "sessions with all that was said in them"
    times_ms = [id_order(entry.entry_id)[0] for entry in entries]
    # From the start, which the first one may miss, and less what clocks round away.
    assert times_ms[-1] - 1000 * emission.started_at >= 3 * SPACING_MS - 2
    assert (emission.emitted, len(emission.scores)) == (4, 4)


async def test_no_more_wait_for_a_score_than_may_and_each_key_goes_in_once(broker, keys):
    num_keys = MAX_BACKLOG + 600
    history = Recorded([make_trajectory(ticket % num_keys) for ticket in range(num_keys + 300)])
    emission = Emission(broker, keys, history, ALL)
    running = asyncio.create_task(emission.run(nothing))
    await wait_until(lambda: emission.emitted == MAX_BACKLOG)
    await asyncio.sleep(0.1)
    assert emission.emitted == MAX_BACKLOG
    await score(broker, keys, *range(num_keys))
    await running
    assert (emission.emitted, len(emission.scores)) == (num_keys, num_keys)


async def test_what_is_dead_lettered_has_failed_and_is_waited_for_no_longer(broker, keys):
    group = [make_trajectory(0, index=index, group_size=2) for index in range(2)]
    emission = Emission(broker, keys, Recorded([*group, make_trajectory(1)]), ALL)
    running = asyncio.create_task(emission.run(nothing))
    await wait_until(lambda: emission.is_complete)
    first = (await emitted(broker, keys))[0].entry_id
    letter = dead_letter(keys.name_of(keys.trajectories()), first, {}, "the worker died", "reward")
    await append_dead_letter(broker, keys.dead, letter)
    await score(broker, keys, 1)
    await running
    results = {key: (score.status, score.error) for key, score in emission.scores.items()}
    failed = (ScoreStatus.FAILED, "the worker died")
    assert results == {(0, 0): failed, (0, 1): failed, (1, 0): (ScoreStatus.OK, "")}


async def test_code_that_always_fails_ends_it_with_the_reason_after_as_many_scores_as_a_run(broker, keys):
    reason = "KeyError: 'score' (my.py, line 4)"
    history = Recorded([make_trajectory(ticket) for ticket in range(8)])
    emission = Emission(broker, keys, history, ALL, code_errors=CodeErrors(make_config(), num_scores=4))
    console = Console(file=io.StringIO(), width=80)
    with shown(console) as progress:
        running = asyncio.create_task(emission.run(progress))
        await wait_until(lambda: emission.is_complete)
        for ticket in range(4):
            failed = Score(
                ticket=ticket, index=0, status=ScoreStatus.FAILED, error=reason, is_code_error=True
            )
            await append(broker, keys.scores(), failed)
        with pytest.raises(ConfigError, match=r"the last 4 scores failed.*KeyError.*then score again"):
            await asyncio.wait_for(running, 60)
    assert (emission.num_failed, emission.last_error) == (4, reason)
    assert f"4 of 8 scored, 2/s; 4 failed, the last one: {reason}" == progress_text(emission, 2.0)
