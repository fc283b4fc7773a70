"""The trainer trims what is archived, and nothing else; it waits for no archiver, and forgets the dead."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import SERVERS
from tests.support.archives import STREAM, archive, fill, raw, scanned
from tests.support.letters import make_ticket
from tests.support.training import answering, make_context, make_trimmer, trainer_config
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tidemill.common.archive import stream_folder
from tidemill.common.archive.archiver import check, cut_back, writing
from tidemill.common.archive.manifest import Manifest, _read_details
from tidemill.common.history import History, StreamName
from tidemill.common.process.heartbeats import Heartbeat, publish_heartbeat, read_heartbeats
from tidemill.common.process.service import ServiceContext
from tidemill.common.run.state import publish_config
from tidemill.common.store import ClaimStore
from tidemill.common.streams import append, ensure_group, id_after, length, memory_bytes, read_range
from tidemill.common.wire.choices import Rows
from tidemill.common.wire.keys import ROLLOUT_GROUP
from tidemill.common.wire.messages import Choices, Commit, Trajectory
from tidemill.services.trainer.durable import archive_requests
from tidemill.services.trainer.service import serve

ARCHIVE = {"enabled": True, "segment_mb": 0.02}
ONE_SERVER = pytest.mark.parametrize("redis_server", sorted(SERVERS)[:1], indirect=True)


@pytest.fixture
async def context(broker, keys, tmp_path, redis_server, monkeypatch):
    monkeypatch.setenv("TIDEMILL_REDIS_URL", redis_server.url)
    monkeypatch.setenv("TIDEMILL_RUNS_DIR", str(tmp_path))
    config = trainer_config(streams__archive=ARCHIVE)
    await publish_config(broker, keys, config)
    return make_context(broker, keys, config, tmp_path / keys.run_id)


def archived(context: ServiceContext, stream: StreamName = STREAM) -> Manifest:
    return Manifest.load(stream_folder(context.run_dir, stream))


@ONE_SERVER
async def test_payloads_beside_the_stream_fill_files_and_go_when_the_archiver_is_done(context, broker, keys):
    """Long after the checkpoint that asked for it; the entries themselves are far smaller than a file."""
    store = ClaimStore(context.run_dir, 1)
    context.config = trainer_config(streams__archive=ARCHIVE, streams__claim_check_bytes=1)
    context.run_dir.mkdir()
    samples = [make_trajectory(ticket, 0, text=f"{ticket:04}" * 500) for ticket in range(40)]
    await append(broker, keys.trajectories(), *map(store.check_in, samples))
    entries = await raw(broker, keys.trajectories())
    trimmer = make_trimmer(context)
    trimmer.first_ticket = 20
    await trimmer.release({STREAM: entries[30][0]}, 0)
    assert await length(broker, keys.trajectories()) == 40, "nothing goes before it is archived"
    await wait_until(lambda: len(list(store.folder.iterdir())) == 20)
    await trimmer.close()
    remaining = await raw(broker, keys.trajectories())
    assert remaining == entries[30:] and not trimmer.is_waiting
    assert {int(path.name.partition("-")[0]) for path in store.folder.iterdir()} == set(range(20, 40))
    records = await scanned(History(keys.run_id, context.run_dir, None))
    assert [record.message for record in records] == samples[: len(records)]


@ONE_SERVER
async def test_payloads_are_looked_for_where_the_run_has_them_and_not_where_it_has_none(context, monkeypatch):
    opened: list[str] = []

    def open_store(run_dir: Path, url: str) -> ClaimStore:
        opened.append(url)
        return ClaimStore(run_dir)

    monkeypatch.setattr("tidemill.common.store.ClaimStore", open_store)
    await make_trimmer(context).collect_claims()
    assert not opened
    context.config = trainer_config(streams__claim_check_url="s3://bucket/runs")
    await make_trimmer(context).collect_claims()
    assert opened == ["s3://bucket/runs"]


@ONE_SERVER
async def test_a_payload_that_was_missing_when_its_entry_was_archived_stays_when_it_comes_back(
    context, broker, keys
):
    """On a shared file system another machine may see a file late."""
    store = ClaimStore(context.run_dir, 1)
    context.config = trainer_config(streams__archive=ARCHIVE, streams__claim_check_bytes=1)
    context.run_dir.mkdir()
    samples = [make_trajectory(ticket, 0, text=f"{ticket:04}" * 500) for ticket in range(20)]
    claims = [store.check_in(sample) for sample in samples]
    await append(broker, keys.trajectories(), *claims)
    entries = await raw(broker, keys.trajectories())
    file = store.folder / claims[4].claim.pointer
    file.rename(context.run_dir / "not seen")
    broker.claims = store
    await archive(broker, keys, context.run_dir)
    (context.run_dir / "not seen").rename(file)
    trimmer = make_trimmer(context)
    trimmer.first_ticket = 20
    await trimmer.release({STREAM: id_after(entries[-1][0])}, 0)
    await trimmer.collect_claims()
    await trimmer.close()
    assert await length(broker, keys.trajectories()) == 0
    assert list(store.folder.iterdir()) == [file]
    records = await scanned(History(keys.run_id, context.run_dir, None))
    assert [record.message for record in records] == samples

    with writing(context.run_dir):
        cut_back(stream_folder(context.run_dir, STREAM), Trajectory, entries[10][0])
    await trimmer.collect_claims()
    assert list(store.folder.iterdir()) == [file], "the shorter file names it, too"
    manifest = archived(context)
    segment = next(segment.path for segment in manifest.segments if segment.details.bare)
    segment.rename(segment.with_name("not seen"))
    segment.write_bytes(b"another file's bytes")
    _read_details.cache_clear()
    await trimmer.collect_claims()
    assert list(store.folder.iterdir()) == [file], "which payloads a segment needs is not known"
    segment.with_name("not seen").rename(segment)
    manifest.remove_first(len(manifest.segments))
    await trimmer.collect_claims()
    assert not list(store.folder.iterdir()), "it goes with its segment"


@ONE_SERVER
@pytest.mark.parametrize("keeps", [True, False])
async def test_choices_that_were_missing_when_their_entry_was_archived_stay_where_they_are_kept(
    context, broker, keys, keeps
):
    store = ClaimStore(context.run_dir)
    ids = np.arange(3, dtype=np.int32)
    context.config = trainer_config(streams__archive=ARCHIVE)
    context.run_dir.mkdir()
    choices = Choices(rows={"kept": Rows.of_lists([[token, 30] for token in ids.tolist()])})
    sample = make_trajectory(0, 0, group_size=1, completion_ids=ids, choices=choices)
    await append(broker, keys.trajectories(), store.check_in_choices(sample))
    (file,) = store.folder.iterdir()
    file.rename(context.run_dir / "not seen")
    broker.claims = store
    await archive(broker, keys, context.run_dir, keep_choices=keeps)
    assert keeps or check(context.run_dir) == [], "choices that an archive does not keep are not lost"
    (context.run_dir / "not seen").rename(file)
    trimmer = make_trimmer(context)
    trimmer.first_ticket = 1
    await broker.execute("DEL", keys.trajectories())
    await trimmer.collect_claims()
    await trimmer.close()
    assert list(store.folder.iterdir()) == ([file] if keeps else [])


@ONE_SERVER
async def test_what_fills_no_file_is_archived_where_memory_runs_low(context, broker, keys, monkeypatch):
    monkeypatch.setattr(archive_requests, "POLL_S", 0.05)
    await fill(broker, keys.trajectories(), range(20))
    entries = await raw(broker, keys.trajectories())
    trimmer = make_trimmer(context)
    await trimmer.release({STREAM: entries[40][0]}, 0, is_urgent=True)
    await wait_until(lambda: not trimmer.is_waiting)
    assert (await raw(broker, keys.trajectories()))[0][0] == entries[40][0]
    await trimmer.close()


@ONE_SERVER
@pytest.mark.parametrize("is_over", [True, False])
async def test_a_run_ends_with_all_archived_that_was_asked_for(context, broker, keys, is_over):
    await fill(broker, keys.trajectories(), range(60))
    entries = await raw(broker, keys.trajectories())
    trimmer = make_trimmer(context)
    await trimmer.release({STREAM: entries[1][0]}, 0)
    await trimmer.release({STREAM: entries[-1][0]}, 0)
    if not is_over:  # the trainer that resumes asks for it
        context.stopping.set()
    await trimmer.close()
    assert bool(archived(context).segments) == is_over


@ONE_SERVER
async def test_what_fills_no_file_is_asked_for_only_when_memory_runs_low(context, broker, keys, monkeypatch):
    await fill(broker, keys.trajectories(), range(1))
    (first, _), *_ = await raw(broker, keys.trajectories())
    trimmer = make_trimmer(context)
    assert await memory_bytes(broker, keys.trajectories()) < 0.02 * 2**20
    monkeypatch.setattr(archive_requests, "claims_in", None)  # no entry of this run claims a payload
    await trimmer.release({STREAM: f"{first}5"}, 0)
    assert trimmer.is_waiting
    assert await length(broker, keys.trajectories()) == 3


@ONE_SERVER
async def test_a_run_that_trims_to_its_archive_keeps_every_entry_and_resumes(
    make, broker, keys, redis_server, monkeypatch
):
    """Stopped half-way and resumed: the checkpoint needs nothing of what was trimmed."""
    monkeypatch.setenv("TIDEMILL_REDIS_URL", redis_server.url)
    monkeypatch.setattr(archive_requests, "POLL_S", 0.05)
    seen: dict[str, dict[str, None]] = {}
    num_archived = 0
    slow = {"update_s": 0.05}  # a step is over before a job has begun otherwise
    for _ in range(2):
        context = make(
            4000, trims=True, archives=True, checkpoint_every=2, keep_checkpoints=1, simulated=slow
        )
        await publish_config(broker, keys, context.config)
        deadline = time.monotonic() + 120
        async with answering(broker, keys):
            running = asyncio.create_task(serve(context))
            while not running.done():
                for stream in (StreamName.TRAJECTORIES, StreamName.SCORES, StreamName.PROMPTS):
                    for entry_id, _ in await raw(broker, stream.key(keys)):
                        seen.setdefault(stream, {})[entry_id] = None
                if archived(context).entries > num_archived:
                    context.stopping.set()
                assert time.monotonic() < deadline, "nothing more was archived"
                await asyncio.sleep(0.02)
            await running
        num_archived = archived(context).entries
    commits = [entry.message.step for entry in await read_range(broker, keys.commits, Commit)]
    assert commits == list(range(commits[0], commits[0] + len(commits))), "the newest, without a hole"
    history = History(keys.run_id, context.run_dir, broker)
    for name, ids in seen.items():
        entry_ids = [record.entry_id for record in await scanned(history, StreamName(name))]
        assert set(ids) <= set(entry_ids) and len(entry_ids) == len(set(entry_ids)), name
    assert await length(broker, keys.trajectories()) < len(seen[StreamName.TRAJECTORIES])


async def test_the_dead_are_forgotten_after_a_while_with_what_they_hold_kept(context, broker, keys):
    """What killed workers leave in Redis goes; what is held, and whoever is there, stays."""
    prompts = keys.prompts()
    await ensure_group(broker, prompts, ROLLOUT_GROUP)
    await append(broker, prompts, make_ticket(0))
    for name in ("holds-a-ticket", "holds-nothing"):
        await publish_heartbeat(broker, keys, Heartbeat(name, "rollout"))
        await broker.execute("XGROUP", "CREATECONSUMER", prompts, ROLLOUT_GROUP, name)
    read = ("GROUP", ROLLOUT_GROUP, "holds-a-ticket", "COUNT", 1, "STREAMS", prompts, ">")
    await broker.execute("XREADGROUP", *read)
    trimmer = make_trimmer(context)
    assert await trimmer.departed.forget() == 0, "an hour has not passed"
    assert await trimmer.departed.forget(after_s=-1.0) == 0, "it has looked a moment ago"
    assert await make_trimmer(context).departed.forget(after_s=-1.0) == 3
    assert await read_heartbeats(broker, keys) == []
    consumers = await broker.execute("XINFO", "CONSUMERS", prompts, ROLLOUT_GROUP)
    assert [info[1] for info in consumers] == [b"holds-a-ticket"]
