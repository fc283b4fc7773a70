"""A run whose trajectories lie beside the stream trains, archives and replays as any other."""

import asyncio
from contextlib import AbstractAsyncContextManager
from typing import Any

import numpy as np
import pytest

from tests.conftest import SERVERS
from tests.support.training import answering_with, commits_of
from tests.support.trajectories import make_trajectory
from tests.support.waiting import wait_until
from tests.support.whole_trainer import GROUPS, crash_after_commit, run
from tidemill.common.archive.archiver import check
from tidemill.common.history import History, StreamName
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.store import ClaimStore, claims
from tidemill.common.streams import OffsetReader, append, read_raw
from tidemill.common.wire import codec
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Ticket, Trajectory, fault_of
from tidemill.services.trainer.durable.checkpoint import CheckpointStore
from tidemill.services.trainer.durable.recovery import LostPayloadError

pytestmark = pytest.mark.parametrize("redis_server", sorted(SERVERS)[:1], indirect=True)


def large(ticket: Ticket, index: int) -> Trajectory:
    ids = np.arange(400, dtype=np.int32) + index
    return make_trajectory(
        ticket.ticket,
        index,
        step=ticket.step,
        group_size=ticket.group_size,
        completion_ids=ids,
        logprobs=np.full(400, -1.0, np.float32),
        spans=((ticket.min_version, 0),),
    )


@pytest.fixture
def store(make: Any, broker: Broker) -> ClaimStore:
    """Of the run that `make` makes; nearly all samples are larger than its limit."""
    broker.claims = store = ClaimStore(make().run_dir, 1000)
    return store


@pytest.fixture
def claiming(broker: Broker, keys: Keys, store: ClaimStore) -> Any:
    """Claims for every ticket, with scores; the file of one sample is lost before anybody reads it."""

    def claiming(lost: tuple[int, int] | None = None) -> AbstractAsyncContextManager[None]:
        def claim(ticket: Ticket, index: int) -> Trajectory:
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
) -> None:
    options: dict[str, Any] = {"trims": True, "archives": True, "keep_checkpoints": 1, "group_size": 3}
    options |= {"reward": {"min_group_size": 2}, "checkpoint_every": 100}
    async with claiming(lost):
        await crash_after_commit(make(**options), 3)
        assert len(list(store.folder.iterdir())) >= 4 * GROUPS * 3 - (lost is not None)
        await run(make(**options))
    told, run_dir = capfd.readouterr().out, make().run_dir
    assert told.count("step replayed, same weights") == 4 and "weights differ" not in told
    left_out = [one for commit in await commits_of(broker, keys) for one in commit.dropped]
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


async def test_a_checkpoint_looks_once_for_files_that_may_go(make, claiming, monkeypatch) -> None:
    calls: list[str] = []

    def count(owner: type, name: str) -> None:
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (calls.append(name), call(*args))[1])

    count(ClaimStore, "settled")
    count(CheckpointStore, "save")
    async with claiming():
        await run(make(4, trims=True, checkpoint_every=2, keep_checkpoints=1, group_size=3))
    assert calls == ["save", "settled"] * (len(calls) // 2) and len(calls) >= 4


async def test_a_trainer_that_starts_while_the_store_is_away_waits_and_trains_on_all_samples(
    make, broker, keys, store, claiming, capfd, monkeypatch
) -> None:
    monkeypatch.setattr(claims, "LONGEST_PAUSE_S", claims.FIRST_PAUSE_S)
    options: dict[str, Any] = {"checkpoint_every": 100, "group_size": 3}
    async with claiming():
        await crash_after_commit(make(**options), 3)
    store.folder.rename(store.folder.with_name("away"))

    async def waiting(context: ServiceContext) -> asyncio.Future[None]:
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
    assert not [one for commit in await commits_of(broker, keys) for one in commit.dropped]


async def test_a_committed_sample_whose_payload_is_gone_is_named_with_its_path_and_may_be_put_back(
    make, broker, keys, store, claiming, tmp_path, capfd
) -> None:
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


async def test_without_a_folder_a_claim_is_no_trajectory_and_never_an_empty_one(
    broker, keys, tmp_path
) -> None:
    await append(broker, keys.trajectories(), ClaimStore(tmp_path, 1).check_in(make_trajectory(0, 0)))
    entry = (await OffsetReader(broker, keys.trajectories(), Trajectory).read())[0]
    assert "was not looked into" in fault_of(entry.message)  # type: ignore[union-attr]
