"""Evaluations of a trainer that dies, or fails, while they go on."""

import json

import pytest

from tests.support.training import answering
from tests.support.whole_trainer import crash_after_commit, run
from tidemill.common.run.state import EVALUATION, FINISHED, METRICS_FILE, STEP, read_records, read_state
from tidemill.common.run.weight_files import folder_versions, needed_versions
from tidemill.common.wire.messages import Lane
from tidemill.services.trainer.evaluation import Evaluator


async def test_evaluations_after_the_checkpoint_are_not_forgotten(make, broker, keys):
    """Steps are replayed, evaluations are not: their records must outlive the crash."""
    options = {"has_eval": True, "evaluation": {"every": 1}}
    async with answering(broker, keys):
        await crash_after_commit(make(**options), 2)
        await run(make(**options))
    records = read_records(make().run_dir / METRICS_FILE)
    assert [r["version"] for r in records if r["kind"] == EVALUATION] == list(range(7))
    assert [r["step"] for r in records if r["kind"] == STEP] == list(range(6))


async def test_an_evaluation_cut_off_between_commit_and_announcement_is_finished_first(make, broker, keys):
    """Version 0 is under evaluation while step 0 is trained; its workers are not answering yet."""
    options = {"has_eval": True, "max_staleness": 0}
    async with answering(broker, keys, lanes=[Lane.TRAIN]):
        await crash_after_commit(make(**options), 0)
    async with answering(broker, keys):
        await run(make(**options))
    records = read_records(make().run_dir / METRICS_FILE)
    assert [r["version"] for r in records if r["kind"] == EVALUATION] == [0, 6]


async def test_a_crash_between_record_and_trim_does_not_make_the_next_start_wait(
    make, broker, keys, monkeypatch
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


async def test_a_failing_evaluation_ends_the_run_with_its_error(make, broker, keys, monkeypatch):
    async def fail(*_: object) -> None:
        raise RuntimeError("the evaluation broke")

    monkeypatch.setattr(Evaluator, "evaluate", fail)
    async with answering(broker, keys):
        with pytest.raises(RuntimeError, match="the evaluation broke"):
            await run(make(has_eval=True, evaluation={"at_start": False}))
    assert (await read_state(broker, keys))["status"] != FINISHED


async def test_the_best_version_keeps_its_weights_over_pruning_and_restarts(make, broker, keys):
    """All scores are equal, so the first version that was evaluated stays the best one."""
    options = {"has_eval": True, "evaluation": {"every": 1}, "keep_weights": 2}
    async with answering(broker, keys):
        await crash_after_commit(make(**options), 3)
        await run(make(**options))
    run_dir = make().run_dir
    assert json.loads((run_dir / "best.json").read_text())["version"] == 0
    kept = needed_versions(run_dir, [0, 5, 6])
    assert folder_versions(run_dir / "weights") == sorted(kept), "these, and what they are deltas to"
    assert (await read_state(broker, keys))["best"]["version"] == 0
