"""The cluster of `benchmarks.scale`, small: real loops of many workers in one process; nothing is lost."""

from benchmarks.scale_cluster import Size, measure
from benchmarks.scale_faults import measure_faults


async def test_ten_workers_train_every_ticket_once(tmp_path):
    outcome = await measure(tmp_path, Size(10, 0.4, 1.0), steps=4, warm=1)
    assert outcome.books.steps >= 4 and outcome.books.trained >= 4 * 10 * 2
    assert not outcome.books.lost and not outcome.books.duplicated
    assert 0 < outcome.efficiency <= 1.01 and min(outcome.mb_by_step) > 0 and outcome.redis_share > 0


async def test_workers_and_redis_die_and_nothing_is_lost(tmp_path):
    found = await measure_faults(tmp_path, Size(10, 0.4, 1.0), ("killed", "restarted"))
    assert [r.fault for r in found.recoveries] == ["a tenth is killed", "Redis is restarted"]
    assert found.books.trained and not found.books.lost and not found.books.duplicated
