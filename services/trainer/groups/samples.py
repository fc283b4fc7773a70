"""One trajectory as the trainer sees it: token ids, rollout logprobs, loss mask, and its advantage.

The arrays of a sample fit each other, its numbers are finite, and its prompt is not empty (the last prompt
token predicts the first completion token). A sample that breaks this is never built, so later code need not
look for NaN.
"""

from dataclasses import dataclass

import numpy as np

from common.wire.arrays import Bits, Float32, Float64, Int32
from common.wire.messages import TrajectoryKey

PER_TOKEN = ("advantage", "returns", "proximal_logprobs", "reference_logprobs", "values")
"""Fields that, where they are arrays, have an entry for each completion token."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """T completion tokens, of which those with `mask` are trained.

    A completion may be empty (T = 0) or masked entirely: it has no gradient, but counts as a sequence.

    Raises:
        ValueError: lengths differ, the prompt is empty, or a number is not finite.
    """

    key: TrajectoryKey
    prompt_ids: Int32
    completion_ids: Int32
    rollout_logprobs: Float32
    mask: Bits
    reward: float
    advantage: float | Float64 = 0.0
    """One number, or one for each completion token, [T]; `Advantages.assign` fills it in."""
    returns: Float64 | None = None
    """Targets of the value head, [T], with the advantage."""
    proximal_logprobs: Float32 | None = None
    """[T], under the weights at the start of the step; None where those are the current weights."""
    reference_logprobs: Float32 | None = None
    """[T], under the reference model, where there is one."""
    values: Float32 | None = None
    """[T], the value head's estimates at the start of the step, before each token is chosen."""

    def __post_init__(self) -> None:
        num_tokens = len(self.completion_ids)
        if len(self.rollout_logprobs) != num_tokens or len(self.mask) != num_tokens:
            raise ValueError(
                f"trajectory {self.key}: {num_tokens} completion ids, {len(self.rollout_logprobs)} logprobs "
                f"and a mask of {len(self.mask)} must have one length"
            )
        if not len(self.prompt_ids):
            raise ValueError(f"trajectory {self.key}: the prompt is empty, nothing predicts the first token")
        if not (np.isfinite(self.advantage).all() and np.isfinite(self.reward)):
            raise ValueError(
                f"trajectory {self.key}: reward {self.reward} and advantage {self.advantage} must be finite"
            )
        for name in PER_TOKEN:
            value = getattr(self, name)
            if isinstance(value, np.ndarray) and value.shape != (num_tokens,):
                raise ValueError(f"trajectory {self.key}: {name} of shape {value.shape}, not ({num_tokens},)")
        if not np.isfinite(self.rollout_logprobs).all():
            raise ValueError(f"trajectory {self.key}: rollout logprobs must be finite")

    @property
    def num_tokens(self) -> int:
        """Prompt plus completion: what the sample takes of a micro-batch's budget."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def num_trained(self) -> int:
        """Completion tokens that carry loss."""
        return int(np.count_nonzero(self.mask))

    @property
    def mean_advantage(self) -> float:
        """The advantage; of one for each token, the mean over the trained tokens (0 without any)."""
        if not isinstance(self.advantage, np.ndarray):
            return float(self.advantage)
        return float(self.advantage[self.mask].mean()) if self.num_trained else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class PrecomputedTokens:
    """What a policy computes of one trajectory before training, [T] each: fields of `Sample`. None where the
    algorithm has no use for it."""

    proximal_logprobs: Float32 | None = None
    reference_logprobs: Float32 | None = None
    values: Float32 | None = None


@dataclass(frozen=True, slots=True)
class Precomputed:
    """What was computed of a group's trajectories for one step, by index."""

    step: int
    tokens: dict[int, PrecomputedTokens]
