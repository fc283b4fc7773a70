"""Heartbeats between hosts: whose count stands still is named."""

from collections import Counter
from dataclasses import dataclass, field

import pytest

from tidemill.services.trainer.policy.fsdp import ranks
from tidemill.services.trainer.policy.fsdp.ranks import SILENT_S, Heartbeats, RankWatch


@dataclass
class Store:
    """Torch's, in this process."""

    numbers: Counter[str] = field(default_factory=Counter)
    is_gone: bool = False

    def add(self, key: str, amount: int) -> int:
        if self.is_gone:
            raise RuntimeError("connection refused")
        self.numbers[key] += amount
        return self.numbers[key]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_who_stands_still_is_named_and_who_counts_is_not(clock: Clock) -> None:
    store = Store()
    ranks = [Heartbeats(store, rank, 3, clock) for rank in range(3)]
    for _ in range(4):
        assert [beats.look() for beats in ranks] == ["", "", ""]
        clock.now += 0.9 * SILENT_S
    for _ in range(2):
        assert [ranks[rank].look() for rank in (0, 2)] == ["", ""]
        clock.now += 0.9 * SILENT_S
    assert "rank 1" in ranks[0].look()
    assert ranks[2].look() == "", "rank 0 has counted"
    clock.now += 1.1 * SILENT_S
    assert "rank 0" in ranks[2].look()


def test_a_count_that_does_not_come_back_is_noticed(clock: Clock) -> None:
    beats = Heartbeats(Store(), 1, 2, clock)
    beats.look()
    clock.now += 0.9 * SILENT_S
    assert not beats.is_stuck()
    clock.now += 0.2 * SILENT_S
    assert beats.is_stuck()


def test_a_store_that_is_gone_means_that_rank_0_is_unless_the_run_is_over(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "BEAT_S", 0.001)
    watch, store = RankWatch(), Store()
    watch.follow(Heartbeats(store, 1, 2, clock))
    store.is_gone = True
    watch._lost.wait(60)
    watch.stop()
    assert "rank 0" in watch.loss()[0]
    monkeypatch.setattr(ranks, "BEAT_S", 60)  # the next one comes after the end
    watch = RankWatch()
    watch.follow(Heartbeats(store, 1, 2, clock))
    watch.stop()
    assert not watch._lost.is_set()
