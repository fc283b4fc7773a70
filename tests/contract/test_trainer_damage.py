"""A trainer whose disk damages what it has kept goes on from what is whole."""

from pathlib import Path

import pytest

from services.trainer.checkpoint import CheckpointError, CheckpointStore
from tests.training import answering, commits_of
from tests.whole_trainer import GROUPS, SIZE, crash_after_commit, run


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
