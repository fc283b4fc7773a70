"""Without an archive, commits and dead letters stay bounded in Redis, and the run's history has no hole."""

import shutil
from collections.abc import Callable
from functools import partial

import pytest

from tests.support.consumers import make_dead_letter
from tests.support.training import answering, commits_of
from tests.support.trajectories import make_commit
from tests.support.whole_trainer import GROUPS, SIZE, crash_after_commit, empty, run
from tidemill.common.errors import TidemillError
from tidemill.common.history import History, StreamName
from tidemill.common.process.service import ServiceContext
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import START, Garbled, append, entry_id_of, length
from tidemill.common.streams.log import newest_begin
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.durable import checkpointing, commits
from tidemill.services.trainer.durable.commits import CommitJournal

KEPT = 2
STEPS = 10

pytestmark = pytest.mark.usefixtures("answers")


@pytest.fixture(autouse=True)
def few_are_kept(monkeypatch):
    for module in (checkpointing, commits):
        monkeypatch.setattr(module, "KEPT_COMMITS", KEPT)


def trimming(make: Callable[..., ServiceContext], steps: int = STEPS, keep: int = 1) -> ServiceContext:
    return make(steps, trims=True, checkpoint_every=1, keep_checkpoints=keep)


async def steps_in_redis(broker: Broker, keys: Keys) -> list[int]:
    return [commit.step for commit in await commits_of(broker, keys)]


async def assert_whole(context: ServiceContext, steps: int = STEPS) -> None:
    """Journal and stream together are the history, and no sample was trained twice."""
    history = History(context.keys.run_id, context.run_dir, context.broker)
    commits = [commit async for commit in history.messages(StreamName.COMMITS, Commit)]
    assert [commit.step for commit in commits] == list(range(steps))
    trained = [key for commit in commits for key in commit.trained_keys]
    assert len(trained) == len(set(trained)) == steps * GROUPS * SIZE


@pytest.mark.parametrize("keep", [1, 2])
async def test_the_newest_commits_stay_and_those_that_a_kept_checkpoint_needs(make, broker, keys, keep):
    context = trimming(make, keep=keep)
    await run(context)
    oldest = STEPS - (keep - 1)
    assert await steps_in_redis(broker, keys) == list(range(oldest - KEPT, STEPS))
    await assert_whole(context)
    lost = (await commits_of(broker, keys))[0].model_copy(update={"step": 0})
    with pytest.raises(commits.SecondTrainerError):  # of a step that is there no more
        await commits.append_commit(broker, keys, lost)


async def test_nothing_is_trimmed_where_trimming_is_off(make, broker, keys):
    await run(make(STEPS, checkpoint_every=1, keep_checkpoints=1))
    assert await steps_in_redis(broker, keys) == list(range(STEPS))


@pytest.mark.parametrize("is_emptied", [False, True])
async def test_a_trainer_that_dies_after_a_trim_goes_on_without_a_hole(make, broker, keys, is_emptied):
    """An emptied Redis gets the newest commits back."""
    for step in (5, 7):
        await crash_after_commit(trimming(make), step)
        assert (await steps_in_redis(broker, keys))[0] > 0
    if is_emptied:
        await empty(broker, keys)
    await run(trimming(make))
    assert (await steps_in_redis(broker, keys))[0] > 0
    await assert_whole(trimming(make))


async def test_an_emptied_redis_is_given_no_more_than_is_kept(make, broker, keys, tmp_path):
    journal = CommitJournal(tmp_path)
    for step in range(6):
        journal.append(make_commit(step, groups=(), digest="0" * 32))
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
    folder = context.run_dir / "checkpoints"
    older = context.run_dir / "older"
    newer = context.run_dir / "newer"
    await run(trimming(make, 3))
    shutil.copytree(folder, older)
    await run(trimming(make, 8))
    shutil.move(folder, newer)
    shutil.move(older, folder)
    with pytest.raises(TidemillError):
        await run(trimming(make))
    assert CommitJournal(context.run_dir).steps == range(8)
    shutil.rmtree(folder)
    shutil.move(newer, folder)
    await run(trimming(make))
    await assert_whole(context)


async def test_of_dead_letters_that_the_trainer_has_read_the_newest_stay(make, broker, keys, monkeypatch):
    letters = [make_dead_letter(Garbled(f"{number}-0", {}, "no")) for number in range(1, 7)]
    assert await newest_begin(broker, keys.dead, 2) == START
    await append(broker, keys.dead, *letters)
    assert await newest_begin(broker, keys.dead, 6) == START
    monkeypatch.setattr(checkpointing, "newest_begin", partial(newest_begin, num_kept=2))
    async with answering(broker, keys):
        await run(trimming(make))
    assert await length(broker, keys.dead) == 2
