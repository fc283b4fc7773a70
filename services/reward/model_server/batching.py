"""Which waiting rows make the next batch: urgent ones first, of like length, within a budget of tokens.

Guarantees: the most urgent, and among those the oldest, row is in the next batch, so no row starves for its
length; the padded size of a batch is at most the budget, unless a single row is larger; padding is at most
the given share of a batch.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False, slots=True)
class Row:
    """One sequence that waits for its scores. Lower `priority` goes first, then the earlier `number`."""

    token_ids: Sequence[int]
    priority: int = 0
    number: int = 0
    arrived: float = 0.0
    deliver: Callable[[Any], None] = field(default=lambda _: None)

    @property
    def rank(self) -> tuple[int, int]:
        """Order in which rows are served."""
        return (self.priority, self.number)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of one batch."""

    max_tokens: int
    max_rows: int
    max_padding: float


class Waiting:
    """The rows that wait, by priority and then by age; every operation is cheap however many there are."""

    def __init__(self) -> None:
        self._by_priority: dict[int, dict[Row, None]] = {}
        self._count, self.num_tokens = 0, 0

    def __len__(self) -> int:
        return self._count

    def add(self, row: Row) -> None:
        """Put a row at the end of its priority."""
        self._by_priority.setdefault(row.priority, {})[row] = None
        self._count += 1
        self.num_tokens += len(row.token_ids)

    def discard(self, row: Row) -> None:
        """Take a row out, if it is there."""
        rows = self._by_priority.get(row.priority, {})
        if row in rows:
            del rows[row]
            self._count -= 1
            self.num_tokens -= len(row.token_ids)
            if not rows:
                del self._by_priority[row.priority]

    @property
    def oldest_arrival(self) -> float:
        """When the row that waits longest arrived."""
        return min(next(iter(rows)).arrived for rows in self._by_priority.values())

    def first(self, count: int) -> list[Row]:
        """The next rows in the order in which they are served."""
        ordered = (row for priority in sorted(self._by_priority) for row in self._by_priority[priority])
        return list(itertools.islice(ordered, count))


def select_batch(waiting: Iterable[Row], limits: BatchLimits) -> list[Row]:
    """The rows of the next batch, shortest first; empty where none waits.

    Around the row whose turn it is, rows are taken from both sides of the order of lengths, the one that
    costs less padding first, until a limit is met. Rows more urgent than others are all tried before those.
    """
    rows = sorted(waiting, key=lambda row: row.rank)
    if not rows:
        return []
    anchor = rows[0]
    batch = _Batch(anchor, limits)
    for priority in sorted({row.priority for row in rows}):
        batch.extend([row for row in rows if row.priority == priority and row is not anchor])
    return sorted(batch.rows, key=lambda row: len(row.token_ids))


class _Batch:
    def __init__(self, anchor: Row, limits: BatchLimits) -> None:
        self.limits, self.rows = limits, [anchor]
        self.anchor_len = self.longest = self.num_tokens = len(anchor.token_ids)

    def extend(self, candidates: list[Row]) -> None:
        """Add what fits, nearest in length to the anchor first; among equals the older first."""
        shorter: list[Row] = []
        longer: list[Row] = []
        for row in sorted(
            candidates, key=lambda row: (abs(len(row.token_ids) - self.anchor_len), row.number)
        ):
            (shorter if len(row.token_ids) <= self.anchor_len else longer).append(row)
        while (shorter or longer) and len(self.rows) < self.limits.max_rows:
            side = self._cheaper(shorter, longer)
            if self._add(side[0]):
                del side[0]
            else:
                side.clear()  # the others on this side are further away

    def _cheaper(self, shorter: list[Row], longer: list[Row]) -> list[Row]:
        if not shorter or not longer:
            return shorter or longer
        below = self.longest - len(shorter[0].token_ids)
        above = max(0, len(longer[0].token_ids) - self.longest) * len(self.rows)
        return shorter if below <= above else longer

    def _add(self, row: Row) -> bool:
        longest, count = max(self.longest, len(row.token_ids)), len(self.rows) + 1
        padded, num_tokens = longest * count, self.num_tokens + len(row.token_ids)
        if padded > self.limits.max_tokens or padded - num_tokens > self.limits.max_padding * padded:
            return False
        self.rows.append(row)
        self.longest, self.num_tokens = longest, num_tokens
        return True
