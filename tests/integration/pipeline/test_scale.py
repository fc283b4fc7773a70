"""The cluster of `benchmarks.scale`, small: real loops of many workers in one process; nothing is lost."""

from benchmarks.scale import Size, measure


async def test_ten_workers_train_every_ticket_once(tmp_path):
    outcome = await measure(tmp_path, Size(10, 0.4, 1.0))
    summary = outcome.summary
    assert summary.steps >= 4 and summary.trajectories_trained == summary.steps * 10 * 2
    assert not summary.lost and not summary.duplicated_in_training
    assert 0 < outcome.efficiency <= 1.01 and min(outcome.mb_by_step) > 0 and outcome.redis_share > 0
