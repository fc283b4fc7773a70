"""Redis comes back without its last second, and the trainer gives it back what it has lost."""

import asyncio
from typing import Any

import pytest

from tests.support.training import (
    answering,
    commits_of,
    lose_tail,
    messages,
    num_commits,
    publish_group,
)
from tests.support.waiting import wait_until
from tests.support.whole_trainer import (
    GROUPS,
    SIZE,
    assert_trained_once,
    crash_after_commit,
    has_commits,
    has_tickets,
    run,
)
from tidemill.common.errors import TidemillError
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import FINISHED, read_state
from tidemill.common.streams import Entry, entry_id_of, read_range
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit, Lane, Score, Trajectory, WeightManifest
from tidemill.services.trainer import trainer as trainer_module
from tidemill.services.trainer.durable.checkpointing import Checkpointer
from tidemill.services.trainer.step import StepRunner
from tidemill.services.trainer.trainer import Trainer


async def test_a_lost_commit_comes_back_before_the_next_one(make, broker, keys, monkeypatch):
    """Behind the next one there would be no place for it any more, and no way to replay it."""
    train = StepRunner.run

    async def lose_and_train(runner: StepRunner, step: int, assembler: Any) -> Any:
        result = await train(runner, step, assembler)
        if step == 3:
            await lose_tail(broker, keys.commits, "1-0")
        return result

    monkeypatch.setattr(StepRunner, "run", lose_and_train)
    async with answering(broker, keys):
        await run(make())
    await assert_trained_once(broker, keys, 6)


@pytest.mark.parametrize("num_lost", [1, 2, 4])
async def test_commits_come_back_however_many_are_lost_and_however_often_the_trainer_saves(
    make, broker, keys, monkeypatch, num_lost
):
    """A replica that takes over may be several steps behind; what is still needed must not be forgotten."""
    train = StepRunner.run

    async def lose_and_train(runner: StepRunner, step: int, assembler: Any) -> Any:
        result = await train(runner, step, assembler)
        if step == 4:
            await lose_tail(broker, keys.commits, f"{4 - num_lost}-0")
        return result

    monkeypatch.setattr(StepRunner, "run", lose_and_train)
    async with answering(broker, keys):
        await run(make(checkpoint_every=1))
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


async def test_the_next_trainer_announces_the_version_that_the_run_stands_at_once_more(make, broker, keys):
    """Also where the stream has it: workers may hold a newer one, which nobody knows any more."""
    async with answering(broker, keys):
        for steps in (2, 2, 3):
            await run(make(steps=steps, checkpoint_every=1))
    manifests = await messages(broker, keys.weights, WeightManifest)
    assert [(m.version, m.term) for m in manifests] == [(0, 1), (1, 1), (2, 1), (2, 2), (2, 3), (3, 3)]


@pytest.mark.parametrize("num_lost", [2, 4])
async def test_commits_that_were_lost_with_the_trainer_come_back_with_the_next_one(
    make, broker, keys, num_lost
):
    async with answering(broker, keys):
        await crash_after_commit(make(checkpoint_every=1), 4)
        before = (await commits_of(broker, keys))[:4]
        await lose_tail(broker, keys.commits, f"{4 - num_lost}-0")
        await run(make(checkpoint_every=1))
    assert (await assert_trained_once(broker, keys, 6))[:4] == before


async def test_a_hole_among_the_commits_ends_the_run_with_what_is_missing(make, broker, keys):
    """Commits are gone, and so is the journal that would give them back."""
    context = make(checkpoint_every=1)
    async with answering(broker, keys):
        await crash_after_commit(context, 4)
        await lose_tail(broker, keys.commits, "2-0")
        (context.run_dir / "commits.jsonl").unlink()
        with pytest.raises(TidemillError, match=r"lost the commits of steps 2 to 3.*Restore"):
            await run(make(checkpoint_every=1))
    assert [commit.step for commit in await commits_of(broker, keys)] == [0, 1]


async def test_a_commit_that_only_a_checkpoint_still_knows_comes_back_with_the_next_trainer(
    make, broker, keys, monkeypatch
):
    """Redis loses its last second and the trainer its process: nobody is left to remember but the disk."""
    begin = Checkpointer.begin

    async def write_and_die(checkpointer: Checkpointer, version: int, *rest: Any) -> None:
        await begin(checkpointer, version, *rest)
        await checkpointer.finish()
        raise InterruptedError

    async with answering(broker, keys):
        with monkeypatch.context() as patch:
            patch.setattr(Checkpointer, "begin", write_and_die)
            with pytest.raises(InterruptedError):
                await run(make())
        before = await commits_of(broker, keys)
        assert [commit.step for commit in before] == [0, 1, 2, 3]
        await lose_tail(broker, keys.commits, "2-0")
        await run(make())
    commits = await assert_trained_once(broker, keys, 6)
    assert commits[:4] == before


async def test_records_that_redis_has_lost_are_not_needed_once_their_commit_is_out(
    make, broker, keys, monkeypatch
):
    """Redis loses what a step has trained on, and the trainer dies as soon as it has committed the step."""
    info, train, is_second = broker.info, StepRunner.run, False

    async def info_of_two_servers(section: str) -> dict[str, str]:
        return await info(section) | {"run_id": "second" if is_second else "first"}

    async def train_and_lose(runner: StepRunner, step: int, assembler: Any) -> Any:
        nonlocal is_second
        result = await train(runner, step, assembler)
        if step == 2:
            await lose_tail(broker, keys.commits, "1-0")
            for key in (keys.trajectories(), keys.scores()):
                for group in result.groups:
                    await _lose_group(broker, key, group.ticket)
            is_second = True
        return result

    monkeypatch.setattr(broker, "info", info_of_two_servers)
    async with answering(broker, keys):
        with monkeypatch.context() as patch:
            patch.setattr(StepRunner, "run", train_and_lose)
            await crash_after_commit(make(), 2)
        assert [commit.step for commit in await commits_of(broker, keys)] == [0, 1, 2]
        await run(make())
    commits = await commits_of(broker, keys)
    assert [commit.step for commit in commits] == list(range(6))
    trained = [key for commit in commits for key in commit.trained_keys]
    assert len(trained) == len(set(trained)) == 6 * GROUPS * SIZE


async def test_the_trainer_saves_a_checkpoint_at_once_when_redis_has_restarted(
    make, broker, keys, monkeypatch
):
    """What was trained on may be gone, so that the steps since the last checkpoint cannot be replayed."""
    info, saved, begin = broker.info, [], Checkpointer.begin

    async def info_of_two_servers(section: str) -> dict[str, str]:
        found = await info(section)
        return found | {"run_id": "second" if await num_commits(broker, keys) >= 2 else "first"}

    async def note(checkpointer: Checkpointer, version: int, *rest: Any) -> None:
        saved.append(version)
        await begin(checkpointer, version, *rest)

    monkeypatch.setattr(broker, "info", info_of_two_servers)
    monkeypatch.setattr(Checkpointer, "begin", note)
    async with answering(broker, keys):
        await run(make())
    assert saved == [2, 4, 6]
    await assert_trained_once(broker, keys, 6)


async def test_an_evaluation_gets_the_announcement_back_that_its_workers_wait_for(make, broker, keys):
    serving = asyncio.ensure_future(run(make(steps=1, has_eval=True)))
    await wait_until(lambda: _is_announced(broker, keys))
    async with answering(broker, keys, lanes=[Lane.TRAIN]):
        await wait_until(lambda: has_commits(broker, keys, 1))
        await broker.execute("DEL", keys.weights)
        await wait_until(lambda: _is_announced(broker, keys), what="version 0 is announced again")
    async with answering(broker, keys):
        await serving


async def _is_announced(broker: Broker, keys: Keys) -> bool:
    return bool(await broker.execute("XLEN", keys.weights))


async def _lose_group(broker: Broker, key: str, ticket: int) -> None:
    kind = Trajectory if "trajectories" in key else Score
    for entry in await read_range(broker, key, kind):
        if isinstance(entry, Entry) and entry.message.ticket == ticket:
            await broker.execute("XDEL", key, entry.entry_id)


async def test_a_run_is_over_only_where_redis_has_its_last_commit(make, broker, keys, monkeypatch):
    """Another server may take over between the last commit and the word that the run is finished."""
    finish, lost = trainer_module.finish_state, []

    async def lose_and_finish(*arguments: Any, **state: Any) -> bool:
        if not lost:
            lost.append(await lose_tail(broker, keys.commits, entry_id_of(3)))
        return await finish(*arguments, **state)

    monkeypatch.setattr(trainer_module, "finish_state", lose_and_finish)
    async with answering(broker, keys):
        await run(make())
    await assert_trained_once(broker, keys, 6)
    assert (await read_state(broker, keys))["status"] == FINISHED


async def test_a_checkpoint_comes_before_a_commit_whose_mark_is_lost(make, broker, keys, monkeypatch):
    """What the step was trained on may be gone with the mark: nobody could replay the commit."""
    append_commit, save, order = trainer_module.append_commit, Trainer._save, []

    async def lose_and_append(_broker: Broker, _keys: Keys, commit: Commit, *mark: Any) -> None:
        if commit.step == 3 and "lost" not in order:
            order.append("lost")
            await broker.execute("HDEL", keys.state, "committing")
        await append_commit(_broker, _keys, commit, *mark)
        order.append(commit.step)

    async def note_save(trainer: Trainer) -> None:
        await save(trainer)
        order.append(f"version {trainer.version}")

    monkeypatch.setattr(trainer_module, "append_commit", lose_and_append)
    monkeypatch.setattr(Trainer, "_save", note_save)
    async with answering(broker, keys):
        await run(make(checkpoint_every=100))
    assert order[order.index("lost") :][:3] == ["lost", "version 4", 3]
