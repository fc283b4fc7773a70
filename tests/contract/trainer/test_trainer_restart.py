"""A trainer that is stopped or dies at a bad moment goes on as if it had not."""

import asyncio
from typing import Any

import pytest

from tests.support.training import answering, commits_of, messages
from tests.support.waiting import wait_until
from tests.support.whole_trainer import (
    GROUPS,
    SIZE,
    assert_trained_once,
    crash_after_commit,
    has_commits,
    has_tickets,
    is_answered,
    run,
)
from tidemill.common.files import LockedError, locked
from tidemill.common.run.state import FINISHED, METRICS_FILE, read_records, read_state
from tidemill.common.streams import append
from tidemill.common.wire.messages import DeadLetter, WeightManifest
from tidemill.services.trainer import trainer as trainer_module
from tidemill.services.trainer.batch.reconciler import Reconciler
from tidemill.services.trainer.batch.scheduler import Scheduler
from tidemill.services.trainer.batch.stream_join import StreamJoin
from tidemill.services.trainer.durable.checkpoint import CheckpointStore
from tidemill.services.trainer.trainer import Trainer
from tidemill.services.trainer.weights.store import WeightStore


async def test_a_run_ends_with_every_ticket_trained_once(make, broker, keys):
    async with answering(broker, keys):
        await run(make())
    await assert_trained_once(broker, keys, 6)
    state = await read_state(broker, keys)
    assert (state["status"], state["version"], state["trajectories_seen"]) == (FINISHED, 6, 6 * GROUPS * SIZE)


async def test_a_trainer_that_starts_after_its_workers_takes_in_what_they_did_meanwhile(make, broker, keys):
    """Nothing may be read before the tickets it belongs to are known again: it would be thrown away."""
    async with answering(broker, keys):
        await crash_after_commit(make(), 2)  # no checkpoint yet: everything is read again
        await wait_until(lambda: is_answered(broker, keys))
        await run(make())
    await assert_trained_once(broker, keys, 6)


async def test_readers_that_are_faster_than_the_adoption_of_tickets_lose_nothing(
    make, broker, keys, monkeypatch
):
    adopt = Scheduler.adopt_issued

    async def slowly(scheduler: Scheduler, *history: Any) -> Any:
        adopted = await adopt(scheduler, *history)
        for _ in range(200):
            await asyncio.sleep(0)
        await broker.execute("PING")
        return adopted

    async with answering(broker, keys):
        await crash_after_commit(make(), 2)
        await wait_until(lambda: is_answered(broker, keys))
        monkeypatch.setattr(Scheduler, "adopt_issued", slowly)
        await run(make())
    await assert_trained_once(broker, keys, 6)


@pytest.mark.parametrize("step", [0, 3, 4, 5])
async def test_a_crash_between_commit_and_announcement_is_repaired(make, broker, keys, step):
    async with answering(broker, keys):
        await crash_after_commit(make(), step)
        await run(make())
    commits = await assert_trained_once(broker, keys, 6)
    manifests = await messages(broker, keys.weights, WeightManifest)
    assert [m.version for m in manifests][-1] == 6
    digests = {commit.version: commit.digest for commit in commits}
    assert all(m.digest == digests[m.version] for m in manifests if m.version)


async def test_a_finished_run_that_is_started_again_trains_nothing_and_ends(make, broker, keys, monkeypatch):
    async with answering(broker, keys):
        await run(make(has_eval=True))
    before = await commits_of(broker, keys)
    records = read_records(make().run_dir / METRICS_FILE)
    evaluations = (await read_state(broker, keys))["evaluations"]
    assert [(item["version"], item["set"]) for item in evaluations] == [(0, "held"), (6, "held")]

    async def never(*_: object) -> None:
        raise AssertionError("nothing is left to train")

    monkeypatch.setattr(Trainer, "_step", never)
    await run(make(has_eval=True))
    assert await commits_of(broker, keys) == before
    assert read_records(make().run_dir / METRICS_FILE) == records
    state = await read_state(broker, keys)
    assert (state["status"], state["evaluations"]) == (FINISHED, evaluations)


async def test_a_stopped_trainer_goes_on_where_it_was(make, broker, keys):
    async with answering(broker, keys):
        for version in (1, 4):
            context = make()
            serving = asyncio.ensure_future(run(context))
            await wait_until(lambda version=version: has_commits(broker, keys, version))
            context.stopping.set()
            await serving
            assert (await read_state(broker, keys))["status"] != FINISHED
        await run(make())
    await assert_trained_once(broker, keys, 6)


async def test_what_was_replaced_before_a_stop_is_told_of_after_it(make, broker, keys):
    """The replacement lies in the checkpoint, the commit that must tell of it is still to come."""
    context = make(max_staleness=0)
    serving = asyncio.ensure_future(run(context))
    await wait_until(lambda: has_tickets(broker, keys, GROUPS))
    await append(broker, keys.dead, DeadLetter(origin="prompts", entry_id="1-0", error="refused", ticket=0))
    await wait_until(lambda: has_tickets(broker, keys, GROUPS + 1))
    context.stopping.set()
    await serving
    # Ticket 0 is never answered.
    await broker.execute("XDEL", keys.prompts(), "1-0")
    async with answering(broker, keys):
        await run(make(max_staleness=0))
    commits = await commits_of(broker, keys)
    assert (0, -1, "dead: refused") in commits[0].dropped
    assert sorted(t for commit in commits for t in commit.groups) == list(range(1, 6 * GROUPS + 1))


@pytest.mark.parametrize("order", ["in_order", "as_ready"])
async def test_replacements_survive_crashes(make, broker, keys, order):
    """Every third group has equal rewards and is replaced; the trainer dies twice on the way."""
    options = {"algorithm": {"filter_zero_variance": True}, "batch_order": order}

    def value(ticket: int, index: int) -> float:
        return 0.0 if ticket % 3 == 0 else float(index)

    async with answering(broker, keys, value):
        await crash_after_commit(make(**options), 1)
        await crash_after_commit(make(**options), 4)
        await run(make(**options))
    commits = await assert_trained_once(broker, keys, 6)
    dropped = [ticket for commit in commits for ticket, _, _ in commit.dropped]
    assert dropped
    assert all(ticket % 3 == 0 for ticket in dropped)


async def test_a_reader_that_fails_ends_the_trainer_with_its_error(make, broker, keys, monkeypatch):
    async def fail(self: StreamJoin, stream: str) -> None:
        raise RuntimeError("the reader broke")

    monkeypatch.setattr(StreamJoin, "read", fail)
    async with answering(broker, keys):
        with pytest.raises(RuntimeError, match="the reader broke"):
            await run(make())


async def test_a_version_is_committed_before_it_is_written_and_on_the_disk_before_it_is_announced(
    make, broker, keys, monkeypatch
):
    """A crash between any two of these must leave something to go on from."""
    order: list[tuple[str, int]] = []
    finish, announce = WeightStore.finish, Reconciler.announce

    async def note_commit(*arguments: Any) -> None:
        order.append(("commit", arguments[2].version))
        await append_commit(*arguments)

    async def note_announcement(reconciler: Reconciler, *manifest: WeightManifest) -> bool:
        is_new = await announce(reconciler, *manifest)
        if is_new:
            order.append(("announce", reconciler.manifest.version))
        return is_new

    def note_write(store: WeightStore, begun: Any) -> Any:
        manifest = finish(store, begun)
        order.append(("write", manifest.version))
        return manifest

    append_commit = trainer_module.append_commit
    monkeypatch.setattr(trainer_module, "append_commit", note_commit)
    monkeypatch.setattr(Reconciler, "announce", note_announcement)
    monkeypatch.setattr(WeightStore, "finish", note_write)
    async with answering(broker, keys):
        await run(make(steps=3))
    expected = [(what, version) for version in range(4) for what in ("commit", "write", "announce")]
    assert order == [item for item in expected if item != ("commit", 0)]


async def test_a_second_trainer_in_the_same_run_folder_is_refused_before_it_does_anything(make, broker, keys):
    context = make()
    context.run_dir.mkdir(parents=True, exist_ok=True)
    refused = pytest.raises(LockedError, match="another trainer works in the folder of run")
    with locked(context.run_dir / "trainer.lock", "the test holds it"), refused:
        await run(context)
    assert await broker.execute("EXISTS", keys.prompts(), keys.weights, keys.commits) == 0


async def test_a_run_that_keeps_only_its_last_checkpoint_recovers_from_its_streams(make, broker, keys):
    async with answering(broker, keys):
        await crash_after_commit(make(checkpoint_every=0, trims=True), 5)
        assert CheckpointStore(make().run_dir, 2).versions() == []
        await run(make(checkpoint_every=0, trims=True))
    await assert_trained_once(broker, keys, 6)
    assert CheckpointStore(make().run_dir, 2).versions() == [6]
