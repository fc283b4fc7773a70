"""A run whose trajectories lie beside the stream, or whose engines record choices, trains, archives and
replays as any other."""

import asyncio
import shutil
from typing import Any

import numpy as np
import pytest

from tests.conftest import SERVERS
from tests.support.training import answering_with, commits_of
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tests.support.whole_trainer import GROUPS, crash_after_commit, run
from tidemill.common.archive.archiver import archive_run, check
from tidemill.common.errors import TidemillError
from tidemill.common.history import History, StreamName
from tidemill.common.store import ClaimStore, claims
from tidemill.common.streams import OffsetReader, append, read_raw
from tidemill.common.wire import codec
from tidemill.common.wire.choices import Rows
from tidemill.common.wire.messages import Choices, Ticket, Trajectory, fault_of
from tidemill.services.trainer.durable.checkpoint import CheckpointStore
from tidemill.services.trainer.durable.retraining import LostPayloadError
from tidemill.services.trainer.replay.steps import replay_steps

pytestmark = pytest.mark.parametrize("redis_server", sorted(SERVERS)[:1], indirect=True)


def large(ticket: Ticket, index: int) -> Trajectory:
    ids = np.arange(400, dtype=np.int32) + index
    return make_trajectory(
        ticket.ticket, index, step=ticket.step, group_size=ticket.group_size, completion_ids=ids,
        logprobs=np.full(400, -1.0, np.float32), spans=((ticket.min_version, 0),),
    )  # fmt: skip


OPTIONS: dict[str, Any] = {
    "trims": True, "archives": True, "keep_checkpoints": 1, "group_size": 3, "reward": {"min_group_size": 2},
    "checkpoint_every": 100,
}  # fmt: skip


@pytest.fixture
def store(make, broker):
    """Of the run that `make` makes; nearly all samples are larger than its limit."""
    store = ClaimStore(make().run_dir, 1000)
    broker.claims = store
    return store


@pytest.fixture
def claiming(broker, keys, store):
    """Claims for every ticket, with scores; the file of one sample is lost before anybody reads it."""

    def claiming(lost=None):
        def claim(ticket, index):
            claimed = store.check_in(large(ticket, index))
            assert claimed.claim is not None
            if claimed.key == lost:
                (store.folder / claimed.claim.pointer).unlink()
            return claimed

        return answering_with(broker, keys, claim)

    return claiming


@pytest.mark.parametrize("lost", [None, (3, 1)])
async def test_a_run_of_claims_trains_archives_replays_and_leaves_no_files_behind(
    make, broker, keys, store, claiming, archives_at_once, capfd, lost
):
    async with claiming(lost):
        await crash_after_commit(make(**OPTIONS), 3)
        assert len(list(store.folder.iterdir())) >= 4 * GROUPS * 3 - (lost is not None)
        await run(make(**OPTIONS))
    output = capfd.readouterr().out
    run_dir = make().run_dir
    assert output.count("step replayed, same weights") == 4 and "weights differ" not in output
    left_out = [drop for commit in await commits_of(broker, keys) for drop in commit.dropped]
    assert left_out == ([(3, 1, "no_payload")] if lost else [])
    claimed = {p for p in map(_pointer, await read_raw(broker, keys.trajectories())) if p}
    assert {path.name for path in store.folder.iterdir()} <= claimed, "the last checkpoint needs no others"
    archived = History(keys.run_id, run_dir, None)
    samples = [m async for m in archived.messages(StreamName.TRAJECTORIES, Trajectory)]
    tickets = {t.ticket: t async for t in archived.messages(StreamName.PROMPTS, Ticket)}
    assert len(samples) > 4 * GROUPS * 3
    for sample in samples:
        if sample.key == lost:
            assert "cannot be had" in sample.fault
        elif sample.ticket in tickets:
            whole = large(tickets[sample.ticket], sample.index)
            assert codec.encode_payload(sample) == codec.encode_payload(whole)
    assert len(check(run_dir)) == (lost is not None), "what an archive has lost shows"


async def test_a_checkpoint_looks_once_for_files_that_may_go(make, claiming, monkeypatch):
    calls: list[str] = []

    def count(owner, name):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (calls.append(name), call(*args))[1])

    count(ClaimStore, "settled")
    count(CheckpointStore, "save")
    async with claiming():
        await run(make(4, trims=True, checkpoint_every=2, keep_checkpoints=1, group_size=3))
    assert calls == ["save", "settled"] * (len(calls) // 2) and len(calls) >= 4


async def test_a_trainer_that_starts_while_the_store_is_away_waits_and_trains_on_all_samples(
    make, broker, keys, store, claiming, capfd, monkeypatch
):
    monkeypatch.setattr(claims, "LONGEST_PAUSE_S", claims.FIRST_PAUSE_S)
    options: dict[str, Any] = {"checkpoint_every": 100, "group_size": 3}
    async with claiming():
        await crash_after_commit(make(**options), 3)
    store.folder.rename(store.folder.with_name("away"))

    async def waiting(context):
        running = asyncio.ensure_future(run(context))
        await wait_until(lambda: "waiting for the store" in capfd.readouterr().out)
        return running

    stopped = make(**options)
    running = await waiting(stopped)
    stopped.stopping.set()
    await running
    running = await waiting(make(**options))
    store.folder.with_name("away").rename(store.folder)
    async with claiming():
        await running
    assert capfd.readouterr().out.count("step replayed, same weights") == 4
    assert not [drop for commit in await commits_of(broker, keys) for drop in commit.dropped]


async def test_a_committed_sample_whose_payload_is_gone_is_named_with_its_path_and_may_be_put_back(
    make, broker, keys, store, claiming, tmp_path, capfd
):
    async with claiming():
        await crash_after_commit(make(checkpoint_every=100), 3)
        ticket, index = (await commits_of(broker, keys))[2].trained_keys[0]
        (path,) = store.folder.glob(f"{ticket}-{index}-*")
        path.rename(tmp_path / "elsewhere")
        with pytest.raises(LostPayloadError) as raised:
            await run(make(checkpoint_every=100))
        assert str(path) in str(raised.value)
        (tmp_path / "elsewhere").rename(path)
        await run(make(checkpoint_every=100))
    assert "weights differ" not in capfd.readouterr().out


def _pointer(entry: Any) -> str:
    claim = codec.decode(entry[1], Trajectory).claim
    return claim.pointer if claim else ""


async def test_without_a_folder_a_claim_is_no_trajectory_and_never_an_empty_one(broker, keys, tmp_path):
    await append(broker, keys.trajectories(), ClaimStore(tmp_path, 1).check_in(make_trajectory(0, 0)))
    entry = (await OffsetReader(broker, keys.trajectories(), Trajectory).read())[0]
    assert "was not looked into" in fault_of(entry.message)


STEPS = 6


def chosen(ticket: Ticket, index: int, alternative: int = 30) -> Trajectory:
    ids = np.arange(3, dtype=np.int32) + index
    rows = Rows.of_lists([[token, alternative + ticket.ticket] for token in ids.tolist()])
    return make_trajectory(
        ticket.ticket, index, step=ticket.step, group_size=ticket.group_size, completion_ids=ids,
        spans=((ticket.min_version, 0),), choices=Choices(rows={"kept": rows}),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("least_bytes", "keeps", "lost"), [(0, True, None), (0, False, (3, 1)), (1, True, (3, 1))]
)
async def test_a_run_with_choices_trains_archives_and_replays(
    make, broker, keys, archives_at_once, capfd, least_bytes, keeps, lost
):
    options = OPTIONS | {"sampling": {"top_k": 2}, "archive": {"keep_choices": keeps}}
    run_dir = make().run_dir
    store = ClaimStore(run_dir, least_bytes)
    broker.claims = store

    def answer(ticket, index):
        # Of a worker that was killed between claim and entry: nobody claims it.
        store.check_in_choices(chosen(ticket, index, alternative=31))
        sample = store.check_in(store.check_in_choices(chosen(ticket, index)))
        if sample.key == lost:
            (store.folder / sample.choices.claim.pointer).unlink()
        return sample

    async with answering_with(broker, keys, answer):
        await crash_after_commit(make(**options), 3)
        # What is trimmed is in the archive by now, and its rows there or still in the store.
        await run(make(STEPS, **options))
    output = capfd.readouterr().out
    assert output.count("step replayed, same weights") == 4 and "weights differ" not in output
    commits = await commits_of(broker, keys)
    assert [drop for commit in commits for drop in commit.dropped] == ([(3, 1, "no_payload")] if lost else [])
    entries = [codec.decode(fields, Trajectory) for _, fields in await read_raw(broker, keys.trajectories())]
    assert entries and not any(entry.choices.rows for entry in entries), "never in Redis"
    claimed = {claim.pointer for entry in entries for claim in entry.claims}
    names = {path.name for path in store.folder.iterdir()}
    first = min(entry.ticket for entry in entries)
    assert {name for name in names if int(name.split("-")[0]) < first} <= claimed, "no others are needed"

    config = make(**options).config
    await archive_run(broker, keys, run_dir, config.streams.archive, is_last=True)
    shutil.rmtree(store.folder)
    archived = History(keys.run_id, run_dir, None)
    samples = [sample async for sample in archived.messages(StreamName.TRAJECTORIES, Trajectory)]
    assert len(samples) > 4 * GROUPS * 3 and not check(run_dir)
    for sample in samples:
        assert bool(sample.choices.rows) == (keeps and sample.key != lost) and sample.choices.claim
    events: list[dict[str, Any]] = []
    shutil.rmtree(run_dir / "checkpoints")  # from the start, from the archive alone
    if keeps:
        assert await replay_steps(archived, config, run_dir, range(STEPS), events.append)
        assert [event["equal"] for event in events if event["kind"] == "result"] == [True] * STEPS
    else:
        with pytest.raises(TidemillError, match="lost"):
            await replay_steps(archived, config, run_dir, [0], events.append)


async def test_a_sample_without_its_masks_is_left_out_with_a_reason(make, broker, keys):
    store = ClaimStore(make().run_dir)
    broker.claims = store
    options: dict[str, Any] = {"group_size": 3, "reward": {"min_group_size": 2}, "sampling": {"top_k": 2}}

    def answer(ticket, index):
        sample = chosen(ticket, index)
        bare = sample.model_copy(update={"choices": None})
        return store.check_in_choices(bare if index == 2 else sample)

    async with answering_with(broker, keys, answer):
        await run(make(1, **options))
    (commit,) = await commits_of(broker, keys)
    assert commit.dropped == tuple((ticket, 2, "no_choices") for ticket in commit.groups)
