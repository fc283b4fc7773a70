"""A restarted trainer replays from the archive what Redis has let go of, and says first what is missing."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SERVERS
from tests.support.archives import STREAM, archive, fill, raw, scanned
from tests.support.training import commits_of, lose_tail, publish_group
from tests.support.whole_trainer import GROUPS, SIZE, crash_after_commit, run
from tidemill.common.archive import stream_folder
from tidemill.common.archive.archiver import archive_run
from tidemill.common.archive.manifest import OLD_MANIFEST, Manifest, is_needed, note_needed
from tidemill.common.errors import TidemillError
from tidemill.common.history import History, StreamName
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Mark, id_after, length, read_raw, trim_before
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.durable import checkpointing
from tidemill.services.trainer.durable.archived_history import ArchivedHistory
from tidemill.services.trainer.service import serve

pytestmark = pytest.mark.parametrize("redis_server", sorted(SERVERS)[:1], indirect=True)
TIGHT = {"trims": True, "archives": True, "checkpoint_every": 100}


async def crashed(make: Any, broker: Broker, keys: Keys) -> Path:
    """A run without a checkpoint whose trainer died when it had committed five steps."""
    context = make(**TIGHT)
    await crash_after_commit(context, 4)
    assert await length(broker, keys.trajectories()) <= 3 * GROUPS * SIZE, "of five steps, and one in flight"
    assert int((await read_raw(broker, keys.prompts(), count=1))[0][0].partition("-")[0]) > 2 * GROUPS
    return Path(context.run_dir)


async def test_steps_that_redis_let_go_of_are_replayed_from_the_archive(
    make, broker, keys, answers, archives_at_once, capfd
):
    await crashed(make, broker, keys)
    before = await commits_of(broker, keys)
    await run(make(**TIGHT))
    commits = await commits_of(broker, keys)
    assert commits[:5] == before and [commit.step for commit in commits] == list(range(6))
    trained = [key for commit in commits for key in commit.trained_keys]
    assert len(trained) == len(set(trained)) == 6 * GROUPS * SIZE
    output = capfd.readouterr().out
    assert output.count("step replayed, same weights") == 5 and "weights differ" not in output


async def test_commits_go_too_and_a_restart_reads_them_from_the_archive(
    make, broker, keys, answers, archives_at_once, monkeypatch
):
    monkeypatch.setattr(checkpointing, "KEPT_COMMITS", 1)
    context = make(**TIGHT)
    await crash_after_commit(context, 4)
    assert [commit.step for commit in await commits_of(broker, keys)] == [3, 4]
    await run(make(**TIGHT))
    history = History(keys.run_id, context.run_dir, broker)
    assert [c.step async for c in history.messages(StreamName.COMMITS, Commit)] == list(range(6))


async def test_a_run_that_begins_reads_no_history_and_one_that_goes_on_does(
    make, broker, keys, answers, archives_at_once, monkeypatch
):
    read = ArchivedHistory.read
    reads: list[str] = []

    def counted(archived: ArchivedHistory) -> History:
        reads.append("history")
        return read(archived)

    monkeypatch.setattr(ArchivedHistory, "read", counted)
    await crash_after_commit(make(**TIGHT), 1)
    assert not reads, "there was neither a ticket nor a commit"
    await run(make(**TIGHT))
    assert reads
    assert [commit.step for commit in await commits_of(broker, keys)] == list(range(6))


@pytest.mark.parametrize("stream", [StreamName.PROMPTS, StreamName.COMMITS])
async def test_a_run_begins_where_neither_redis_nor_the_archive_has_had_a_ticket_or_a_commit(
    make, broker, keys, stream
):
    context = make(**TIGHT)
    archived = ArchivedHistory(context)
    assert await archived.is_empty()
    await broker.execute("XADD", stream.key(keys), "1-0", "odd", b"x")
    assert not await archived.is_empty()
    await archive(broker, keys, context.run_dir, stream)
    await broker.execute("DEL", stream.key(keys))
    assert not await archived.is_empty(), "the archive has it"


async def test_an_archive_that_cannot_be_read_is_not_taken_for_an_empty_one(make, broker, keys):
    context = make(**TIGHT)
    folder = stream_folder(context.run_dir, StreamName.PROMPTS)
    folder.mkdir(parents=True)
    (folder / OLD_MANIFEST).touch()
    assert not await ArchivedHistory(context).is_empty()


@pytest.mark.parametrize("loss", ["the disk", "the last file", "a file in the middle", "bytes of a file"])
async def test_what_is_missing_is_said_before_anything_is_trained(
    make, broker, keys, answers, archives_at_once, monkeypatch, loss
):
    run_dir = await crashed(make, broker, keys)
    files = sorted(stream_folder(run_dir, STREAM).glob("*.parquet"))
    if loss == "the disk":
        shutil.rmtree(run_dir / "archive")
    elif loss == "bytes of a file":
        files[1].write_bytes(files[1].read_bytes()[:-9])
    else:
        files[-1 if loss == "the last file" else 1].unlink()
    trained: list[int] = []
    monkeypatch.setattr(
        "tidemill.services.trainer.step.StepRunner.replay",
        lambda *_: trained.append(1) or pytest.fail("trained"),
    )
    with pytest.raises(TidemillError, match=r"(?s)steps 0 to 4 .*trajectories.*Restore .*archive"):
        await serve(make(**TIGHT))
    assert not trained and [commit.step for commit in await commits_of(broker, keys)] == list(range(5))


async def mark_of(broker: Broker, keys: Keys) -> Mark:
    mark = Mark(keys.state, "trimming", b'"m"')
    await broker.execute("HSET", mark.key, mark.field, mark.value)
    return mark


@pytest.mark.parametrize("is_trimmed", [False, True])
async def test_a_starting_trainer_has_the_archive_forget_what_redis_has_lost_above_its_checkpoint(
    make, broker, keys, is_trimmed
):
    """Seven entries, six of them archived; the checkpoint had settled the first two, and Redis loses all but
    four. Both kinds of what it then holds of them: entries that stand, and a trim that stands."""
    context = make(**TIGHT)
    await fill(broker, keys.trajectories(), range(4), garbled=False)
    entries = await raw(broker, keys.trajectories())
    await archive(broker, keys, context.run_dir, segment_bytes=1, until=entries[5][0])
    if is_trimmed:
        mark = await mark_of(broker, keys)
        await trim_before(broker, keys.trajectories(), id_after(entries[3][0]), mark)
    await lose_tail(broker, keys.trajectories(), entries[3][0])
    archived = ArchivedHistory(context)
    assert await archived.align({STREAM: entries[1][0]})
    assert Manifest.load(stream_folder(context.run_dir, STREAM)).last_id == entries[3][0]
    await publish_group(broker, keys, 9)
    await archive(broker, keys, context.run_dir)
    records = await scanned(History(keys.run_id, context.run_dir, None))
    ids = [record.entry_id for record in records]
    assert ids[:4] == [entry_id for entry_id, _ in entries[:4]] and len(ids) == 6
    assert not await archived.missing({STREAM: entries[1][0]})


async def test_a_run_without_an_archive_needs_nothing_that_writes_one(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "tidemill.common.archive.archiver", None)
    assert await ArchivedHistory(make()).align()


async def test_a_trainer_that_goes_on_keeps_what_it_settled_and_new_entries_come_after_it(make, broker, keys):
    """Two entries that Redis has lost stay archived; the next ids are above theirs, whatever the time is."""
    context = make(**TIGHT)
    future = 1 << 42
    for number in range(4):
        await broker.execute("XADD", keys.trajectories(), f"{future + number}-0", "odd", b"x")
    await archive(broker, keys, context.run_dir, segment_bytes=1)
    await lose_tail(broker, keys.trajectories(), f"{future + 1}-0")
    assert await ArchivedHistory(context).align()
    assert Manifest.load(stream_folder(context.run_dir, STREAM)).last_id == f"{future + 3}-0"
    await publish_group(broker, keys, 0, size=1)
    assert (await raw(broker, keys.trajectories()))[-1][0] == f"{future + 3}-1"


async def test_entries_that_came_where_the_archive_is_already_are_archived_after_it_has_given_way(
    make, broker, keys
):
    context = make(**TIGHT)
    await fill(broker, keys.trajectories(), range(3), garbled=False)
    entries = await raw(broker, keys.trajectories())
    await archive(broker, keys, context.run_dir)
    await lose_tail(broker, keys.trajectories(), entries[2][0])
    await broker.execute("XADD", keys.trajectories(), entries[3][0], "other", b"y")
    assert await ArchivedHistory(context).align()
    assert Manifest.load(stream_folder(context.run_dir, STREAM)).last_id == entries[2][0]
    assert await archive(broker, keys, context.run_dir) == 1


async def test_retention_leaves_what_a_restart_replays(make, broker, keys):
    context = make(**TIGHT)
    await fill(broker, keys.trajectories(), range(6), garbled=False)
    await archive(broker, keys, context.run_dir, segment_bytes=1)
    folder = stream_folder(context.run_dir, STREAM)
    segments = Manifest.load(folder).segments
    note_needed(folder, segments[4].first_id)
    assert [is_needed(folder, segment) for segment in segments] == [False] * 4 + [True] * 8
    config = context.config.streams.archive.model_copy(update={"keep_gb": 1e-9})
    await archive_run(broker, keys, context.run_dir, config, {StreamName.SCORES: "+"})
    assert Manifest.load(folder).segments == segments[4:]
