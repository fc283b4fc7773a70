"""Groups are read forward, once, as the trainer took them in, and no more are held than can be open."""

import pytest

from tests.support.training import make_score
from tests.support.trajectories import make_trajectory
from tidemill.common.history import GroupCursor, History, MissingRecordsError, StreamName
from tidemill.common.history import groups as groups_module
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import append, id_after, id_before
from tidemill.common.wire.keys import Keys

SIZE = 2


async def publish(broker: Broker, keys: Keys, *samples: tuple[int, int, float]) -> list[str]:
    """Trajectories and scores, in this order; the reward is also the text. Ids of the trajectories."""
    trajectories = [make_trajectory(t, i, text=str(value), group_size=SIZE) for t, i, value in samples]
    await append(broker, keys.scores(), *(make_score(t, i, value) for t, i, value in samples))
    return await append(broker, keys.trajectories(), *trajectories)


def cursor_of(broker: Broker, keys: Keys, **options: object) -> GroupCursor:
    return GroupCursor(History(keys.run_id, None, broker), SIZE, 4, **options)


async def test_the_first_entry_of_a_key_counts_in_the_order_of_the_stream(broker, keys):
    await publish(broker, keys, (0, 1, 1.0), (0, 1, 9.0), (7, 0, 5.0), (0, 0, 2.0), (0, 0, 9.0))
    async with cursor_of(broker, keys) as cursor:
        group = (await cursor.groups([0]))[0]
    assert [(index, t.text) for index, t in group.trajectories.items()] == [(1, "1.0"), (0, "2.0")]
    assert [(index, score.value) for index, score in group.scores.items()] == [(1, 1.0), (0, 2.0)]


async def test_what_is_read_on_the_way_is_kept_where_it_is_wanted_and_not_closed(broker, keys):
    samples = [(0, 0, 1.0), (1, 0, 1.0), (1, 1, 2.0), (3, 0, 1.0), (0, 1, 4.0), (0, 0, 7.0), (2, 0, 1.0)]
    await publish(broker, keys, *samples, (2, 1, 1.0))
    async with cursor_of(broker, keys, is_wanted=lambda ticket: ticket != 3) as cursor:
        for ticket in (0, 1):
            assert len((await cursor.groups([ticket]))[ticket].scores) == SIZE
            cursor.close([ticket])
        await cursor.groups([2])
        assert list(cursor.open) == [2]


async def test_reading_starts_after_a_position(broker, keys):
    ids = await publish(broker, keys, (0, 0, 1.0), (0, 0, 2.0), (0, 1, 3.0))
    async with cursor_of(broker, keys, positions={StreamName.TRAJECTORIES: ids[0]}) as cursor:
        assert [t.text for t in (await cursor.groups([0]))[0].trajectories.values()] == ["2.0", "3.0"]
    async with cursor_of(broker, keys, positions={StreamName.TRAJECTORIES: id_before(ids[0])}) as cursor:
        assert (await cursor.groups([0]))[0].trajectories[0].text == "1.0"


async def test_a_group_is_as_large_as_its_trajectories_say(broker, keys):
    """Of a run whose sources have groups of 1 and of 2."""
    await append(broker, keys.trajectories(), make_trajectory(0, 0, group_size=1))
    await append(broker, keys.scores(), make_score(0, 0, 1.0))
    await publish(broker, keys, (1, 0, 1.0))
    async with cursor_of(broker, keys) as cursor:
        assert len((await cursor.groups([0]))[0].scores) == 1
        with pytest.raises(MissingRecordsError):
            await cursor.groups([1])


async def test_a_group_that_is_not_whole_is_named(broker, keys):
    await publish(broker, keys, (0, 0, 1.0), (1, 0, 1.0), (1, 1, 1.0))
    async with cursor_of(broker, keys) as cursor:
        with pytest.raises(MissingRecordsError, match=r"1 ticket\(s\), the first is 0") as raised:
            await cursor.groups([0, 1])
    assert raised.value.tickets == (0,)


async def test_the_search_for_what_is_gone_ends_before_all_is_in_memory(broker, keys, monkeypatch):
    monkeypatch.setattr(groups_module, "SPARE_TICKETS", 0)
    await publish(broker, keys, *((ticket, index, 1.0) for ticket in range(1, 60) for index in range(SIZE)))
    async with cursor_of(broker, keys) as cursor:
        with pytest.raises(MissingRecordsError):
            await cursor.groups([0])
        assert len(cursor.open) == 2 * 4 + 1
        cursor.close([0])
        for ticket in range(1, 60):
            assert len((await cursor.groups([ticket]))[ticket].trajectories) == SIZE, "what follows is there"
            cursor.close([ticket])


def test_the_id_after_another_undoes_the_one_before():
    for entry_id in ("1-0", "7-3", f"6-{2**64 - 1}"):
        assert id_after(id_before(entry_id)) == entry_id
        assert id_before(id_after(entry_id)) == entry_id
    assert (id_before("5-0"), id_before("5-3"), id_before("0-0")) == (f"4-{2**64 - 1}", "5-2", "0-0")
