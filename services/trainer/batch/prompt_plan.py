"""Which prompt, group size and sampling each ticket has, and which places of the batches have demonstrations.

Guarantee: the prompt of ticket n follows from the seed, the config, the tickets before n and, where there is
a curriculum, the commits that `curriculum.py` names: never from timing. So a checkpoint needs little, and a
resumed run issues the same prompts.

The places of all batches are numbered, `groups_per_step` for each step. The mixture of all weights says which
have a demonstration; the others have tickets, and what replaces one of those is a ticket again, so that the
share stays. A demonstration's ticket is its place (`FIRST_DEMONSTRATION`): step, row and trajectory are
functions of it, and nothing of it has to be kept.
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any, cast

import xxhash

from tidemill.common.config import RunConfig
from tidemill.common.config.data import SourceConfig
from tidemill.common.errors import ConfigError
from tidemill.common.wire.messages import (
    FIRST_DEMONSTRATION,
    Commit,
    Outcome,
    SamplingParams,
    Ticket,
    Trajectory,
    is_demonstration,
)
from tidemill.services.trainer.batch.prompts import Prompt, PromptSource

if TYPE_CHECKING:
    from tidemill.services.trainer.batch.curriculum import Curriculum
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
        """The sources that are left, and since when: their counts and the number of tickets at that time."""
        self._base: list[int] = []
        self._begun = 0

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
            due = -((units + 1) * total // -weight)
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
        number = ticket - FIRST_DEMONSTRATION
        source, position = self._mixture.place_at(number)
        demonstration = cast("Demonstration", self.sources[source].prompt_at(position))
        step = number // self._size
        return demonstration.trajectory(ticket, step, max(0, step - self._max_staleness))

    def tickets(self, step: int) -> list[int]:
        tickets = []
        for number in range(step * self._size, (step + 1) * self._size):
            source, _ = self._mixture.place_at(number)
            if source < len(self.sources):
                tickets.append(FIRST_DEMONSTRATION + number)
        return tickets


class PromptPlan:
    """The prompts of a run: one source without a name, or those of `data.train`, in their order; and its
    demonstrations, where it has some."""

    def __init__(
        self, sources: Sequence[PromptSource], config: RunConfig, demonstrations: Sequence[PromptSource] = ()
    ) -> None:
        self.sources = sources
        self._config = config
        named = config.data.prompt_sources
        weights = [source.weight for source in named]
        limits = _limits(named, sources)
        limits_of_demonstrations = _limits(config.data.demonstrations, demonstrations)
        _check_limits([*(limits if sources else ()), *limits_of_demonstrations], config)
        # One source without a name has all the weight; without sources the mixture is not used.
        self._mixture = Mixture(weights or [1.0], config.seed, limits)
        self.places: BatchPlaces | None = None
        if demonstrations:
            self.places = BatchPlaces(demonstrations, limits_of_demonstrations, config)
        self._curriculum = _open_curriculum(sources, config)
        self.fingerprint = sources[0].fingerprint if sources else ""
        """Digest over everything that decides which prompt is at which position of which source."""
        if config.data.sources:
            parts = [
                (source.name, source.fingerprint, weight, limit)
                for source, weight, limit in zip(sources, weights, limits, strict=True)
            ]
            for source, settings, limit in zip(
                demonstrations, config.data.demonstrations, limits_of_demonstrations, strict=True
            ):
                parts.append((source.name, source.fingerprint, settings.weight, limit))
            self.fingerprint = xxhash.xxh3_128_hexdigest(repr(parts).encode())
        sampling = list(map(config.sampling_of, named)) or [config.rollout.sampling]
        self._sampling = [SamplingParams(**settings.model_dump()) for settings in sampling]
        self._sizes = [config.group_size(source.name) for source in sources]

    def fields(self, number: int, min_version: int) -> dict[str, Any]:
        """Fields of the next ticket, which has this number, for its prompt and its group."""
        source, position = self._mixture.place_at(number)
        if self._curriculum is None:
            return self._fields(source, self.sources[source].prompt_at(position))
        index = self._curriculum.draw(number, source, min_version)
        return self._fields(source, self.sources[source].prompts[index])

    def fields_of_row(self, number: int, row: int) -> dict[str, Any]:
        """The same for a ticket that was issued before, with the prompt in this row."""
        source, _ = self._mixture.place_at(number)
        index = self.sources[source].place_of(row)
        assert index is not None, "the fingerprint is that of the same rows"
        return self._fields(source, self.sources[source].prompts[index])

    def _fields(self, source: int, prompt: Prompt) -> dict[str, Any]:
        of_source = {"group_size": self._sizes[source], "sampling": self._sampling[source]}
        return prompt.ticket_fields() | of_source

    def sizes(self, tickets: Iterable[int]) -> dict[str, int]:
        """Size of each group whose size is not `trainer.group_size`, by ticket."""
        sizes = {
            str(ticket): 1 if is_demonstration(ticket) else self._sizes[self._mixture.place_at(ticket)[0]]
            for ticket in tickets
        }
        return {ticket: size for ticket, size in sizes.items() if size != self._config.trainer.group_size}

    def num_tickets(self, steps: int) -> int:
        """Tickets of the first `steps` steps, without those that replace others."""
        return self.places.num_prompts(steps) if self.places else steps * self._config.trainer.groups_per_step

    def step_of(self, number: int) -> int:
        """The step of the `number`-th of these tickets."""
        return self.places.step_of(number) if self.places else number // self._config.trainer.groups_per_step

    def adopt(self, ticket: Ticket) -> None:
        """Take in the next ticket, which an earlier process has issued."""
        if self._curriculum is not None:
            source, _ = self._mixture.place_at(ticket.ticket)
            self._curriculum.adopt(ticket.ticket, source, ticket.min_version)
            if ticket.outcome is not None:
                self._curriculum.unreported[ticket.replaces] = ticket.outcome

    def replaced(self, ticket: Ticket, rewards: Sequence[float]) -> Outcome | None:
        """The outcome of a group without variance that is replaced, for the ticket in its place; the next
        commit reports it too. None without a curriculum."""
        if self._curriculum is None:
            return None
        outcome = self._outcome(ticket, rewards)
        self._curriculum.unreported[ticket.ticket] = outcome
        return outcome

    def outcomes(self, trained: Iterable[tuple[Ticket, Sequence[float]]]) -> tuple[Outcome, ...]:
        """Outcomes that a step's commit reports: of the groups that it trained, given with their rewards, and
        of those replaced since the commit before."""
        if self._curriculum is None:
            return ()
        outcomes = {ticket.ticket: self._outcome(ticket, rewards) for ticket, rewards in trained}
        outcomes |= self._curriculum.unreported
        return tuple(outcomes[ticket] for ticket in sorted(outcomes))

    def _outcome(self, ticket: Ticket, rewards: Sequence[float]) -> Outcome:
        threshold = self._config.trainer.algorithm.success_threshold
        return ticket.source, ticket.row, sum(reward >= threshold for reward in rewards), len(rewards)

    def take_commit(self, commit: Commit) -> None:
        """Take in a committed step; in the order of steps."""
        if self._curriculum is not None:
            self._curriculum.take_commit(commit)

    def forget_reported(self, tickets: Iterable[int]) -> None:
        if self._curriculum is not None:
            self._curriculum.forget_reported(tickets)

    def metrics(self) -> dict[str, float]:
        """Metrics of the curriculum: shares of each source's prompts."""
        if self._curriculum is None:
            return {}
        return {
            f"curriculum/{source.name + '/' if source.name else ''}{name}": share
            for source, deck in zip(self.sources, self._curriculum.decks, strict=True)
            for name, share in deck.shares().items()
        }

    def state(self, next_ticket: int) -> dict[str, Any]:
        """The state for a checkpoint. Positions are for people: they follow from the number of tickets."""
        state: dict[str, Any] = {"fingerprint": self.fingerprint}
        if self.sources and self.sources[0].name:
            counts = self._mixture.counts_at(next_ticket)
            names = [source.name for source in self.sources]
            state["positions"] = dict(zip(names, counts, strict=True))
        if self._curriculum is not None:
            state["curriculum"] = self._curriculum.state()
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state. Raises ConfigError: rows, tokenizer, template, seed or
        shuffling changed since, so that positions mean nothing any more."""
        saved = state["fingerprint"]
        if saved != self.fingerprint:
            raise ConfigError(
                f"the training prompts changed since the checkpoint (fingerprint {self.fingerprint}, the "
                f"checkpoint has {saved}): files, tokenizer, data section or seed. Positions in the old "
                "order mean nothing in the new one; restore them, or start a new run."
            )
        if self._curriculum is not None:
            self._curriculum.restore(state["curriculum"])


def _open_curriculum(sources: Sequence[PromptSource], config: RunConfig) -> "Curriculum | None":
    if config.data.curriculum is None or not sources:
        return None
    from tidemill.services.trainer.batch.curriculum import Curriculum

    return Curriculum(sources, config.data.curriculum)


def _limits(named: Sequence[SourceConfig], sources: Sequence[PromptSource]) -> list[int | None]:
    """How many groups each source has in all its epochs; None: no end."""
    epochs = [source.epochs for source in named] or [None] * len(sources)
    return [None if e is None else e * len(s) for e, s in zip(epochs, sources, strict=True)]


def _check_limits(limits: Sequence[int | None], config: RunConfig) -> None:
    trainer = config.trainer
    needed = trainer.steps * trainer.groups_per_step
    ends = [limit for limit in limits if limit is not None]
    if len(ends) == len(limits) and sum(ends) < needed:
        raise ConfigError(
            f"data.train has {sum(ends):,} groups in all epochs of its sources, and trainer.steps x "
            f"trainer.groups_per_step are {needed:,}. Raise epochs, leave one source without, or lower "
            "trainer.steps."
        )
