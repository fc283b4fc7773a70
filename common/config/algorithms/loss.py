"""What a loss is: the objective of each token, what follows from its name, and arithmetic that several share.

The files of losses import no torch, so that the config can read them in any process: they use the methods of
the tensors that they get.

Shape legend: N trained tokens, S sequences that they belong to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from tidemill.common.config.algorithms.settings import Algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from tidemill.common.config.algorithm import AlgorithmConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before `exp`: e^20 is far outside every clip range, and finite."""


class Tokens(Protocol):
    """What a loss reads of N tokens; `services/trainer/algorithm/losses/tokens.py` has all of it.

    Example: a token with probability 0.6 now, 0.5 under the old policy and advantage 2: `log_N` 0.1823,
    `ratio_N` 1.2, `advantages_N` 2, `logprobs_N` -0.5108, `old_logprobs_N` -0.6931.
    """

    @property
    def log_N(self) -> "Tensor":
        """[N] log(current / old), with gradient."""

    @property
    def ratio_N(self) -> "Tensor":
        """[N] current / old, with gradient, finite."""

    @property
    def logprobs_N(self) -> "Tensor":
        """[N] of the current policy, with gradient."""

    @property
    def old_logprobs_N(self) -> "Tensor":
        """[N] of the old policy."""

    @property
    def advantages_N(self) -> "Tensor":
        """[N]."""

    @property
    def penalised_N(self) -> "Tensor | None":
        """[N] 1 for the tokens that the loss penalises; None where it chooses none."""

    @property
    def sequence_N(self) -> "Tensor":
        """[N] int64 in [0, S): the sequence of each token."""

    @property
    def num_sequences(self) -> int:
        """S."""


@dataclass(frozen=True, slots=True, eq=False)
class Surrogate:
    """An objective per token, to be maximised, and which tokens its bounds have cut off; None: no bound.

    Example: `ppo` of one token with ratio 1.5 and advantage 2, `clip_high` 0.28: `objective_N` 1.28 * 2 =
    2.56, `is_high_N` True, `is_low_N` False, and `is_dual_N` None without a `dual_clip`.
    """

    objective_N: "Tensor"
    is_low_N: "Tensor | None" = None
    is_high_N: "Tensor | None" = None
    is_dual_N: "Tensor | None" = None


Position = tuple[tuple[int, int], int]
"""The key of a token's sample, and the token's index in the completion."""
SurrogateFunction = Callable[[Tokens, "AlgorithmConfig"], Surrogate]
Choice = Callable[[Tokens, Surrogate, Sequence[Position], "AlgorithmConfig"], list[int]]
"""Indices, among N tokens, of those that it chooses."""


@dataclass(frozen=True, kw_only=True)
class LossTraits:
    """What follows from a loss, apart from its numbers. The default is also that of a user's own.

    Example: `gspo` has one ratio for a sequence: `level` "sequence", `has_dual_clip`, and `is_idle_at_one`.
    """

    level: Literal["token", "sequence"] = "token"
    """One ratio for each token, or one for a sequence."""
    has_ratio: bool = True
    """Uses the ratio to the old logprobs."""
    has_dual_clip: bool = False
    """`dual_clip` bounds its ratio."""
    is_idle_at_one: bool = False
    """Only bounds the ratio: useless where that is always 1."""
    weighs_by_rollout: bool = False
    """The ratio is a weight against the rollout policy."""
    choose: Choice | None = None
    """Chooses tokens of a mini-batch, which then waits for its last group: from all tokens at the start of
    the step, and what the surrogate makes of them."""
    leaves_out: bool = False
    """Whether the chosen ones have no policy term; else they are `Tokens.penalised_N`."""


@dataclass(frozen=True, kw_only=True)
class Loss(LossTraits, Algorithm):
    """A built-in loss.

    Example: `cispo`, whose `surrogate` weighs a token by its clipped ratio; of the traits it sets
    `weighs_by_rollout`.
    """

    surrogate: SurrogateFunction
    """The objective of each token."""


def sequence_sums(values_N: "Tensor", sequence_N: "Tensor", num_sequences: int) -> "Tensor":
    """Sums over the tokens of each sequence. Shape [S]."""
    return values_N.new_zeros(num_sequences).index_add(0, sequence_N, values_N)


def sequence_means(values_N: "Tensor", sequence_N: "Tensor", num_sequences: int) -> "Tensor":
    """Means over the tokens of each sequence. Shape [S]; 0 for a sequence without a token."""
    counts_S = sequence_sums(values_N.new_ones(values_N.shape), sequence_N, num_sequences)
    return sequence_sums(values_N, sequence_N, num_sequences) / counts_S.clamp(min=1.0)


def clipped_surrogate(ratio_N: "Tensor", advantages_N: "Tensor", algorithm: "AlgorithmConfig") -> Surrogate:
    """min(r A, clip(r, 1 - low, 1 + high) A), and at least `dual_clip` * A where A < 0. Shapes [N].

    arXiv 1707.06347, eq. 7; separate bounds are DAPO's clip-higher (arXiv 2503.14476); the dual clip is arXiv
    1912.09729 (TRL's `delta`). The gradient is zero where a positive advantage meets r > 1 + high, or a
    negative one r < 1 - low (those tokens have already moved enough) or r > `dual_clip` (one token that
    became much likelier would outweigh all others). r = 1.5, A = 2, high = 0.28 gives 2.56.
    """
    low = 1.0 - algorithm.clip_low
    high = 1.0 + algorithm.clip_high
    dual_clip = algorithm.dual_clip_bound
    clipped_N = ratio_N.clamp(low, high)
    # Above 1 + high, the minimum of a positive A is the clipped side: so this bound acts on negative A alone.
    bounded_N = ratio_N if dual_clip is None else ratio_N.clamp(max=dual_clip)
    objective_N = (bounded_N * advantages_N).minimum(clipped_N * advantages_N)
    return Surrogate(
        objective_N,
        is_low_N=(ratio_N < low) & (advantages_N < 0),
        is_high_N=(ratio_N > high) & (advantages_N > 0),
        is_dual_N=None if dual_clip is None else (ratio_N > dual_clip) & (advantages_N < 0),
    )
