"""Mixes several sources of prompts and demonstrations by their weights.

The places of all batches are numbered, `groups_per_step` for each step. The mixture of all weights says which
have a demonstration; the others have tickets, and what replaces one of those is a ticket again, so that the
share stays. A demonstration's ticket is its place (`FIRST_DEMONSTRATION`): step, row and trajectory are
functions of it, and nothing of it has to be kept.
"""

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, cast

import xxhash

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.wire.messages import FIRST_DEMONSTRATION, Trajectory
from tidemill.services.trainer.batch.prompts import PromptSource

if TYPE_CHECKING:
    from tidemill.services.trainer.batch.demonstrations import Demonstration


class Mixture:
    """Which source each ticket takes its prompt from: exact shares, in an order that follows from the seed.

    With weights w (which sum to 1), n tickets hold fewer than one prompt more or less than n * w of every
    source, for every n. A source's unit number c + 1 may come once n * w > c, and is due when n * w >= c + 1;
    of those that may come, the one due first comes (earliest deadline first, which keeps every such window:
    Baruah et al. 1996, "Proportionate progress"). Equal deadlines are decided by the seed. All in whole
    numbers, so that the order is the same on every machine.

    A source with a limit of n has n tickets; afterwards the others are mixed again, by their weights. Takes
    ten bytes for each number up to the highest one.
    """

    def __init__(
        self, weights: Sequence[float | Fraction], seed: int, limits: Sequence[int | None] = ()
    ) -> None:
        # As text: 0.1 is exactly a tenth, and not the nearest float.
        fractions = [Fraction(str(weight)) for weight in weights]
        if not fractions or min(fractions) <= 0:
            raise ValueError(f"a mixture needs weights above 0, got {list(weights)}")
        scale = lcm(*(fraction.denominator for fraction in fractions))
        self._weights = [int(fraction * scale) for fraction in fractions]
        self._limits = list(limits) or [None] * len(fractions)
        self._seed = seed
        self._sources = array("H")
        self._positions = array("Q")
        self._counts = [0] * len(fractions)
        self._mixed: list[int] = []
        """The sources that have not reached their limits."""
        self._base: list[int] = []
        """How many tickets each source had when these began to be mixed."""
        self._begun = 0
        """How many tickets there were then."""

    def place_at(self, number: int) -> tuple[int, int]:
        """Source of a ticket, and its position in that, both counted from 0; a pure function of weights,
        limits and seed. Raises ConfigError: all sources are at their limits."""
        while len(self._sources) <= number:
            self._advance()
        return self._sources[number], self._positions[number]

    def counts_at(self, number: int) -> list[int]:
        """How many of the first `number` tickets each source has."""
        if number:
            self.place_at(number - 1)
        counts = [0] * len(self._weights)
        for source in self._sources[:number]:
            counts[source] += 1
        return counts

    def _advance(self) -> None:
        number = len(self._sources)
        limits = enumerate(self._limits)
        mixed = [source for source, limit in limits if limit is None or self._counts[source] < limit]
        if not mixed:
            raise ConfigError(
                f"data.train: every source has been used for all its epochs, after {number:,} groups. Raise "
                "epochs, leave one source without, or lower trainer.steps."
            )
        if mixed != self._mixed:
            self._mixed = mixed
            self._base = list(self._counts)
            self._begun = number
        source = self._earliest(number)
        self._sources.append(source)
        self._positions.append(self._counts[source])
        self._counts[source] += 1

    def _earliest(self, number: int) -> int:
        """The source whose next unit is due first, of those whose next unit may come."""
        total = sum(self._weights[source] for source in self._mixed)
        slot = number - self._begun + 1
        best = -1
        best_key = (0, 0)
        for source in self._mixed:
            weight = self._weights[source]
            units = self._counts[source] - self._base[source]
            if units * total >= slot * weight:
                continue
            due = -((units + 1) * total // -weight)  # rounded up
            # A hash and not the place in the list: of equal weights the first would always come first.
            tie = xxhash.xxh3_64_intdigest(f"{self._seed} {number} {source}".encode())
            if best < 0 or (due, tie) < best_key:
                best = source
                best_key = (due, tie)
        assert best >= 0, "the shares sum to 1, so one source is always behind its own"
        return best


class BatchPlaces:
    """Which places of the batches have demonstrations; takes a `Mixture`'s memory, and 8 bytes a step."""

    def __init__(
        self, sources: Sequence[PromptSource], limits: Sequence[int | None], config: RunConfig
    ) -> None:
        data = config.data
        self._size = config.trainer.groups_per_step
        self._max_staleness = config.trainer.max_staleness
        self.sources = sources
        weights: list[float | Fraction] = [source.weight for source in data.demonstrations]
        # Exact: floats that are added up would be other shares.
        of_prompts = sum((Fraction(str(source.weight)) for source in data.prompt_sources), Fraction())
        # All sources of prompts are one source here: the last, whose places have tickets.
        more: list[Fraction] = [of_prompts] if of_prompts else []
        self._mixture = Mixture([*weights, *more], config.seed, [*limits, *(None for _ in more)])
        self._prompts = array("Q", [0])
        """For each step, how many places of the steps before it have tickets."""

    def num_prompts(self, steps: int) -> int:
        """Places of the first `steps` steps that have tickets."""
        while len(self._prompts) <= steps:
            first = (len(self._prompts) - 1) * self._size
            places = map(self._mixture.place_at, range(first, first + self._size))
            num_prompts = sum(source == len(self.sources) for source, _ in places)
            self._prompts.append(self._prompts[-1] + num_prompts)
        return self._prompts[steps]

    def step_of(self, number: int) -> int:
        """The step of a ticket that replaces none, and that `num_prompts` has counted already."""
        return bisect_right(self._prompts, number) - 1

    def trajectory(self, ticket: int) -> Trajectory:
        """The demonstration of this ticket."""
        number = ticket - FIRST_DEMONSTRATION
        source, position = self._mixture.place_at(number)
        demonstration = cast("Demonstration", self.sources[source].prompt_at(position))
        step = number // self._size
        return demonstration.trajectory(ticket, step, max(0, step - self._max_staleness))

    def tickets(self, step: int) -> list[int]:
        """Tickets of the step's demonstrations."""
        tickets = []
        for number in range(step * self._size, (step + 1) * self._size):
            source, _ = self._mixture.place_at(number)
            if source < len(self.sources):
                tickets.append(FIRST_DEMONSTRATION + number)
        return tickets
