"""When replacing groups has to end, because none will ever be trained."""

from collections import Counter
from collections.abc import Sequence

import structlog

from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.groups.group_filter import ZERO_VARIANCE

log = structlog.get_logger(__name__)

LEAST_WARN = 8
"""So many groups, or a step's worth, replaced in a row are a warning; twice as many the next one."""
LEAST_GIVE_UP, STEPS_GIVE_UP = 256, 8
"""This many groups, or steps' worth of them, replaced in a row end the run: none will ever be trained."""


class ReplacementLimit:
    """Counts replaced groups: those in a row, and those without variance of the step in progress."""

    def __init__(self, trainer: TrainerConfig) -> None:
        self._groups_per_step, self._rounds = trainer.groups_per_step, trainer.algorithm.max_filter_rounds
        self._in_a_row, self._num_filtered = 0, 0
        self._warns_at = max(LEAST_WARN, self._groups_per_step)
        self._rewards: Counter[float] = Counter()
        """What every reward of a group was, of groups without variance since the last one with some."""

    def restore(self, reasons: Sequence[str]) -> None:
        """Continue in the middle of a step, in which groups were replaced for these reasons."""
        self._num_filtered = sum(reason == ZERO_VARIANCE for reason in reasons)

    def begin_step(self) -> None:
        """A step is over: its rounds are."""
        self._num_filtered = 0

    def note_trained(self) -> None:
        """A group can be trained."""
        self._in_a_row, self._warns_at = 0, max(LEAST_WARN, self._groups_per_step)
        self._rewards.clear()

    def note_replaced(self, reason: str, detail: str, rewards: Sequence[float]) -> None:
        """A group is about to be replaced; `rewards` are those of a group without variance. Raises
        ConfigError: it was one too many."""
        self._in_a_row += 1
        if reason == ZERO_VARIANCE:
            self._num_filtered += 1
            self._rewards.update(rewards[:1])
        size = self._groups_per_step
        if self._in_a_row >= self._warns_at:
            self._warns_at = 2 * self._in_a_row
            log.warning(
                "no group could be trained recently; each is replaced",
                groups_in_a_row=self._in_a_row,
                last_reason=reason,
                detail=detail,
            )
        if self._rounds is not None and self._num_filtered > (self._rounds - 1) * size:
            raise ConfigError(
                f"a step of {size} groups needs more than {self._rounds} times as many "
                f"(trainer.algorithm.max_filter_rounds): {self._num_filtered} groups were replaced because "
                f"all their rewards are equal. {self._about_rewards()}"
            )
        if self._in_a_row <= max(LEAST_GIVE_UP, STEPS_GIVE_UP * size):
            return
        if self._rewards.total() == self._in_a_row:
            raise ConfigError(
                f"{self._in_a_row} groups in a row were replaced because all their rewards are equal. "
                f"{self._about_rewards()}"
            )
        raise ConfigError(
            f"{self._in_a_row} groups in a row could not be trained, the last one because of "
            f"{reason!r} {detail}. Fix its cause, then resume the run."
        )

    def _about_rewards(self) -> str:
        if len(self._rewards) == 1 and self._rewards.total() == self._in_a_row > 1:
            (value,) = self._rewards
            return (
                f"The reward is constant: it was {value:g} for every sample of the last {self._in_a_row} "
                "groups. Look at what the reward function is given and returns (`tidemill trace`), then "
                "resume the run."
            )
        found = ", ".join(f"{value:g} in {n} groups" for value, n in self._rewards.most_common(5))
        return (
            f"Rewards were {found or 'not kept'} recently: prompts are too easy or too hard. Choose them by "
            "difficulty (data.curriculum), raise trainer.group_size, or turn filter_zero_variance off; then "
            "resume the run."
        )
