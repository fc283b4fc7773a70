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


@pytest.mark.parametrize(
    ("lengths", "urgent", "expected"),
    [
        ([], [], []),
        ([10, 90, 11, 88, 9], [], [9, 10, 11]),  # of like length
        ([95, 5, 5, 5, 5], [], [95]),  # the oldest row is always in
        ([500, 500, 5], [], [500]),  # above the budget it goes alone
        ([10, 10, 45], [50], [45, 50]),  # urgent rows go first, and take others along
        ([30, 30, 30], [30, 24], [24, 30, 30]),  # also before one that is nearer in length
    ],
)
def test_the_next_batch_by_hand(lengths: list[int], urgent: list[int], expected: list[int]) -> None:
    waiting = rows(*lengths) + rows(*urgent, priority=-1)
    assert lengths_of(select_batch(waiting, LIMITS)) == expected


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
