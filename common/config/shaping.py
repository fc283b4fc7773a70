"""What shapes rewards before advantages are computed: sections of `trainer.algorithm`."""

from typing import Literal

from pydantic import Field

from tidemill.common.config.section import Section


class LengthPenaltyConfig(Section):
    """What length costs, the more so the easier the prompt: weight * the group's pass rate * the completion's
    share of the longest one in its group, taken off its reward (prime-rl's `length_penalty`)."""

    tokens: float = Field(0.0, ge=0.0, le=1e6)
    """Weight of the number of tokens that the model wrote; 0 is off."""
    turns: float = Field(0.0, ge=0.0, le=1e6)
    """Weight of the number of turns of a session; 0 is off."""
    of: Literal["all", "successes"] = "all"
    """Which completions of a group pay: `successes` leaves alone those below `pass_threshold`."""

    @property
    def is_on(self) -> bool:
        """Whether anything is taken off."""
        return self.tokens > 0.0 or self.turns > 0.0
