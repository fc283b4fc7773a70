"""Ends a run, or a re-scoring, whose reward fails by an error of its own code or data: such an error does not
pass.

Counted are scores in a row that failed that way, in the order in which they arrive; a score with a value, or
one that failed by a server, a limit of rate or the machine, begins the count again. What was scored before
this process started does not count: the code may have been corrected since.
"""

import time

from tidemill.common.command_line import command_line
from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.streams.entries import id_order
from tidemill.common.wire.messages import Score

STEPS_GIVE_UP = 2
LEAST_GIVE_UP = 64
MOST_GIVE_UP = 1024
"""Scores in a row that end the run: those of `STEPS_GIVE_UP` steps, within these bounds."""
GROUPS_GIVE_UP = 4
"""Groups, at least, of which all samples fail before a re-scoring ends: one row with a broken ground truth
fails a whole group."""
LEAST_SLOW = 8
SLOW_S = 300.0
"""So few are enough where the first of them is this old: code that loops fails slowly."""


class CodeErrors:
    """Counts the failed scores of one lane: `begin`, then `note` each score, and `check` now and then."""

    def __init__(self, config: RunConfig, num_scores: int) -> None:
        """`num_scores` in a row end the run."""
        self._limit = num_scores
        # A number that stands for failed rewards was chosen: the run goes on with it.
        self._is_on = config.reward.failure_value is None
        self._begins_after = ""
        self._num_in_row = 0
        self._first_at = 0.0
        self._reason = ""

    @classmethod
    def of_training(cls, config: RunConfig) -> "CodeErrors":
        trainer = config.trainer
        num_scores = STEPS_GIVE_UP * trainer.groups_per_step * config.largest_group_size
        return cls(config, min(max(num_scores, LEAST_GIVE_UP), MOST_GIVE_UP))

    @classmethod
    def of_rescoring(cls, config: RunConfig) -> "CodeErrors":
        return cls(config, max(LEAST_GIVE_UP, GROUPS_GIVE_UP * config.largest_group_size))

    @classmethod
    def of_evaluation(cls, config: RunConfig, num_samples: int) -> "CodeErrors":
        """All of an evaluation, or the first of a large one."""
        return cls(config, min(num_samples, LEAST_GIVE_UP))

    @property
    def has_begun(self) -> bool:
        return bool(self._begins_after)

    def begin(self, entry_id: str) -> None:
        """Count scores behind this entry of their stream; does nothing the second time."""
        self._begins_after = self._begins_after or entry_id

    def note(self, entry_id: str, score: Score) -> None:
        if not self.has_begun or id_order(entry_id) <= id_order(self._begins_after):
            return
        if not score.is_code_error:
            self._num_in_row = 0
            return
        if not self._num_in_row:
            self._first_at = time.monotonic()
        self._num_in_row += 1
        self._reason = score.error

    def check(self, about: str = "", then: str = "resume the run") -> None:
        """Raises ConfigError: so many scores in a row failed by the reward's own code or data that all will.
        The message says with `about` what was to be scored, and with `then` what to do after a correction."""
        is_slow = self._num_in_row >= LEAST_SLOW and time.monotonic() - self._first_at > SLOW_S
        if not self._is_on or not (self._num_in_row >= self._limit or is_slow):
            return
        raise ConfigError(
            f"the reward's own code fails: the last {self._num_in_row} scores{about} failed, and none had a "
            f"value. The reason of the last one: {self._reason}. Such an error does not pass by itself: "
            "correct the code, or the ground truths where the reason names one, try it with "
            f"`{command_line('check', 'CONFIG')}`, then {then}"
        )
