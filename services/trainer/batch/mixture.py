"""Which source each ticket takes its prompt from: exact shares, in an order that follows from the seed.

With weights w (which sum to 1), n tickets hold fewer than one prompt more or less than n * w of every source,
for every n. A source's unit number c + 1 may come once n * w > c, and is due when n * w >= c + 1; of those
that may come, the one due first comes (earliest deadline first, which keeps every such window: Baruah et al.
1996, "Proportionate progress"). Equal deadlines are decided by the seed. All in whole numbers, so that the
order is the same on every machine.
"""

from array import array
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import NamedTuple

import xxhash

from tidemill.common.errors import ConfigError


class Turn(NamedTuple):
    """The prompt of a ticket: which source, and the position in it, counted from 0."""

    source: int
    position: int


class Mixture:
    """`turn_at(number)`, a pure function of weights, limits and seed. Nine bytes for each number asked for.

    A source with a limit of n has n turns; afterwards the others are mixed again, by their weights.
    """

    def __init__(self, weights: Sequence[float], seed: int, limits: Sequence[int | None] = ()) -> None:
        fractions = [Fraction(str(weight)) for weight in weights]
        if not fractions or min(fractions) <= 0:
            raise ValueError(f"a mixture needs weights above 0, got {list(weights)}")
        scale = lcm(*(fraction.denominator for fraction in fractions))
        self._weights = [int(fraction * scale) for fraction in fractions]
        self._limits = list(limits) or [None] * len(fractions)
        self._seed = seed
        self._sources, self._positions = array("H"), array("Q")
        self._counts = [0] * len(fractions)
        self._mixed: list[int] = []
        """The sources that are left, and since when: their counts and the number of turns at that time."""
        self._base: list[int] = []
        self._begun = 0

    def turn_at(self, number: int) -> Turn:
        """The turn of a ticket, numbered from 0. Raises ConfigError: all sources are at their limits."""
        while len(self._sources) <= number:
            self._advance()
        return Turn(self._sources[number], self._positions[number])

    def counts_at(self, number: int) -> list[int]:
        """How many of the first `number` turns each source has."""
        if number:
            self.turn_at(number - 1)
        counts = [0] * len(self._weights)
        for source in self._sources[:number]:
            counts[source] += 1
        return counts

    def _advance(self) -> None:
        number = len(self._sources)
        left = [
            source
            for source, limit in enumerate(self._limits)
            if limit is None or self._counts[source] < limit
        ]
        if not left:
            raise ConfigError(
                f"data.train: every source has been used for all its epochs, after {number:,} groups. Raise "
                "epochs, leave one source without, or lower trainer.steps."
            )
        if left != self._mixed:
            self._mixed, self._base, self._begun = left, list(self._counts), number
        source = self._earliest(number)
        self._sources.append(source)
        self._positions.append(self._counts[source])
        self._counts[source] += 1

    def _earliest(self, number: int) -> int:
        """The source whose next unit is due first, of those whose next unit may come."""
        total = sum(self._weights[source] for source in self._mixed)
        slot = number - self._begun + 1
        best, best_key = -1, (0, 0)
        for source in self._mixed:
            weight, units = self._weights[source], self._counts[source] - self._base[source]
            if units * total >= slot * weight:
                continue
            due = -((units + 1) * total // -weight)
            tie = xxhash.xxh3_64_intdigest(f"{self._seed} {number} {source}".encode())
            if best < 0 or (due, tie) < best_key:
                best, best_key = source, (due, tie)
        assert best >= 0, "the shares sum to 1, so one source is always behind its own"
        return best
