"""Redis comes back without its last second, or emptied, and the trainer gives it back what it has lost."""

import asyncio
from argparse import Namespace

import pytest
from structlog.testing import capture_logs

from tests.support.training import answering, commits_of, lose_tail, messages, num_commits, publish_group
from tests.support.waiting import wait_until
from tests.support.whole_trainer import (
    GROUPS,
    SIZE,
    after_training,
    assert_each_once,
    assert_trained_once,
    crash_after_commit,
    empty,
    has_commits,
    has_tickets,
    run,
)
from tidemill.common.errors import TidemillError
from tidemill.common.process import service
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import FINISHED, RUNNING, publish_config, read_config, read_state
from tidemill.common.streams import Entry, entry_id_of, read_range
from tidemill.common.wire.keys import Keys, StreamName
from tidemill.common.wire.messages import Lane, Ticket, WeightManifest
from tidemill.services.trainer import trainer as trainer_module
from tidemill.services.trainer.durable.checkpointing import Checkpointer
from tidemill.services.trainer.durable.commits import CommitJournal
from tidemill.services.trainer.trainer import Trainer


@pytest.mark.parametrize(("step", "num_left", "every"), [(3, 1, 4), (4, 3, 1), (4, 2, 1), (4, 0, 1)])
async def test_lost_commits_come_back_before_the_next_one_however_many_and_however_often_the_trainer_saves(
    make, broker, keys, answers, monkeypatch, step, num_left, every
):
    """Behind the next one there would be no place for them any more, and no way to replay them."""
    after_training(monkeypatch, step, lambda _: lose_tail(broker, keys.commits, f"{num_left}-0"))
    await run(make(checkpoint_every=every))
    await assert_trained_once(broker, keys, 6)


async def test_a_run_that_goes_back_with_its_trainer_trains_nothing_of_the_history_that_it_lost(
    make, broker, keys
):
    """On policy; Redis loses two steps and the trainer dies, while workers live on with newer versions."""
    async with answering(broker, keys):
        await crash_after_commit(make(max_staleness=0, checkpoint_every=1, keep_weights=8), 1)
    serving = asyncio.ensure_future(run(make(max_staleness=0)))
    await wait_until(lambda: has_tickets(broker, keys, 6))
    for ticket in (4, 5):  # by weights that this run will never have
        await publish_group(broker, keys, ticket, size=SIZE, version=4)
    async with answering(broker, keys):
        await serving
    commits = await commits_of(broker, keys)
    assert [commit.step for commit in commits] == list(range(6))
    assert sum(reason == "stale" for c in commits for _, index, reason in c.dropped if index < 0) == 2
    manifests = await messages(broker, keys.weights, WeightManifest)
    assert [manifest.term for manifest in manifests][-1] == 2


@pytest.mark.usefixtures("answers")
async def test_the_next_trainer_announces_the_version_that_the_run_is_at_once_more(make, broker, keys):
    """Also where the stream has it: workers may hold a newer one, which nobody knows any more."""
    for steps in (2, 2, 3):
        await run(make(steps=steps, checkpoint_every=1))
    manifests = await messages(broker, keys.weights, WeightManifest)
    assert [(m.version, m.term) for m in manifests] == [(0, 1), (1, 1), (2, 1), (2, 2), (2, 3), (3, 3)]


@pytest.mark.parametrize("num_lost", [2, 4])
async def test_commits_that_were_lost_with_the_trainer_come_back_with_the_next_one(
    make, broker, keys, answers, num_lost
):
    """Or their lack is said, where the journal is gone too."""
    context = make(checkpoint_every=1)
    await crash_after_commit(context, 4)
    before = (await commits_of(broker, keys))[:4]
    await lose_tail(broker, keys.commits, f"{4 - num_lost}-0")
    journal = context.run_dir / "commits.jsonl"
    kept = journal.read_bytes()
    journal.unlink()
    with pytest.raises(TidemillError, match=rf"commits of steps {4 - num_lost} to 3.*Restore"):
        await run(make(checkpoint_every=1))
    assert len(await commits_of(broker, keys)) == 4 - num_lost
    journal.write_bytes(kept)
    await run(make(checkpoint_every=1))
    assert (await assert_trained_once(broker, keys, 6))[:4] == before


async def test_records_that_redis_has_lost_are_not_needed_once_their_commit_is_out(
    make, broker, keys, answers, monkeypatch
):
    """Redis loses what a step has trained on, and the trainer dies as soon as it has committed the step."""
    info = broker.info
    is_second = False

    async def info_of_two_servers(section):
        return await info(section) | {"run_id": "second" if is_second else "first"}

    async def lose(result):
        nonlocal is_second
        await lose_tail(broker, keys.commits, "1-0")
        for stream in (StreamName.TRAJECTORIES, StreamName.SCORES):
            for entry in await read_range(broker, stream.key(keys), stream.message_type):
                assert isinstance(entry, Entry)
                if entry.message.ticket in {group.ticket for group in result.groups}:
                    await broker.execute("XDEL", stream.key(keys), entry.entry_id)
        is_second = True

    monkeypatch.setattr(broker, "info", info_of_two_servers)
    with monkeypatch.context() as patch:
        after_training(patch, 2, lose)
        await crash_after_commit(make(), 2)
    assert [commit.step for commit in await commits_of(broker, keys)] == [0, 1, 2]
    await run(make())
    assert_each_once(await commits_of(broker, keys), 6)


async def test_the_trainer_saves_a_checkpoint_at_once_when_redis_has_restarted(
    make, broker, keys, answers, monkeypatch
):
    """What was trained on may be gone, so that the steps since the last checkpoint cannot be replayed."""
    info = broker.info
    saved = []
    begin = Checkpointer.begin

    async def info_of_two_servers(section):
        facts = await info(section)
        return facts | {"run_id": "second" if await num_commits(broker, keys) >= 2 else "first"}

    async def note(checkpointer, version, *arguments):
        saved.append(version)
        await begin(checkpointer, version, *arguments)

    monkeypatch.setattr(broker, "info", info_of_two_servers)
    monkeypatch.setattr(Checkpointer, "begin", note)
    await run(make())
    assert saved == [2, 4, 6]
    await assert_trained_once(broker, keys, 6)


async def test_an_evaluation_gets_the_announcement_back_that_its_workers_wait_for(make, broker, keys):
    async def is_announced():
        return bool(await broker.execute("XLEN", keys.weights))

    serving = asyncio.ensure_future(run(make(steps=1, has_eval=True)))
    await wait_until(is_announced)
    async with answering(broker, keys, lanes=[Lane.TRAIN]):
        await wait_until(lambda: has_commits(broker, keys, 1))
        await broker.execute("DEL", keys.weights)
        await wait_until(is_announced, awaited="version 0 is announced again")
    async with answering(broker, keys):
        await serving


@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.usefixtures("answers")
async def test_a_run_is_over_only_where_redis_has_its_last_commit(make, broker, keys, monkeypatch, is_hidden):
    """Another server may take over between the last commit and the word that the run is finished. An entry of
    somebody else's may stand where the commits end now."""
    finish = trainer_module.finish_state
    lost = []

    async def lose_and_finish(*arguments, **state):
        if not lost:
            lost.append(await lose_tail(broker, keys.commits, entry_id_of(3)))
            if is_hidden:
                await broker.execute("XADD", keys.commits, "*", "hello", "world")
        return await finish(*arguments, **state)

    monkeypatch.setattr(trainer_module, "finish_state", lose_and_finish)
    await run(make())
    await assert_trained_once(broker, keys, 6)
    assert (await read_state(broker, keys))["status"] == FINISHED


@pytest.mark.usefixtures("answers")
async def test_a_checkpoint_comes_before_a_commit_whose_mark_is_lost(make, broker, keys, monkeypatch):
    """What the step was trained on may be gone with the mark: nobody could replay the commit."""
    append_commit = trainer_module.append_commit
    save = Trainer._save
    order = []

    async def lose_and_append(_broker, _keys, commit, *mark):
        if commit.step == 3 and "lost" not in order:
            order.append("lost")
            await broker.execute("HDEL", keys.state, "committing")
        await append_commit(_broker, _keys, commit, *mark)
        order.append(commit.step)

    async def note_save(trainer):
        await save(trainer)
        order.append(f"version {trainer.version}")

    monkeypatch.setattr(trainer_module, "append_commit", lose_and_append)
    monkeypatch.setattr(Trainer, "_save", note_save)
    await run(make(checkpoint_every=100))
    assert order[order.index("lost") :][:3] == ["lost", "version 4", 3]


class TestEmptied:
    """FLUSHALL, or the AOF is gone."""

    @staticmethod
    async def assert_whole(broker: Broker, keys: Keys) -> None:
        """Redis has the whole history again, no sample was trained twice, and a worker may join."""
        assert_each_once(await commits_of(broker, keys), 6)
        assert (await read_config(broker, keys)).trainer.steps == 6

    @pytest.mark.parametrize("step", [0, 3, 5])
    async def test_while_a_step_is_trained(self, make, broker, keys, answers, monkeypatch, step):
        after_training(monkeypatch, step, lambda _: empty(broker, keys))
        await run(make())
        await self.assert_whole(broker, keys)

    async def test_while_the_trainer_waits(self, make, broker, keys):
        serving = asyncio.ensure_future(run(make()))
        async with answering(broker, keys):
            await wait_until(lambda: has_commits(broker, keys, 2))

        async def waits():  # it may have committed one step more before the answers ended
            return await has_tickets(broker, keys, GROUPS * (await num_commits(broker, keys) + 2))

        await wait_until(waits)
        await empty(broker, keys)
        async with answering(broker, keys):
            await serving
        await self.assert_whole(broker, keys)

    async def test_while_there_is_no_trainer(self, make, broker, keys, monkeypatch):
        """Also the config comes back from the run's folder, so that a restart needs no person."""
        context = make(has_eval=True)
        async with answering(broker, keys):
            await crash_after_commit(context, 4)
        await empty(broker, keys)
        with monkeypatch.context() as patch:
            patch.setenv("TIDEMILL_RUNS_DIR", str(context.run_dir.parent))
            (context.run_dir.parent / keys.run_id).symlink_to(context.run_dir)
            config = await service._find_config("trainer", broker, keys, Namespace())
        assert config.trainer == context.config.trainer == (await read_config(broker, keys)).trainer
        assert (await read_state(broker, keys)).get("status") in (None, RUNNING)
        async with answering(broker, keys):
            await run(make(has_eval=True))
        await self.assert_whole(broker, keys)
        evaluations = (await read_state(broker, keys))["evaluations"]
        assert [(item["version"], item["set"]) for item in evaluations] == [(0, "held"), (6, "held")]

    async def test_a_run_with_a_checkpoint_does_not_begin_again(self, make, broker, keys, answers):
        """Its journal is gone too: Redis could not be given back the commits below the checkpoint."""
        context = make(checkpoint_every=1)
        await crash_after_commit(context, 4)
        await empty(broker, keys)
        (context.run_dir / "commits.jsonl").unlink()
        with pytest.raises(TidemillError, match=r"commits of steps 0 to 3.*Restore"):
            await run(make(checkpoint_every=1))
        assert not await commits_of(broker, keys)

    async def test_a_run_that_begins_again_forgets_the_commits_that_only_its_journal_has(
        self, make, broker, keys
    ):
        """No checkpoint covers them, so they cannot be replayed."""
        context = make(checkpoint_every=100)
        async with answering(broker, keys):
            await crash_after_commit(context, 1)
        assert CommitJournal(context.run_dir).steps == range(2)
        await empty(broker, keys)
        serving = asyncio.ensure_future(run(make(checkpoint_every=100)))
        await wait_until(lambda: has_tickets(broker, keys, 2 * GROUPS))
        assert CommitJournal(context.run_dir).steps == range(0)
        async with answering(broker, keys):
            await serving
        await self.assert_whole(broker, keys)

    async def test_a_trainer_that_dies_right_after_it_leaves_a_run_to_go_on_with(
        self, make, broker, keys, monkeypatch
    ):
        """It has issued the tickets of its last version again, and the checkpoint is of an earlier one."""
        context = make(checkpoint_every=2)
        await publish_config(broker, keys, context.config)
        append_commit = trainer_module.append_commit
        saves = Trainer._save

        async def never(_broker, _keys, commit, *mark):
            if commit.step == 4:
                raise InterruptedError
            await append_commit(_broker, _keys, commit, *mark)
            if commit.step == 3:
                await empty(broker, keys)

        async def save_early(trainer):
            if trainer.version <= 2:
                await saves(trainer)

        with monkeypatch.context() as patch:
            patch.setattr(trainer_module, "append_commit", never)
            patch.setattr(Trainer, "_save", save_early)
            async with answering(broker, keys):
                with pytest.raises(InterruptedError):
                    await run(context)
        assert min(t.ticket for t in await messages(broker, keys.prompts(), Ticket)) > 3 * GROUPS
        with capture_logs() as logs:
            async with answering(broker, keys):
                await run(make(checkpoint_every=2))
        await self.assert_whole(broker, keys)
        assert not [line for line in logs if line["event"] == "no stream holds what is missing of this group"]
