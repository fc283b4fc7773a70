"""The limits of one session."""

from dataclasses import dataclass

from tidemill.common.config.run import RunConfig
from tidemill.common.wire.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class Budget:
    """What a session may use; at each of its limits it is truncated, but for that of a single call."""

    max_turns: int
    max_tokens: int
    """Tokens of the completion, those of the environment included."""
    max_model_len: int
    max_result_tokens: int
    call_timeout_s: float
    session_timeout_s: float
    attempts: int

    @classmethod
    def of(cls, config: RunConfig) -> "Budget":
        environment, max_model_len = config.rollout.environment, config.model.max_model_len
        return cls(
            environment.max_turns,
            environment.max_tokens or max_model_len,
            max_model_len,
            environment.max_result_tokens,
            environment.call_timeout_s,
            environment.session_timeout_s,
            environment.attempts,
        )

    def room(self, num_prompt: int, num_completion: int) -> int:
        """Tokens that are left after so many."""
        return min(self.max_tokens, self.max_model_len - num_prompt) - num_completion


def fitted(sampling: SamplingParams, room: int) -> SamplingParams:
    """Sampling of a turn that has so much room."""
    if sampling.max_tokens <= room:
        return sampling
    return sampling.model_copy(update={"max_tokens": room})
