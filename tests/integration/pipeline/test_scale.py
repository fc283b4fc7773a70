"""The cluster of `benchmarks.scale`, small: real loops of many workers in one process; nothing is lost."""

from benchmarks.scale_cluster import Size, measure


async def test_ten_workers_train_every_ticket_once(tmp_path):
    outcome = await measure(tmp_path, Size(10, 0.4, 1.0), steps=4, warm=1)
    assert outcome.books.steps >= 4 and outcome.books.trained >= 4 * 10 * 2
    assert not outcome.books.lost and not outcome.books.duplicated
    assert 0 < outcome.efficiency <= 1.01 and min(outcome.mb_by_step) > 0 and outcome.redis_share > 0
