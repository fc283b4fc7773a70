"""Without an archive, commits and dead letters stay bounded in Redis, and the run's history has no hole."""

import asyncio
import shutil
from collections.abc import Callable

import pytest

from tests.support.consumers import make_letter
from tests.support.training import answering, commits_of
from tests.support.whole_trainer import GROUPS, SIZE, crash_after_commit, empty, run
from tidemill.common.errors import TidemillError
from tidemill.common.history import History, StreamName
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import publish_config
from tidemill.common.streams import Garbled, append, entry_id_of, length, trim_before
from tidemill.common.streams.log import newest_begin
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.durable import checkpointing, commits
from tidemill.services.trainer.durable.commits import CommitJournal

KEPT = 2
STEPS = 10


@pytest.fixture(autouse=True)
def few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checkpointing, commits):
        monkeypatch.setattr(module, "KEPT_COMMITS", KEPT)


def trimming(make: Callable[..., ServiceContext], steps: int = STEPS, keep: int = 1) -> ServiceContext:
    return make(steps, trims=True, checkpoint_every=1, keep_checkpoints=keep)


async def steps_in_redis(broker: Broker, keys: Keys) -> list[int]:
    return [commit.step for commit in await commits_of(broker, keys)]


async def assert_whole(context: ServiceContext, steps: int = STEPS) -> None:
    """Journal and stream together are the history, and no sample was trained twice."""
    history = History(context.keys.run_id, context.run_dir, context.broker)
    found = [commit async for commit in history.messages(StreamName.COMMITS, Commit)]
    assert [commit.step for commit in found] == list(range(steps))
    trained = [key for commit in found for key in commit.trained_keys]
    assert len(trained) == len(set(trained)) == steps * GROUPS * SIZE


@pytest.mark.parametrize("keep", [1, 2])
async def test_the_newest_commits_stay_and_those_that_a_kept_checkpoint_needs(make, broker, keys, keep):
    context = trimming(make, keep=keep)
    await publish_config(broker, keys, context.config)
    async with answering(broker, keys):
        await run(context)
    oldest = STEPS - (keep - 1)
    assert await steps_in_redis(broker, keys) == list(range(oldest - KEPT, STEPS))
    await assert_whole(context)


async def test_nothing_is_trimmed_where_trimming_is_off(make, broker, keys):
    context = make(STEPS, checkpoint_every=1, keep_checkpoints=1)
    await publish_config(broker, keys, context.config)
    async with answering(broker, keys):
        await run(context)
    assert await steps_in_redis(broker, keys) == list(range(STEPS))


async def test_a_trainer_that_dies_after_a_trim_goes_on_without_a_hole(make, broker, keys):
    context = trimming(make)
    await publish_config(broker, keys, context.config)
    async with answering(broker, keys):
        for step in (5, 7):
            await crash_after_commit(trimming(make), step)
            assert (await steps_in_redis(broker, keys))[0] > 0
        await run(trimming(make))
    await assert_whole(context)


@pytest.mark.parametrize("is_running", [False, True])
async def test_an_emptied_redis_gets_the_newest_commits_back_and_the_history_is_whole(
    make, broker, keys, is_running
):
    await publish_config(broker, keys, make().config)
    async with answering(broker, keys):
        if is_running:
            await crash_after_commit(trimming(make), 6)
        else:
            await run(trimming(make, 7))
        await empty(broker, keys)
        context = trimming(make)
        await publish_config(broker, keys, context.config)
        await run(context)
    assert (await steps_in_redis(broker, keys))[0] > 0
    await assert_whole(context)


async def test_an_emptied_redis_is_given_no_more_than_is_kept(make, broker, keys, tmp_path):
    journal = CommitJournal(tmp_path)
    for step in range(6):
        journal.append(Commit(step=step, version=step + 1, mini_batches=(((),),), groups=(), digest="0" * 32))
    await commits.restore_commits(broker, keys, journal, 5, is_trimmed=True)
    assert await steps_in_redis(broker, keys) == [3, 4]
    await commits.restore_commits(broker, keys, journal, is_trimmed=True)
    assert await steps_in_redis(broker, keys) == [3, 4, 5]
    await broker.execute("DEL", keys.commits)
    await commits.restore_commits(broker, keys, journal)
    assert await steps_in_redis(broker, keys) == list(range(6))


async def test_commits_that_the_journal_lacks_stay_in_redis(make, broker, keys):
    """It was damaged at its start, so that it holds later steps alone."""
    context = trimming(make)
    await publish_config(broker, keys, context.config)
    async with answering(broker, keys):
        await run(make(4, checkpoint_every=1, keep_checkpoints=1))
        (context.run_dir / "commits.jsonl").unlink()
        for step in range(2):
            await broker.execute("XDEL", keys.commits, entry_id_of(step))
        journal = CommitJournal(context.run_dir)
        journal.append((await commits_of(broker, keys))[-1])
        await run(context)
    assert await steps_in_redis(broker, keys) == list(range(2, STEPS))


async def test_an_older_checkpoint_that_cannot_be_replayed_costs_the_journal_nothing(make, broker, keys):
    """What was trained on since is trimmed: the trainer ends, and the newer checkpoint still can go on."""
    context = trimming(make)
    await publish_config(broker, keys, context.config)
    async with answering(broker, keys):
        await run(trimming(make, 3))
        folder = context.run_dir / "checkpoints"
        shutil.copytree(folder, context.run_dir / "older")
        await run(trimming(make, 8))
        shutil.move(folder, context.run_dir / "newer")
        shutil.copytree(context.run_dir / "older", folder)
        with pytest.raises(TidemillError):
            await run(trimming(make))
        assert CommitJournal(context.run_dir).steps == range(8)
        shutil.rmtree(folder)
        shutil.move(context.run_dir / "newer", folder)
        await run(trimming(make))
    await assert_whole(context)


async def test_a_step_that_another_trainer_has_committed_is_still_refused(make, broker, keys):
    context = trimming(make)
    await publish_config(broker, keys, context.config)
    async with answering(broker, keys):
        await run(context)
    newest = (await commits_of(broker, keys))[-1]
    with pytest.raises(commits.SecondTrainerError):
        await commits.append_commit(broker, keys, newest.model_copy(update={"digest": "f" * 32}))
    with pytest.raises(commits.SecondTrainerError):
        await commits.append_commit(broker, keys, Commit.model_validate({**newest.model_dump(), "step": 0}))


async def test_of_dead_letters_the_newest_stay(broker: Broker, keys: Keys) -> None:
    assert await newest_begin(broker, keys.dead, 4) == "0-0"
    letters = [make_letter(Garbled(f"{number}-0", {}, "no")) for number in range(1, 8)]
    ids = await append(broker, keys.dead, *letters)
    assert await newest_begin(broker, keys.dead, 7) == "0-0"
    await trim_before(broker, keys.dead, await newest_begin(broker, keys.dead, 4))
    assert await length(broker, keys.dead) == 4
    assert await broker.execute("XLEN", keys.dead) == len(ids) - 3


async def test_dead_letters_that_the_trainer_has_read_are_trimmed_at_a_checkpoint(
    make, broker, keys, monkeypatch
):
    async def newest_two(broker: Broker, key: str) -> str:
        return await newest_begin(broker, key, 2)

    monkeypatch.setattr(checkpointing, "newest_begin", newest_two)
    letters = [make_letter(Garbled(f"{number}-0", {}, "no")) for number in range(1, 7)]
    await append(broker, keys.dead, *letters)
    context = trimming(make)
    await publish_config(broker, keys, context.config)
    async with answering(broker, keys):
        await asyncio.wait_for(run(context), 60)
    assert await length(broker, keys.dead) == 2
