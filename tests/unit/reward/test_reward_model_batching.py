"""The next batch: the row whose turn it is, urgent ones first, of like length, within its limits."""

import random

import pytest

from tidemill.services.reward.model_server.batcher import QueuedRow, select_batch
from tidemill.services.reward.model_server.options import ServerOptions

LIMITS = ServerOptions(model="m", max_batch_tokens=100, max_batch_rows=8, max_padding=0.3)


def rows(*lengths: int, priority: int = 0) -> list[QueuedRow]:
    return [QueuedRow([1] * length, priority) for length in lengths]


def lengths_of(batch: list[QueuedRow]) -> list[int]:
    return [len(row.token_ids) for row in batch]


def test_nothing_waits_nothing_is_selected() -> None:
    assert select_batch([], LIMITS) == []


def test_rows_of_like_length_go_together() -> None:
    assert lengths_of(select_batch(rows(10, 90, 11, 88, 9), LIMITS)) == [9, 10, 11]


def test_the_oldest_row_is_always_in_whatever_its_length() -> None:
    assert lengths_of(select_batch(rows(95, 5, 5, 5, 5), LIMITS)) == [95]


def test_a_row_above_the_budget_goes_alone() -> None:
    assert lengths_of(select_batch(rows(500, 500, 5), LIMITS)) == [500]


def test_urgent_rows_go_first_and_take_rows_of_like_length_along() -> None:
    urgent = rows(50, priority=-1)
    assert lengths_of(select_batch(rows(10, 10, 45) + urgent, LIMITS)) == [45, 50]


def test_an_urgent_row_is_preferred_to_one_that_is_nearer_in_length() -> None:
    urgent = rows(30, 24, priority=-1)
    assert lengths_of(select_batch(rows(30, 30, 30) + urgent, LIMITS)) == [24, 30, 30]


@pytest.mark.parametrize("seed", range(20))
def test_limits_hold_and_every_row_is_served_in_the_end(seed: int) -> None:
    chance = random.Random(seed)
    waiting = rows(*(chance.randint(1, 120) for _ in range(60)))
    rounds = 0
    while waiting:
        batch = select_batch(waiting, LIMITS)
        assert waiting[0] in batch
        padded = max(lengths_of(batch)) * len(batch)
        assert len(batch) == 1 or padded <= LIMITS.max_batch_tokens
        assert len(batch) <= LIMITS.max_batch_rows
        assert padded - sum(lengths_of(batch)) <= LIMITS.max_padding * padded
        waiting = [row for row in waiting if row not in batch]
        rounds += 1
    assert rounds < 60
