"""A step is committed once: by us, as often as we ask; by two trainers, never."""

import math

import pytest

from tests.support.models import make_samples
from tests.support.numbered import append_numbered
from tests.support.training import commits_of, make_score, pending_groups
from tests.support.trajectories import make_trajectory
from tidemill.common.errors import TidemillError
from tidemill.common.history import History
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import Mark, MarkLostError, entry_id_of, last_id
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit
from tidemill.services.trainer.durable.commits import (
    LostTailError,
    SecondTrainerError,
    append_commit,
    read_commits,
)
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.step import MiniBatch, StepResult, make_commit


def commit_of(step: int = 0, **fields: object) -> Commit:
    values = {
        "mini_batches": ((((0, 1), (0, 0)), ((1, 0),)),), "groups": (1, 0), "dropped": ((7, -1, "stale"), (1,
        1, "failed_score")), "advantages": {"0": [0.5, -0.5], "1": [0.1]}, "metrics": {"reward": 1 / 3,
        "loss": 2.0}, "digest": "ab" * 16, "started_at": 12.5,
    } | fields  # fmt: skip
    return Commit(step=step, version=step + 1, **values)


async def history_of(broker: Broker, keys: Keys, first_step: int = 0) -> list[Commit]:
    return await read_commits(History(keys.run_id, None, broker), first_step)


async def test_a_commit_lies_under_the_id_of_its_step_and_comes_back_equal(broker, keys):
    """An entry that has no id of a step never was a commit, so nothing is missing without it."""
    await append_commit(broker, keys, commit_of(0))
    await broker.execute("XADD", keys.commits, "1-1", "v", b"1.0", "p", b"\xc1")
    for step in (1, 2):
        await append_commit(broker, keys, commit_of(step))
    assert await last_id(broker, keys.commits) == entry_id_of(2)
    for step in range(4):
        assert await history_of(broker, keys, step) == [commit_of(remaining) for remaining in range(step, 3)]


@pytest.mark.parametrize("number", [2.5, math.nan, math.inf])
async def test_our_own_commit_may_be_repeated_after_a_lost_connection(broker, keys, number):
    """A skipped update has a gradient norm that is not finite, and NaN differs from itself."""
    for _ in range(2):
        await append_commit(broker, keys, commit_of(metrics={"grad_norm": number}))
    assert len(await commits_of(broker, keys)) == 1


@pytest.mark.parametrize(
    "changed", [{"digest": "cd" * 16}, {"groups": (0, 1)}, {"finished_at": 1.0}, {"metrics": {"loss": 2.5}}]
)
async def test_another_trainers_commit_ends_this_one(broker, keys, changed):
    await append_commit(broker, keys, commit_of(**changed))
    with pytest.raises(SecondTrainerError, match="step 0"):
        await append_commit(broker, keys, commit_of())
    assert await commits_of(broker, keys) == [commit_of(**changed)]
    await append_commit(broker, keys, commit_of(1))
    with pytest.raises(SecondTrainerError, match="step 0"):  # also for one that fell behind
        await append_commit(broker, keys, commit_of())


async def test_a_hole_between_commits_and_a_damaged_one_are_errors(broker, keys):
    await append_numbered(broker, keys.commits, [(step, commit_of(step)) for step in (0, 2)])
    with pytest.raises(TidemillError, match="step 2 where step 1"):
        await history_of(broker, keys)
    await broker.execute("XADD", keys.commits, entry_id_of(3), "v", b"1.0", "p", b"\xc1")
    with pytest.raises(TidemillError, match=f"commit {entry_id_of(3)}"):
        await history_of(broker, keys, 2)


async def test_a_commit_is_not_appended_where_the_one_before_or_its_mark_is_missing(broker, keys):
    """There would be no place for the one before any more; what the step was trained on may be gone with the
    mark."""
    mark = Mark(keys.state, "committing", b'"1"')
    with pytest.raises(MarkLostError):
        await append_commit(broker, keys, commit_of(0), mark)
    await broker.execute("HSET", mark.key, mark.field, mark.value)
    for _ in range(2):
        await append_commit(broker, keys, commit_of(0), mark)
    with pytest.raises(LostTailError):
        await append_commit(broker, keys, commit_of(2))
    assert await history_of(broker, keys) == [commit_of(0)]


def test_a_commit_says_what_was_trained_and_what_was_left_out():
    samples = make_samples(6)  # tickets 0 (four samples) and 1 (two)
    sources = pending_groups(
        [make_trajectory(*sample.key) for sample in samples],
        [make_score(*sample.key, 1.0) for sample in samples],
    )
    sources[1].samples = samples[4:]
    sources[0].samples = samples[:4]
    sources[1].left_out = [(2, "failed_score")]
    groups = [sources[1], sources[0]]
    batches = form_micro_batches(samples, 40)
    result = StepResult(groups, [MiniBatch(batches[:1]), MiniBatch(batches[1:])])
    commit = make_commit(4, result, [(9, -1, "stale")], {"reward": 0.5}, "ab" * 16, started_at=3.0)
    assert (commit.step, commit.version, commit.groups) == (4, 5, (1, 0))
    assert commit.dropped == ((9, -1, "stale"), (1, 2, "failed_score"))
    first, second = commit.mini_batches
    assert (*first, *second) == tuple(batch.keys for batch in batches)
    assert len(first) == 1
    assert sorted(commit.trained_keys) == [sample.key for sample in samples]
    assert commit.advantages == {
        "1": [s.advantage for s in samples[4:]],
        "0": [s.advantage for s in samples[:4]],
    }
