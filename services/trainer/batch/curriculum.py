"""A source whose prompts are chosen by how often they were solved: easy and hard ones are left out, those
between come more often, and what was left out is tried again later.

Which outcomes decide does not depend on timing. A ticket is drawn from the outcomes of committed steps below
its `min_version`, or that of a ticket before it, whichever is greater: admission has waited for these steps,
so they are committed whenever the ticket is issued, in a resumed run too. Draws and outcomes come in one
order, so the same commits give the same prompts. A deck is a state machine of these two.

Where Redis has lost commits and still has tickets that were drawn from them, these tickets stand with the
prompts that they have. The decks wait: they draw for such a ticket when its steps are committed again, so
that every ticket after them has the prompt that the commits give.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import floor
from typing import Any, NamedTuple

import numpy as np

from tidemill.common.config.sources import CurriculumConfig
from tidemill.common.wire.messages import Commit, Outcome, outcome_of
from tidemill.services.trainer.batch.prompts import PromptSource

MEMORY = 0.5
"""Weight of a prompt's rate until now when the outcome of its next group comes in."""


class Tried(NamedTuple):
    """The outcomes of one prompt until now."""

    rate: float
    """Share of the samples that solve it; what is older counts less (`MEMORY`)."""
    epoch: int
    """Epoch of the source when its last outcome came in."""


class Deck:
    """The prompts of one source. Places are those of `prompts.prompts`."""

    def __init__(self, prompts: PromptSource, config: CurriculumConfig) -> None:
        self.prompts = prompts
        self.config = config
        self.tried: dict[int, Tried] = {}
        self._position = 0
        self._num_drawn = 0
        # Exact: with floats, rounding would decide which draws are focused.
        self._focus = Fraction(str(config.focus))
        self._between: dict[int, None] = {}
        """Places of prompts that are neither easy nor hard; the one at the front waits for longest."""

    def draw(self) -> int:
        """The place of the next prompt.

        Of n draws, floor(n * focus) go to a prompt between easy and hard where one is known: the one that
        was drawn so longest ago. All others follow the order of the epoch, without what is left out.
        Where a whole epoch is left out, the next prompt in order comes all the same.
        """
        drawn = self._num_drawn
        self._num_drawn += 1
        is_focused = floor((drawn + 1) * self._focus) > floor(drawn * self._focus)
        if is_focused and self._between:
            index = next(iter(self._between))
            # To the end: a dict keeps the order of insertion.
            self._between.pop(index)
            self._between[index] = None
            return index
        first = self._position
        for position in range(first, first + len(self.prompts)):
            index = self.prompts.index_at(position)
            epoch = position // len(self.prompts)
            tried = self.tried.get(index)
            if tried is None or index in self._between or epoch - tried.epoch >= self.config.revisit:
                self._position = position + 1
                return index
        self._position = first + 1
        return self.prompts.index_at(first)

    def learn(self, row: int, num_solved: int, num_scored: int) -> None:
        """Take in the outcome of a group of the prompt in this row; one without scores is ignored."""
        index = self.prompts.place_of(row)
        if not num_scored or index is None:
            return
        rate = num_solved / num_scored
        if index in self.tried:
            rate = MEMORY * self.tried[index].rate + (1.0 - MEMORY) * rate
        self.tried[index] = Tried(rate, self._position // len(self.prompts))
        if self.config.hard < rate < self.config.easy:
            self._between.setdefault(index)
        else:
            self._between.pop(index, None)

    def shares(self) -> dict[str, float]:
        """Shares of the source's prompts that are easy, hard, between the two, and not tried yet."""
        rates = np.array([tried.rate for tried in self.tried.values()])
        count = len(self.prompts)
        return {
            "easy": float((rates >= self.config.easy).sum()) / count,
            "hard": float((rates <= self.config.hard).sum()) / count,
            "between": len(self._between) / count,
            "untried": 1.0 - len(self.tried) / count,
        }

    def state(self) -> dict[str, Any]:
        return {
            "position": self._position,
            "num_drawn": self._num_drawn,
            "between": list(self._between),
            "tried": [[index, *tried] for index, tried in self.tried.items()],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._position = int(state["position"])
        self._num_drawn = int(state["num_drawn"])
        self._between = dict.fromkeys(int(index) for index in state["between"])
        self.tried = {int(index): Tried(float(rate), int(epoch)) for index, rate, epoch in state["tried"]}


class Curriculum:
    """The decks of all sources, and the outcomes that wait until a ticket may be drawn from them."""

    def __init__(self, sources: Sequence[PromptSource], config: CurriculumConfig) -> None:
        self._sources = sources
        self._config = config
        self.decks = [Deck(source, config) for source in sources]
        self._by_name = {source.name: deck for source, deck in zip(sources, self.decks, strict=True)}
        self.unreported: dict[int, Outcome] = {}
        """Outcomes of replaced groups that no commit has reported yet, by ticket."""
        self._num_drawn = 0
        self._horizon = 0
        self._queue: deque[tuple[int, int]] = deque()
        """Source and `min_version` of the tickets from `_num_drawn` on that the decks have not drawn yet."""
        self._waiting: dict[int, list[Outcome]] = {}
        """Outcomes by the step that reported them."""

    def draw(self, number: int, source: int, min_version: int) -> int:
        self.adopt(number, source, min_version)
        index = self._draw_queued(self._num_committed)
        return self._draw_ahead() if index is None else index

    def adopt(self, number: int, source: int, min_version: int) -> None:
        """Take in the next ticket, which an earlier process issued: its prompt is in it."""
        if number != (following := self._num_drawn + len(self._queue)):
            raise ValueError(f"ticket {number} cannot be drawn: the next one is {following}")
        self._queue.append((source, min_version))

    def take_commit(self, commit: Commit) -> None:
        """Keep the outcomes of a committed step until tickets may be drawn from them."""
        self._waiting[commit.step] = list(commit.outcomes)
        self.forget_reported(ticket for ticket, index, _ in commit.dropped if index < 0)
        self._draw_queued(self._num_committed)

    @property
    def _num_committed(self) -> int:
        """Steps whose outcomes came in."""
        return max(self._horizon, 1 + max(self._waiting, default=-1))

    def _draw_queued(self, num_committed: int) -> int | None:
        """Draw for the queued tickets, in order, up to one that follows from more than these steps. Returns
        the place of the last ticket, None where that is not drawn now."""
        index = None
        while self._queue and self._queue[0][1] <= num_committed:
            source, min_version = self._queue.popleft()
            self._num_drawn += 1
            self._horizon = max(self._horizon, min_version)
            # In the order of steps: a prompt's rate depends on the order of its outcomes.
            for step in sorted(step for step in self._waiting if step < self._horizon):
                for name, row, num_solved, num_scored in self._waiting.pop(step):
                    if name in self._by_name:
                        self._by_name[name].learn(row, num_solved, num_scored)
            index = self.decks[source].draw()
        return None if self._queue else index

    def _draw_ahead(self) -> int:
        """The place of the last ticket in the queue, from what is committed by now: a replacement cannot wait
        for the step that waits for it. The decks themselves stay as they are."""
        ahead = Curriculum(self._sources, self._config)
        ahead.restore(self.state())
        index = ahead._draw_queued(max(min_version for _, min_version in self._queue))
        assert index is not None
        return index

    def forget_reported(self, tickets: Iterable[int]) -> None:
        """A commit has reported these replaced groups."""
        for ticket in tickets:
            self.unreported.pop(ticket, None)

    def state(self) -> dict[str, Any]:
        waiting = []
        for step, outcomes in self._waiting.items():
            waiting.append([step, [list(outcome) for outcome in outcomes]])
        return {
            "num_drawn": self._num_drawn,
            "horizon": self._horizon,
            "queue": [list(item) for item in self._queue],
            "unreported": [[ticket, *outcome] for ticket, outcome in self.unreported.items()],
            "waiting": waiting,
            "decks": [deck.state() for deck in self.decks],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._num_drawn = int(state["num_drawn"])
        self._horizon = int(state["horizon"])
        self._queue = deque((int(source), int(version)) for source, version in state["queue"])
        self.unreported = {int(ticket): outcome_of(values) for ticket, *values in state["unreported"]}
        self._waiting = {}
        for step, outcomes in state["waiting"]:
            self._waiting[int(step)] = [outcome_of(values) for values in outcomes]
        for deck, saved in zip(self.decks, state["decks"], strict=True):
            deck.restore(saved)
