"""Which prompt, group size and sampling each ticket has, and which places of the batches have demonstrations.

Guarantee: the prompt of ticket n follows from the seed, the config, the tickets before n and, where there is
a curriculum, the commits that `curriculum.py` names: never from timing. So a checkpoint needs little, and a
resumed run issues the same prompts.

`mixture.py` mixes several sources, and demonstrations, by their weights.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.wire.messages import (
    Commit,
    Outcome,
    SamplingParams,
    Ticket,
    is_demonstration,
)
from tidemill.services.trainer.batch.prompts import Prompt, PromptSource

if TYPE_CHECKING:
    from tidemill.common.config.sources import SourceConfig
    from tidemill.services.trainer.batch.curriculum import Curriculum
    from tidemill.services.trainer.batch.mixture import BatchPlaces, Mixture


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
        self._mixture = _open_mixture(weights, config.seed, limits)
        self.demonstration_places = _open_places(demonstrations, limits_of_demonstrations, config)
        """Which places of the batches have demonstrations; None: none has."""
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
        source, position = self._place_at(number)
        if self._curriculum is None:
            return self._fields(source, self.sources[source].prompt_at(position))
        index = self._curriculum.draw(number, source, min_version)
        return self._fields(source, self.sources[source].prompts[index])

    def fields_of_row(self, number: int, row: int) -> dict[str, Any]:
        """Fields of a ticket that was issued before, for the prompt in this row and its group."""
        source, _ = self._place_at(number)
        index = self.sources[source].place_of(row)
        assert index is not None, "the fingerprint is that of the same rows"
        return self._fields(source, self.sources[source].prompts[index])

    def _place_at(self, number: int) -> tuple[int, int]:
        """Source of a ticket, and its position in that; one source without a name has all tickets."""
        return (0, number) if self._mixture is None else self._mixture.place_at(number)

    def _fields(self, source: int, prompt: Prompt) -> dict[str, Any]:
        of_source = {"group_size": self._sizes[source], "sampling": self._sampling[source]}
        return prompt.ticket_fields() | of_source

    def sizes(self, tickets: Iterable[int]) -> dict[str, int]:
        """Size of each group whose size is not `trainer.group_size`, by ticket."""
        sizes = {
            str(ticket): 1 if is_demonstration(ticket) else self._sizes[self._place_at(ticket)[0]]
            for ticket in tickets
        }
        return {ticket: size for ticket, size in sizes.items() if size != self._config.trainer.group_size}

    def num_tickets(self, steps: int) -> int:
        """Tickets of the first `steps` steps, without those that replace others."""
        if self.demonstration_places is not None:
            return self.demonstration_places.num_prompts(steps)
        return steps * self._config.trainer.groups_per_step

    def step_of(self, number: int) -> int:
        """The step of the `number`-th of these tickets."""
        if self.demonstration_places is not None:
            return self.demonstration_places.step_of(number)
        return number // self._config.trainer.groups_per_step

    def adopt(self, ticket: Ticket) -> None:
        """Take in the next ticket, which an earlier process has issued."""
        if self._curriculum is not None:
            source, _ = self._place_at(ticket.ticket)
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
        if self._mixture is not None and self.sources:
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


def _open_mixture(weights: Sequence[float], seed: int, limits: Sequence[int | None]) -> "Mixture | None":
    """None where the sources of prompts have no names, and so no weights."""
    if not weights:
        return None
    from tidemill.services.trainer.batch.mixture import Mixture

    return Mixture(weights, seed, limits)


def _open_places(
    demonstrations: Sequence[PromptSource], limits: Sequence[int | None], config: RunConfig
) -> "BatchPlaces | None":
    if not demonstrations:
        return None
    from tidemill.services.trainer.batch.mixture import BatchPlaces

    return BatchPlaces(demonstrations, limits, config)


def _open_curriculum(sources: Sequence[PromptSource], config: RunConfig) -> "Curriculum | None":
    if config.data.curriculum is None or not sources:
        return None
    from tidemill.services.trainer.batch.curriculum import Curriculum

    return Curriculum(sources, config.data.curriculum)


def _limits(named: "Sequence[SourceConfig]", sources: Sequence[PromptSource]) -> list[int | None]:
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
