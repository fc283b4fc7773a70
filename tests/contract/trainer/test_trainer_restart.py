"""A trainer that is stopped or dies at a bad moment goes on as if it had not."""

import asyncio
import json
from typing import Any

import pytest

from tests.support.training import answering, commits_of, messages, publish_group, replayed_digests
from tests.support.waiting import wait_until
from tests.support.whole_trainer import (
    GROUPS,
    SIZE,
    assert_each_once,
    assert_trained_once,
    crash_after_commit,
    has_tickets,
    is_answered,
    run,
)
from tidemill.common.files import LockedError, locked
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import EVALUATION, FINISHED, METRICS_FILE, STEP, read_records, read_state
from tidemill.common.run.weight_files import folder_versions, needed_versions
from tidemill.common.streams import append
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import DeadLetter, Lane, WeightManifest
from tidemill.services.trainer import trainer as trainer_module
from tidemill.services.trainer.batch.reconciler import Reconciler
from tidemill.services.trainer.batch.scheduler import Scheduler
from tidemill.services.trainer.batch.stream_join import StreamJoin
from tidemill.services.trainer.durable.checkpoint import CheckpointStore
from tidemill.services.trainer.evaluation import Evaluator
from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy
from tidemill.services.trainer.trainer import Trainer
from tidemill.services.trainer.weights.store import WeightStore


async def test_a_trainer_that_starts_after_its_workers_takes_in_what_they_did_meanwhile(
    make, broker, keys, answers, monkeypatch
):
    """Nothing may be read before the tickets it belongs to are known again, however long that takes: it would
    be thrown away. There is no checkpoint yet, so everything is read again."""
    adopt = Scheduler.adopt_issued

    async def slowly(scheduler, *history):
        adopted = await adopt(scheduler, *history)
        for _ in range(200):
            await asyncio.sleep(0)
        await broker.execute("PING")
        return adopted

    await crash_after_commit(make(), 2)
    await wait_until(lambda: is_answered(broker, keys))
    monkeypatch.setattr(Scheduler, "adopt_issued", slowly)
    await run(make())
    await assert_trained_once(broker, keys, 6)
    state = await read_state(broker, keys)
    assert (state["status"], state["version"], state["trajectories_seen"]) == (FINISHED, 6, 6 * GROUPS * SIZE)


@pytest.mark.parametrize(("step", "every"), [(0, 4), (3, 4), (5, 4), (5, 0)])
async def test_a_crash_between_commit_and_announcement_is_repaired(make, broker, keys, answers, step, every):
    """Without a checkpoint before the last one, from the streams alone."""
    options = {"checkpoint_every": every, "trims": not every}
    await crash_after_commit(make(**options), step)
    await run(make(**options))
    commits = await assert_trained_once(broker, keys, 6)
    manifests = await messages(broker, keys.weights, WeightManifest)
    assert [m.version for m in manifests][-1] == 6
    digests = {commit.version: commit.digest for commit in commits}
    assert all(m.digest == digests[m.version] for m in manifests if m.version)
    assert CheckpointStore(make().run_dir, 2).versions()[-1] == 6


@pytest.mark.usefixtures("answers")
async def test_a_finished_run_that_is_started_again_trains_nothing_and_ends(make, broker, keys, monkeypatch):
    await run(make(has_eval=True))
    before = await commits_of(broker, keys)
    records = read_records(make().run_dir / METRICS_FILE)
    evaluations = (await read_state(broker, keys))["evaluations"]
    assert [(item["version"], item["set"]) for item in evaluations] == [(0, "held"), (6, "held")]
    monkeypatch.setattr(Trainer, "_step", None)
    await run(make(has_eval=True))
    assert await commits_of(broker, keys) == before
    assert read_records(make().run_dir / METRICS_FILE) == records
    state = await read_state(broker, keys)
    assert (state["status"], state["evaluations"]) == (FINISHED, evaluations)


async def test_what_was_replaced_before_a_stop_is_reported_after_it(make, broker, keys):
    """The replacement lies in the checkpoint, the commit that must report it is still to come."""
    context = make(max_staleness=0)
    serving = asyncio.ensure_future(run(context))
    await wait_until(lambda: has_tickets(broker, keys, GROUPS))
    await append(broker, keys.dead, DeadLetter(origin="prompts", entry_id="1-0", error="refused", ticket=0))
    await wait_until(lambda: has_tickets(broker, keys, GROUPS + 1))
    context.stopping.set()
    await serving
    await broker.execute("XDEL", keys.prompts(), "1-0")  # ticket 0 is never answered
    async with answering(broker, keys):
        await run(make(max_staleness=0))
    commits = await commits_of(broker, keys)
    assert (0, -1, "dead: refused") in commits[0].dropped
    assert sorted(t for commit in commits for t in commit.groups) == list(range(1, 6 * GROUPS + 1))


async def test_what_was_replaced_before_a_crash_without_any_commit_is_replaced_once(make, broker, keys):
    """Neither checkpoint nor journal says that the run has begun: only the stream of tickets does."""
    serving = asyncio.ensure_future(run(make(max_staleness=0)))
    await wait_until(lambda: has_tickets(broker, keys, GROUPS))
    await append(broker, keys.dead, DeadLetter(origin="prompts", entry_id="1-0", error="refused", ticket=0))
    await wait_until(lambda: has_tickets(broker, keys, GROUPS + 1))
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    async with answering(broker, keys):
        await run(make(max_staleness=0))
    commits = await commits_of(broker, keys)
    assert (0, -1, "replaced before a restart") in commits[0].dropped
    assert sorted(t for commit in commits for t in commit.groups) == list(range(1, 6 * GROUPS + 1))


@pytest.mark.parametrize("order", ["in_order", "as_ready"])
async def test_replacements_survive_crashes(make, broker, keys, order):
    """Every third group has equal rewards and is replaced; the trainer dies twice on the way."""
    options = {"algorithm": {"filter_zero_variance": True}, "batch_order": order}

    def value(ticket, index):
        return 0.0 if ticket % 3 == 0 else float(index)

    async with answering(broker, keys, value):
        await crash_after_commit(make(**options), 1)
        await crash_after_commit(make(**options), 4)
        await run(make(**options))
    commits = await assert_trained_once(broker, keys, 6)
    dropped = [ticket for commit in commits for ticket, _, _ in commit.dropped]
    assert dropped and all(ticket % 3 == 0 for ticket in dropped)


@pytest.mark.parametrize(("owner", "name"), [(StreamJoin, "read"), (Evaluator, "evaluate")])
async def test_work_beside_the_steps_that_fails_ends_the_trainer_with_its_error(
    make, broker, keys, answers, monkeypatch, owner, name
):
    async def fail(*_):
        raise RuntimeError("it broke")

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(RuntimeError, match="it broke"):
        await run(make(has_eval=True))
    assert (await read_state(broker, keys)).get("status") != FINISHED


async def test_a_version_is_committed_before_it_is_written_and_on_the_disk_before_it_is_announced(
    make, broker, keys, answers, monkeypatch
):
    """A crash between any two of these must leave something to go on from."""
    order: list[tuple[str, int]] = []
    finish = WeightStore.finish
    announce = Reconciler.announce

    async def note_commit(*arguments):
        order.append(("commit", arguments[2].version))
        await append_commit(*arguments)

    async def note_announcement(reconciler, *manifest):
        is_new = await announce(reconciler, *manifest)
        if is_new:
            order.append(("announce", reconciler.manifest.version))
        return is_new

    def note_write(store, begun):
        manifest = finish(store, begun)
        order.append(("write", manifest.version))
        return manifest

    append_commit = trainer_module.append_commit
    monkeypatch.setattr(trainer_module, "append_commit", note_commit)
    monkeypatch.setattr(Reconciler, "announce", note_announcement)
    monkeypatch.setattr(WeightStore, "finish", note_write)
    await run(make(steps=3))
    expected = [(event, version) for version in range(4) for event in ("commit", "write", "announce")]
    assert order == [item for item in expected if item != ("commit", 0)]


async def test_a_second_trainer_in_the_same_run_folder_is_refused_before_it_does_anything(make, broker, keys):
    context = make()
    context.run_dir.mkdir(parents=True, exist_ok=True)
    with locked(context.run_dir / "trainer.lock", "the test holds it"), pytest.raises(LockedError):
        await run(context)
    assert await broker.execute("EXISTS", keys.prompts(), keys.weights, keys.commits) == 0


class TestEvaluations:
    @staticmethod
    def on_record(context: Any) -> list[int]:
        records = read_records(context.run_dir / METRICS_FILE)
        return [record["version"] for record in records if record["kind"] == EVALUATION]

    async def test_those_after_the_checkpoint_are_not_forgotten_and_the_best_version_is_kept(
        self, make, broker, keys, answers
    ):
        """Steps are replayed, evaluations are not: their records must outlive the crash. All scores are
        equal, so the first version that was evaluated stays the best one."""
        options = {"has_eval": True, "evaluation": {"every": 1}, "keep_weights": 2}
        await crash_after_commit(make(**options), 3)
        await run(make(**options))
        run_dir = make().run_dir
        assert self.on_record(make()) == list(range(7))
        steps = [record["step"] for record in read_records(run_dir / METRICS_FILE) if record["kind"] == STEP]
        assert steps == list(range(6))
        assert json.loads((run_dir / "best.json").read_text())["version"] == 0
        kept = needed_versions(run_dir, [0, 5, 6])
        assert folder_versions(run_dir / "weights") == sorted(kept), "these, and what they are deltas to"
        assert (await read_state(broker, keys))["best"]["version"] == 0

    async def test_one_that_is_cut_off_between_commit_and_announcement_is_finished_first(
        self, make, broker, keys
    ):
        """Version 0 is under evaluation while step 0 is trained; its workers are not answering yet."""
        options = {"has_eval": True, "max_staleness": 0}
        async with answering(broker, keys, lanes=[Lane.TRAIN]):
            await crash_after_commit(make(**options), 0)
        async with answering(broker, keys):
            await run(make(**options))
        assert self.on_record(make()) == [0, 6]

    async def test_a_crash_between_record_and_trim_does_not_make_the_next_start_wait(
        self, make, broker, keys, answers, monkeypatch
    ):
        async def die(*_):
            raise InterruptedError

        with monkeypatch.context() as patch:
            patch.setattr(Evaluator, "trim", die)
            with pytest.raises(InterruptedError):
                await run(make(has_eval=True))
        await run(make(has_eval=True))
        assert self.on_record(make()) == [0, 6]


class TestSeveralUpdates:
    """No crash or stop between two updates of a step leaves anything half done."""

    @staticmethod
    async def assert_replays_alike(broker: Broker, keys: Keys, context: Any) -> None:
        """An undisturbed run over the same records has the same weights at every step."""
        digests = [commit.digest for commit in await commits_of(broker, keys)]
        policy = SimulatedPolicy(context.config)
        assert await replayed_digests(broker, keys, context.config, policy) == digests

    @pytest.mark.parametrize("order", ["in_order", "as_ready"])
    async def test_every_step_has_its_updates_and_every_ticket_is_trained_once(
        self, make, broker, keys, answers, order
    ):
        context = make(mini_batches=2, batch_order=order)
        await run(context)
        for commit in await assert_trained_once(broker, keys, 6):
            assert len(commit.mini_batches) == commit.metrics["mini_batches"] == 2
            tickets = []
            for mini in commit.mini_batches:
                tickets.append(sorted({ticket for micro in mini for ticket, _ in micro}))
            assert [[ticket] for ticket in commit.groups] == tickets, "each update took the next to arrive"
        await self.assert_replays_alike(broker, keys, context)

    @pytest.mark.parametrize("number", [2, 6, 12])
    @pytest.mark.parametrize("updates", [{"mini_batches": 2}, {"passes": 2}])
    async def test_a_crash_between_two_of_a_step_leaves_nothing_of_it(
        self, make, broker, keys, answers, monkeypatch, updates, number
    ):
        """The process dies in the middle of update `number`, counted from 1."""
        context = make(**updates, checkpoint_every=2)
        update = SimulatedPolicy.update
        count = 0

        def update_or_die(policy, denominator):
            nonlocal count
            count += 1
            if count == number:
                raise InterruptedError
            return update(policy, denominator)

        with monkeypatch.context() as patch:
            patch.setattr(SimulatedPolicy, "update", update_or_die)
            with pytest.raises(InterruptedError):
                await run(context)
        assert len(await commits_of(broker, keys)) == number // 2 - 1
        await run(make(**updates, checkpoint_every=2))
        await assert_trained_once(broker, keys, 6)
        await self.assert_replays_alike(broker, keys, context)

    async def test_a_stop_between_two_of_a_step_saves_no_weights_of_no_version(
        self, make, broker, keys, monkeypatch
    ):
        context = make(mini_batches=2)
        updates = []
        update = SimulatedPolicy.update

        def note(policy, denominator):
            updates.append(update(policy, denominator))
            return updates[-1]

        monkeypatch.setattr(SimulatedPolicy, "update", note)
        serving = asyncio.ensure_future(run(context))
        await wait_until(lambda: has_tickets(broker, keys, 2 * GROUPS))
        await publish_group(broker, keys, 0)
        await wait_until(lambda: bool(updates))
        context.stopping.set()
        await serving
        assert CheckpointStore(context.run_dir, 1).versions() == []
        async with answering(broker, keys):
            await run(make(mini_batches=2))  # ticket 0 is answered once more: the first answer counts
        assert_each_once(await commits_of(broker, keys), 6)
        await self.assert_replays_alike(broker, keys, context)
