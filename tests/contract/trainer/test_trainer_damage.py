"""A trainer whose disk damages what it has kept goes on from what is whole."""

import asyncio
from pathlib import Path

import pytest

from tests.support.training import answering, commits_of
from tests.support.whole_trainer import GROUPS, SIZE, crash_after_commit, run
from tidemill.common.errors import TidemillError
from tidemill.common.run.state import EVALUATION, METRICS_FILE, STEP, read_records
from tidemill.services.trainer.durable.checkpoint import CheckpointError, CheckpointStore
from tidemill.services.trainer.service import serve


def tear_newest(run_dir: Path) -> int:
    """Cut the newest checkpoint's tensors off; returns its version."""
    store = CheckpointStore(run_dir, keep=2)
    version = store.versions()[-1]
    folder = store.folder / f"v{version:08d}"
    tensors = max(
        (path for path in folder.iterdir() if path.suffix != ".json"), key=lambda p: p.stat().st_size
    )
    tensors.write_bytes(tensors.read_bytes()[:-1])
    return version


async def test_two_damaged_checkpoints_one_after_the_other_do_not_end_a_run(make, broker, keys):
    """Streams are trimmed meanwhile: only below what the oldest whole checkpoint needs."""
    options = {"checkpoint_every": 1, "keep_checkpoints": 2, "trims": True, "steps": 8}
    async with answering(broker, keys):
        await crash_after_commit(make(**options), 3)
        first = tear_newest(make(**options).run_dir)
        await crash_after_commit(make(**options), 5)
        second = tear_newest(make(**options).run_dir)
        assert second > first
        await run(make(**options))
    commits = await commits_of(broker, keys)
    assert [commit.step for commit in commits] == list(range(8))
    trained = [key for commit in commits for key in commit.trained_keys]
    assert len(trained) == len(set(trained)) == 8 * GROUPS * SIZE


async def test_the_only_checkpoint_is_not_needed_while_the_streams_hold_everything(make, broker, keys):
    options = {"checkpoint_every": 2, "keep_checkpoints": 2, "trims": True}
    async with answering(broker, keys):
        await crash_after_commit(make(**options), 2)
        assert tear_newest(make(**options).run_dir) == 2
        await run(make(**options))
    commits = await commits_of(broker, keys)
    assert [commit.step for commit in commits] == list(range(6))
    trained = [key for commit in commits for key in commit.trained_keys]
    assert len(trained) == len(set(trained)) == 6 * GROUPS * SIZE


async def test_streams_that_were_trimmed_are_no_place_to_start_over(make, broker, keys):
    options = {"checkpoint_every": 1, "keep_checkpoints": 1, "trims": True}
    async with answering(broker, keys):
        await crash_after_commit(make(**options), 3)
        tear_newest(make(**options).run_dir)
        with pytest.raises(CheckpointError, match="none of the 1 checkpoint"):
            await run(make(**options))
    assert len(await commits_of(broker, keys)) == 4


async def test_metrics_that_someone_has_emptied_come_back_from_the_commits(make, broker, keys):
    async with answering(broker, keys):
        context = make(has_eval=True)
        await crash_after_commit(context, 4)
        path = context.run_dir / METRICS_FILE
        before = [record for record in read_records(path) if record.get("step", 0) < 4]
        path.write_bytes(b"")
        await run(make(has_eval=True))
    after = read_records(path)
    assert [record["step"] for record in after if record["kind"] == STEP] == list(range(6))
    assert [record["version"] for record in after if record["kind"] == EVALUATION] == [0, 6]
    commits = {commit.step: commit for commit in await commits_of(broker, keys)}
    for record in [record for record in after if record["kind"] == STEP]:
        assert record["reward"] == commits[record["step"]].metrics["reward"]
    without_time = [{name: value for name, value in r.items() if name != "time"} for r in after]
    for record in before:
        assert {name: value for name, value in record.items() if name != "time"} in without_time


async def test_a_commit_whose_records_are_gone_is_said_without_waiting(make, broker, keys):
    """Everything was read: nothing more can come that was there when the step was committed."""
    async with answering(broker, keys):
        await crash_after_commit(make(), 1)
    entries = await broker.execute("XRANGE", keys.trajectories(), "-", "+")
    await broker.execute("XDEL", keys.trajectories(), *(entry_id for entry_id, _ in entries))
    with pytest.raises(TidemillError, match=r"step 0 was committed, but the streams hold no complete group"):
        await asyncio.wait_for(serve(make()), 30.0)
