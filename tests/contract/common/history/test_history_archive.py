"""A run's history where the archive has a part of it: one stream, whoever holds which entry."""

import dataclasses
import math

import pytest

from tests.support.archives import STREAM, archive, fill, raw, run_folder, scanned
from tests.support.letters import make_ticket
from tests.support.numbered import append_numbered
from tests.support.trajectories import make_commit
from tidemill.common.archive.manifest import Manifest
from tidemill.common.history import ALL, History, Record, Selection, StreamName
from tidemill.common.streams import append, id_after, trim_before
from tidemill.common.wire.messages import Score, ScoreStatus
from tidemill.services.console.records.joins import read_group

SELECTIONS = {
    "all": ALL,
    "a ticket": Selection(tickets=(7, 7)),
    "tickets and an index": Selection(tickets=(3, None), index=1),
    "steps": Selection(steps=(1, 2)),
    "times": Selection(times=(1003.5, 1011.0)),
    "versions": Selection(versions=(0, 0)),
    "no version": Selection(versions=(1, None)),
    "no such worker": Selection(worker="nobody"),
    "a reward, which trajectories have not": Selection(rewards=(0, 1)),
    "an endless range": Selection(tickets=(-math.inf, math.inf)),
}


@pytest.mark.parametrize("archived_share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("is_trimmed", [False, True])
async def test_every_selection_finds_the_same_wherever_the_entries_are(
    broker, keys, tmp_path, archived_share, is_trimmed
):
    key, run_dir = keys.trajectories(), run_folder(tmp_path, keys)
    await fill(broker, key, range(14))
    entries = await raw(broker, key)
    alone = History(keys.run_id, None, broker)
    selections = SELECTIONS | {
        "ids": Selection(first_id=entries[5][0], last_id=entries[30][0]),
        "one id": Selection(first_id=entries[8][0], last_id=entries[8][0]),
        "ids and an index": Selection(first_id=entries[5][0], index=0),
    }
    expected = {name: await scanned(alone, STREAM, chosen) for name, chosen in selections.items()}
    assert len(expected["all"]) == len(entries) and len(expected["ids"]) == 26
    if archived_share:
        until = entries[int(archived_share * (len(entries) - 1))][0]
        await archive(broker, keys, run_dir, until=until, segment_bytes=900)
        if is_trimmed:
            await trim_before(broker, key, id_after(until))
    history = History(keys.run_id, run_dir, broker)
    for name, chosen in selections.items():
        assert await scanned(history, STREAM, chosen) == expected[name], name
        assert await scanned(history, STREAM, chosen, newest_first=True) == expected[name][::-1], name
    if archived_share == 1.0:
        assert await scanned(History(keys.run_id, run_dir, None)) == expected["all"]


async def test_a_scan_misses_nothing_that_is_archived_and_trimmed_while_it_reads(broker, keys, tmp_path):
    key, run_dir = keys.trajectories(), run_folder(tmp_path, keys)
    await fill(broker, key, range(300), garbled=False)
    entries = await raw(broker, key)
    for newest_first in (False, True):
        history, seen = History(keys.run_id, run_dir, broker), []
        async for record in history.scan(STREAM, newest_first=newest_first):
            seen.append(record.entry_id)
            if len(seen) == 100:  # within the first batch that was read of Redis
                last = entries[450 if newest_first else 550][0]
                await archive(broker, keys, run_dir, until=last, segment_bytes=20_000)
                await trim_before(broker, key, last)
        expected = [entry_id for entry_id, _ in entries]
        assert seen == (expected[::-1] if newest_first else expected)


async def test_a_read_of_redis_that_comes_after_a_trim_is_made_good_by_the_archive(broker, keys, tmp_path):
    """Between the look into the manifest and the read of Redis, entries move from one to the other."""
    key, run_dir = keys.trajectories(), run_folder(tmp_path, keys)
    await fill(broker, key, range(20))
    entries = await raw(broker, key)

    class Overtaken(History):
        async def _read(self, stream: StreamName, selection: Selection) -> list[Record]:
            await archive(broker, keys, run_dir, until=entries[30][0])
            await trim_before(broker, key, entries[30][0])
            return await super()._read(stream, selection)

    found = await scanned(Overtaken(keys.run_id, run_dir, broker))
    assert [record.entry_id for record in found] == [entry_id for entry_id, _ in entries]


async def test_scores_are_selected_by_the_steps_of_their_tickets(broker, keys, tmp_path):
    run_dir = run_folder(tmp_path, keys)
    made = [make_ticket(t, step=t // 2, group_size=1) for t in range(8)]
    await append_numbered(broker, keys.prompts(), enumerate(made))
    scores = (Score(ticket=t, index=0, status=ScoreStatus.OK, value=t) for t in range(8))
    await append(broker, keys.scores(), *scores)
    commits = [make_commit(s, groups=(2 * s, 2 * s + 1)) for s in range(4)]
    await append_numbered(broker, keys.commits, enumerate(commits))
    for stream in StreamName:
        await archive(broker, keys, run_dir, stream, segment_bytes=300)
        assert Manifest.load(run_dir / "archive" / stream.replace(":", "-")).entries in (0, 4, 8)
    for history in (History(keys.run_id, run_dir, None), History(keys.run_id, None, broker)):
        for selection in (Selection(steps=(1, 2)), Selection(rewards=(2, 5))):
            found = await scanned(history, StreamName.SCORES, selection)
            assert [record.message.ticket for record in found] == [2, 3, 4, 5]
        assert await history.ticket(5) == made[5]
        assert await history.commit(2) == commits[2] == await history.commit_of_ticket(4)
        assert await history.commit_of_ticket(9) is None and await history.commit(7) is None
        assert [s.reward for s in (await read_group(history, 6)).samples] == [6.0]


async def test_a_summary_says_what_is_where(redis_server, broker, keys, tmp_path):
    key, run_dir = keys.trajectories(), run_folder(tmp_path, keys)
    await fill(broker, key, range(10), garbled=False)
    entries = await raw(broker, key)
    await archive(broker, keys, run_dir, until=entries[11][0])
    await trim_before(broker, key, entries[6][0])
    (found,) = await History(keys.run_id, run_dir, broker).summary([STREAM])
    assert (found.redis_entries, found.archived_entries, found.entries) == (14, 12, 20)
    assert (found.first_id, found.last_id) == (entries[0][0], entries[-1][0])
    assert (found.first_time, found.last_time) == (1000.0, 1009.0)
    assert found.redis_bytes > 0 and found.archived_bytes > 0 and found.segments > 0
    async with History.open(run_dir, redis_server.url) as opened:
        assert await opened.summary([STREAM]) == [found]
    (alone,) = await History(keys.run_id, run_dir, None).summary([STREAM])
    assert (alone.entries, alone.last_id, alone.last_time) == (12, entries[11][0], 1005.0)
    empty = await History(keys.run_id, None, None).summary()
    assert [dataclasses.astuple(one)[1:7] for one in empty] == [(0,) * 6] * len(StreamName)
