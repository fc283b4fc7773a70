"""The whole trainer in this process, with workers that answer at once: stopped, crashed, started again."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.broker import Broker
from common.config import RunConfig
from common.files import StorageError
from common.keys import Keys
from common.messages import Commit, DeadLetter, Lane, Ticket, WeightManifest
from common.records import EVALUATION, METRICS_FILE, STEP, read_records
from common.run_state import FINISHED, read_state
from common.service import ServiceContext
from common.streams import append, id_order, last_id
from common.weight_files import verified_files
from services.trainer import trainer as trainer_module
from services.trainer.checkpoint import CheckpointStore
from services.trainer.checkpointing import Checkpointer
from services.trainer.evaluation import Evaluator
from services.trainer.intake import Intake
from services.trainer.scheduler import Scheduler
from services.trainer.service import serve
from services.trainer.simulated_policy import SimulatedPolicy
from services.trainer.step import StepRunner
from services.trainer.trainer import Trainer
from services.trainer.weights import WeightStore
from tests.models import tiny_model
from tests.training import (
    answering,
    assert_nothing_lost,
    commits_of,
    lose_tail,
    make_context,
    messages,
    num_commits,
    replayed_digests,
)
from tests.waiting import wait_until

GROUPS, SIZE = 2, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(broker: Broker, keys: Keys, tmp_path: Path, model: Path) -> Callable[..., ServiceContext]:
    """The context of a trainer process; all of a test share streams and run folder."""
    data = tmp_path / "train.jsonl"
    data.write_text("".join(f'{{"prompt": "w{i}", "ground_truth": "{i}"}}\n' for i in range(9)))
    held_out = tmp_path / "held.jsonl"
    held_out.write_text('{"prompt": "w1", "ground_truth": "1"}\n{"prompt": "w2", "ground_truth": "2"}\n')
    run_dir = tmp_path / "run"

    def make(steps: int = 6, has_eval: bool = False, trims: bool = False, **trainer: Any) -> ServiceContext:
        tree = {
            "model": {"path": str(model), "max_model_len": 64},
            "data": {"train": str(data), "max_prompt_tokens": 8},
            "rollout": {"engine": "simulated", "sampling": {"max_tokens": 8}},
            "trainer": {
                "policy": "simulated",
                "steps": steps,
                "groups_per_step": GROUPS,
                "group_size": SIZE,
                "checkpoint_every": 4,
                "tensorboard": False,
                **trainer,
            },
            "streams": {"trim": trims},
        }
        if has_eval:
            tree["data"]["eval"] = {"held": str(held_out)}
        return make_context(broker, keys, RunConfig.model_validate(tree), run_dir)

    return make


async def run(context: ServiceContext) -> None:
    await asyncio.wait_for(serve(context), 60)


async def crash_after_commit(context: ServiceContext, step: int) -> None:
    """Run a trainer that dies when it has committed `step`, before it does anything else."""
    append_commit = trainer_module.append_commit

    async def append_and_die(broker: Broker, keys: Keys, commit: Commit) -> None:
        await append_commit(broker, keys, commit)
        if commit.step == step:
            raise InterruptedError

    trainer_module.append_commit = append_and_die
    try:
        with pytest.raises(InterruptedError):
            await run(context)
    finally:
        trainer_module.append_commit = append_commit


async def assert_trained_once(broker: Broker, keys: Keys, steps: int) -> list[Commit]:
    """Nothing was lost, and every step has its commit and all its places filled."""
    tickets = await messages(broker, keys.prompts(), Ticket)
    commits = await assert_nothing_lost(broker, keys, len(tickets))
    assert len(commits) == steps
    assert sum(len(commit.trained_keys) for commit in commits) == steps * GROUPS * SIZE
    return commits


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
        await wait_until(lambda: _is_answered(broker, keys))
        await run(make())
    await assert_trained_once(broker, keys, 6)


async def test_readers_that_are_faster_than_the_adoption_of_tickets_lose_nothing(
    make, broker, keys, monkeypatch
):
    adopt = Scheduler.adopt_issued

    async def slowly(scheduler: Scheduler) -> Any:
        adopted = await adopt(scheduler)
        for _ in range(200):
            await asyncio.sleep(0)
        await broker.execute("PING")
        return adopted

    async with answering(broker, keys):
        await crash_after_commit(make(), 2)
        await wait_until(lambda: _is_answered(broker, keys))
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
    assert [(item["version"], item["dataset"]) for item in evaluations] == [(0, "held"), (6, "held")]

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
            await wait_until(lambda version=version: _has_commits(broker, keys, version))
            context.stopping.set()
            await serving
            assert (await read_state(broker, keys))["status"] != FINISHED
        await run(make())
    await assert_trained_once(broker, keys, 6)


async def test_what_was_replaced_before_a_stop_is_told_of_after_it(make, broker, keys):
    """The replacement lies in the checkpoint, the commit that must tell of it is still to come."""
    context = make(max_staleness=0)
    serving = asyncio.ensure_future(run(context))
    await wait_until(lambda: _num_tickets(broker, keys, GROUPS))
    await append(broker, keys.dead, DeadLetter(origin="prompts", entry_id="1-0", error="refused", ticket=0))
    await wait_until(lambda: _num_tickets(broker, keys, GROUPS + 1))
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


class TestEvaluation:
    async def test_evaluations_after_the_checkpoint_are_not_forgotten(self, make, broker, keys):
        """Steps are replayed, evaluations are not: their records must outlive the crash."""
        options = {"has_eval": True, "evaluation": {"every": 1}}
        async with answering(broker, keys):
            await crash_after_commit(make(**options), 2)
            await run(make(**options))
        records = read_records(make().run_dir / METRICS_FILE)
        assert [r["version"] for r in records if r["kind"] == EVALUATION] == list(range(7))
        assert [r["step"] for r in records if r["kind"] == STEP] == list(range(6))

    async def test_an_evaluation_cut_off_between_commit_and_announcement_is_finished_first(
        self, make, broker, keys
    ):
        """Version 0 is under evaluation while step 0 is trained; its workers are not answering yet."""
        options = {"has_eval": True, "max_staleness": 0}
        async with answering(broker, keys, lanes=[Lane.TRAIN]):
            await crash_after_commit(make(**options), 0)
        async with answering(broker, keys):
            await run(make(**options))
        records = read_records(make().run_dir / METRICS_FILE)
        assert [r["version"] for r in records if r["kind"] == EVALUATION] == [0, 6]

    async def test_a_crash_between_record_and_trim_does_not_make_the_next_start_wait(
        self, make, broker, keys, monkeypatch
    ):
        async def die(*_: object) -> None:
            raise InterruptedError

        async with answering(broker, keys):
            with monkeypatch.context() as patch:
                patch.setattr(Evaluator, "trim", die)
                with pytest.raises(InterruptedError):
                    await run(make(has_eval=True))
            await run(make(has_eval=True))
        records = read_records(make().run_dir / METRICS_FILE)
        assert [r["version"] for r in records if r["kind"] == EVALUATION] == [0, 6]

    async def test_a_failing_evaluation_ends_the_run_with_its_error(self, make, broker, keys, monkeypatch):
        async def fail(*_: object) -> None:
            raise RuntimeError("the evaluation broke")

        monkeypatch.setattr(Evaluator, "evaluate", fail)
        async with answering(broker, keys):
            with pytest.raises(RuntimeError, match="the evaluation broke"):
                await run(make(has_eval=True, evaluation={"at_start": False}))
        assert (await read_state(broker, keys))["status"] != FINISHED


async def test_a_full_disk_is_waited_out_and_can_be_stopped(make, broker, keys, monkeypatch):
    """A step whose weights cannot be written is not committed; no checkpoint calls it an older version."""
    context = make()
    write = WeightStore.write

    def full(store: WeightStore, version: int, policy: Any) -> WeightManifest:
        if version == 2:
            context_loop.call_soon_threadsafe(context.stopping.set)
            raise StorageError("the weights", store.folder, 28, "No space left on device")
        return write(store, version, policy)

    context_loop = asyncio.get_running_loop()
    async with answering(broker, keys):
        with monkeypatch.context() as patch:
            patch.setattr(WeightStore, "write", full)
            await run(context)
        assert await num_commits(broker, keys) == 1
        await run(make())
    commits = await assert_trained_once(broker, keys, 6)
    digests = await replayed_digests(broker, keys, context.config, SimulatedPolicy(context.config))
    assert [commit.digest for commit in commits] == digests


async def test_an_older_checkpoint_can_still_be_restored_after_a_stop(make, broker, keys, monkeypatch):
    """A stop right after a checkpoint writes it once more; that does not make the one before dispensable."""
    context = make(steps=12, trims=True)
    save = Checkpointer.save

    async def save_and_stop(checkpointer: Checkpointer, version: int, dropped: Any) -> None:
        await save(checkpointer, version, dropped)
        if version == 8:
            context.stopping.set()

    async with answering(broker, keys):
        with monkeypatch.context() as patch:
            patch.setattr(Checkpointer, "save", save_and_stop)
            await run(context)
        store = CheckpointStore(context.run_dir, keep=2)
        assert store.versions() == [4, 8]
        (store.folder / "v00000008" / "checkpoint.json").write_text("torn")
        await run(make(steps=12, trims=True))
    assert await num_commits(broker, keys) == 12


class TestAfterRedisLostItsTail:
    async def test_a_lost_commit_comes_back_before_the_next_one(self, make, broker, keys, monkeypatch):
        """Behind the next one there would be no place for it any more, and no way to replay it."""
        train = StepRunner.run

        async def lose_and_train(runner: StepRunner, step: int, collector: Any) -> Any:
            result = await train(runner, step, collector)
            if step == 3:
                await lose_tail(broker, keys.commits, "1-0")
            return result

        monkeypatch.setattr(StepRunner, "run", lose_and_train)
        async with answering(broker, keys):
            await run(make())
        await assert_trained_once(broker, keys, 6)

    async def test_the_trainer_saves_a_checkpoint_at_once_when_redis_has_restarted(
        self, make, broker, keys, monkeypatch
    ):
        """What was trained on may be gone, so that the steps since the last checkpoint cannot be replayed."""
        info, saved, save = broker.info, [], Checkpointer.save

        async def info_of_two_servers(section: str) -> dict[str, str]:
            found = await info(section)
            return found | {"run_id": "second" if await num_commits(broker, keys) >= 2 else "first"}

        async def note(checkpointer: Checkpointer, version: int, dropped: Any) -> None:
            saved.append(version)
            await save(checkpointer, version, dropped)

        monkeypatch.setattr(broker, "info", info_of_two_servers)
        monkeypatch.setattr(Checkpointer, "save", note)
        async with answering(broker, keys):
            await run(make())
        assert saved == [3, 4, 6]
        await assert_trained_once(broker, keys, 6)

    async def test_an_evaluation_gets_the_announcement_back_that_its_workers_wait_for(
        self, make, broker, keys
    ):
        serving = asyncio.ensure_future(run(make(steps=1, has_eval=True)))
        await wait_until(lambda: _is_announced(broker, keys))
        async with answering(broker, keys, lanes=[Lane.TRAIN]):
            await wait_until(lambda: _has_commits(broker, keys, 1))
            await broker.execute("DEL", keys.weights)
            await wait_until(lambda: _is_announced(broker, keys), what="version 0 is announced again")
        async with answering(broker, keys):
            await serving


async def test_weights_that_were_announced_stay_as_the_workers_know_them(make, broker, keys, monkeypatch):
    """A replay that is not exact must not change the bytes under a manifest that is out already."""
    async with answering(broker, keys):
        serving = asyncio.ensure_future(run(make(steps=100, max_staleness=0)))
        await wait_until(lambda: _has_commits(broker, keys, 2))
    await wait_until(lambda: _is_at_rest(broker, keys))
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    for folder in (make().run_dir / "checkpoints").glob("v*"):
        shutil.rmtree(folder)

    def start_elsewhere(policy: SimulatedPolicy, config: RunConfig) -> None:
        initialise(policy, config)
        policy._chain = b"elsewhere elsew."

    initialise = SimulatedPolicy.__init__
    monkeypatch.setattr(SimulatedPolicy, "__init__", start_elsewhere)
    context = make(steps=100, max_staleness=0)
    serving = asyncio.ensure_future(run(context))
    await wait_until(lambda: context.activity.state in ("wait:trajectories", "wait:scores"))
    newest = (await messages(broker, keys.weights, WeightManifest))[-1]
    assert newest.version >= 2
    assert verified_files(context.run_dir, newest)
    context.stopping.set()
    await serving


async def test_a_reader_that_fails_ends_the_trainer_with_its_error(make, broker, keys, monkeypatch):
    async def fail(self: Intake) -> None:
        raise RuntimeError("the reader broke")

    monkeypatch.setattr(Intake, "read_scores", fail)
    async with answering(broker, keys):
        with pytest.raises(RuntimeError, match="the reader broke"):
            await run(make())


async def test_memory_does_not_grow_with_the_steps(make, broker, keys):
    """Streams are trimmed below the oldest kept checkpoint; commits stay."""
    context = make(steps=40, trims=True, checkpoint_every=4, keep_checkpoints=1)
    async with answering(broker, keys):
        await run(context)
    lengths = {
        key: await broker.execute("XLEN", key)
        for key in (keys.prompts(), keys.trajectories(), keys.scores(), keys.weights)
    }
    assert await num_commits(broker, keys) == 40
    assert lengths[keys.prompts()] <= 2
    assert max(lengths[keys.trajectories()], lengths[keys.scores()]) <= 2
    assert lengths[keys.weights] <= 1 + context.config.trainer.keep_weights
    assert await broker.execute("KEYS", keys.progress(0).replace(":0", ":*")) == []


async def _num_tickets(broker: Broker, keys: Keys, count: int) -> bool:
    return int(await broker.execute("XLEN", keys.prompts())) == count


async def _has_commits(broker: Broker, keys: Keys, count: int) -> bool:
    return await num_commits(broker, keys) >= count


async def _is_announced(broker: Broker, keys: Keys) -> bool:
    return bool(await broker.execute("XLEN", keys.weights))


async def _is_at_rest(broker: Broker, keys: Keys) -> bool:
    """Nobody answers any more, and everything that was answered is trained and announced."""
    tickets = await broker.execute("XLEN", keys.prompts())
    num_announced = id_order(await last_id(broker, keys.weights))[0] - 1
    return num_announced == await num_commits(broker, keys) == tickets / GROUPS - 1


async def _is_answered(broker: Broker, keys: Keys) -> bool:
    tickets = await broker.execute("XLEN", keys.prompts())
    return bool(await broker.execute("XLEN", keys.scores()) == tickets * SIZE)
