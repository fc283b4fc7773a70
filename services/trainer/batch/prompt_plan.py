"""Which prompt each ticket has, in what size of group, sampled how.

Guarantee: the prompt of ticket n follows from the seed, the config, the tickets before n and, where there is
a curriculum, the commits that `curriculum.py` names: never from timing. So a checkpoint needs little, a
resumed run issues the same prompts, and a ticket that Redis has lost is issued again unchanged.
"""

from collections.abc import Iterable, Sequence, Set
from typing import Any

import xxhash

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.wire.messages import Commit, Outcome, SamplingParams, Ticket
from tidemill.services.trainer.batch.curriculum import Curriculum
from tidemill.services.trainer.batch.mixture import Mixture
from tidemill.services.trainer.batch.prompts import Prompt, PromptSource
from tidemill.services.trainer.groups.group_filter import TrainableGroup


class PromptPlan:
    """The prompts of a run: one source without a name, or those of `data.train`, in their order."""

    def __init__(self, sources: Sequence[PromptSource], config: RunConfig) -> None:
        self.sources, self._config = sources, config
        named = config.data.sources
        epochs = [source.epochs for source in named] or [None]
        limits = [None if e is None else e * len(s) for e, s in zip(epochs, sources, strict=True)]
        _check_limits(limits, config)
        weights = [source.weight for source in named] or [1.0]
        self._mixture = Mixture(weights, config.seed, limits)
        self._curriculum: Curriculum | None = None
        if config.data.curriculum is not None:
            self._curriculum = Curriculum(sources, config.data.curriculum)
        self.fingerprint = _fingerprint(sources, weights, limits)
        sampling = list(map(config.sampling_of, named)) or [config.rollout.sampling]
        self._sampling = [SamplingParams(**own.model_dump()) for own in sampling]
        self._sizes = [config.group_size(source.name) for source in sources]

    def fields(self, number: int, min_version: int) -> dict[str, Any]:
        """What the ticket of this number says of its prompt and its group. A new number is the next one."""
        source, prompt = self._prompt_of(number, min_version)
        return prompt.ticket_fields() | {
            "group_size": self._sizes[source],
            "sampling": self._sampling[source],
        }

    def group_size(self, number: int) -> int:
        """Samples of the ticket's group."""
        return self._sizes[self._source_of(number)]

    def sizes(self, tickets: Iterable[int]) -> dict[str, int]:
        """Samples of each group, of those that have another number than `trainer.group_size` says."""
        sizes = {str(ticket): self.group_size(ticket) for ticket in tickets}
        return {ticket: size for ticket, size in sizes.items() if size != self._config.trainer.group_size}

    def adopt(self, ticket: Ticket) -> None:
        """Take in a ticket that an earlier process has issued, the next one."""
        if self._curriculum is None:
            return
        source = self._source_of(ticket.ticket)
        issued = self.sources[source].place_of(ticket.row)
        self._curriculum.adopt(ticket.ticket, source, ticket.min_version, issued)
        if ticket.outcome is not None:
            self._curriculum.unreported[ticket.replaces] = ticket.outcome

    def forget(self, ticket: int) -> None:
        """The ticket was trained or replaced."""
        if self._curriculum is not None:
            self._curriculum.places.pop(ticket, None)

    def replaced(self, ticket: int, rewards: Sequence[float]) -> Outcome | None:
        """A group without variance is replaced: what it says of its prompt, for the ticket in its place; the
        next commit tells it too. None without a curriculum."""
        outcome = self._outcome(ticket, rewards)
        if self._curriculum is not None and outcome is not None:
            self._curriculum.unreported[ticket] = outcome
        return outcome

    def outcomes(self, groups: Sequence[TrainableGroup]) -> tuple[Outcome, ...]:
        """What a step's commit tells: of the groups that it trained, and of those replaced since the last."""
        if self._curriculum is None:
            return ()
        found = dict(self._curriculum.unreported)
        for group in groups:
            if (outcome := self._outcome(group.ticket, group.rewards)) is not None:
                found[group.ticket] = outcome
        return tuple(found[ticket] for ticket in sorted(found))

    def take_commit(self, commit: Commit) -> None:
        """A step is committed; in the order of steps."""
        if self._curriculum is not None:
            self._curriculum.take_commit(commit)

    def forget_reported(self, tickets: Set[int]) -> None:
        """Commits have reported these replaced groups."""
        if self._curriculum is not None:
            self._curriculum.forget_reported(tickets)

    def metrics(self) -> dict[str, float]:
        """Of the curriculum: shares of each source's prompts."""
        if self._curriculum is None:
            return {}
        return {
            f"curriculum/{source.name + '/' if source.name else ''}{name}": share
            for source, deck in zip(self.sources, self._curriculum.decks, strict=True)
            for name, share in deck.shares().items()
        }

    def state(self, next_ticket: int) -> dict[str, Any]:
        """For the checkpoint. The positions are for people: they follow from the number of tickets."""
        state: dict[str, Any] = {"fingerprint": self.fingerprint}
        if self._config.data.sources:
            counts = self._mixture.counts_at(next_ticket)
            names = [source.name for source in self.sources]
            state["positions"] = dict(zip(names, counts, strict=True))
        if self._curriculum is not None:
            state["curriculum"] = self._curriculum.state()
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state. Raises ConfigError: rows, tokenizer, template, seed or
        shuffling changed since, so that positions mean nothing any more."""
        if (saved := state["fingerprint"]) != self.fingerprint:
            raise ConfigError(
                f"the training prompts changed since the checkpoint (fingerprint {self.fingerprint}, the "
                f"checkpoint has {saved}): files, tokenizer, data section or seed. Positions in the old "
                "order mean nothing in the new one; restore them, or start a new run."
            )
        if self._curriculum is not None:
            self._curriculum.restore(state["curriculum"])

    def _source_of(self, number: int) -> int:
        return self._mixture.turn_at(number).source

    def _prompt_of(self, number: int, min_version: int) -> tuple[int, Prompt]:
        source, position = self._mixture.turn_at(number)
        if self._curriculum is None:
            return source, self.sources[source].prompt_at(position)
        place = self._curriculum.place_of(number, source, min_version)
        return source, self.sources[source].prompts[place]

    def _outcome(self, ticket: int, rewards: Sequence[float]) -> Outcome | None:
        if self._curriculum is None or ticket not in self._curriculum.places:
            return None
        source = self.sources[self._source_of(ticket)]
        row = int(source.rows[self._curriculum.places[ticket]])
        threshold = self._config.trainer.algorithm.success_threshold
        return source.name, row, sum(reward >= threshold for reward in rewards), len(rewards)


def _check_limits(limits: Sequence[int | None], config: RunConfig) -> None:
    trainer = config.trainer
    needed, known = trainer.steps * trainer.groups_per_step, [limit for limit in limits if limit is not None]
    if len(known) == len(limits) and sum(known) < needed:
        raise ConfigError(
            f"data.train has {sum(known):,} groups in all epochs of its sources, and trainer.steps x "
            f"trainer.groups_per_step are {needed:,}. Raise epochs, leave one source without, or lower "
            "trainer.steps."
        )


def _fingerprint(
    sources: Sequence[PromptSource], weights: Sequence[float], limits: Sequence[int | None]
) -> str:
    """Over everything that decides which prompt is at which position of which source."""
    if not sources[0].name:
        return sources[0].fingerprint
    parts = [(s.name, s.fingerprint, w, n) for s, w, n in zip(sources, weights, limits, strict=True)]
    return xxhash.xxh3_128_hexdigest(repr(parts).encode())
