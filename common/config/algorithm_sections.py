"""The sections of `trainer.algorithm` that all algorithms read: corrections of the ratio, further terms,
and what shapes rewards. Those of single ones are in their files (`algorithms/with_settings/`)."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from tidemill.common.config.section import OFF, Rules, Section


class ImportanceConfig(Section):
    """Importance weights, for tokens that another policy than the old one sampled."""

    mode: Annotated[Literal["auto", "truncate", "mask", "off"], OFF] = "auto"
    """`truncate` bounds weights to [low, high], `mask` leaves others out. `auto`: `truncate`, or `off` with
    `old_logprobs: rollout`."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """One weight for each token, or sequence: the product of its tokens' ratios, or their geometric mean."""
    low: float = Field(0.0, ge=0.0, le=1.0)
    """Smallest weight."""
    high: float = Field(2.0, ge=1.0, le=1000.0)
    """Largest weight."""
    normalise: bool = False
    """Divide truncated weights by their mean over the mini-batch."""


Criterion = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
"""Criteria named as in verl's `rollout_rs`: on single tokens, or on a sequence's sum, mean or maximum."""

MAX_BOUND = 1e9


class RejectionConfig(Section):
    """Leaves out tokens or sequences on which old policy and rollout differ too much. With r = old / rollout:
    k1 is r, k2 = log(r)^2 / 2, k3 = r - 1 - log r."""

    bounds: dict[Criterion, float | tuple[float, float]] = Field(default_factory=dict)
    """All have to hold. k1: lowest and highest ratio (x is 1 / x and x); k2, k3: largest value."""
    veto: float | None = Field(None, gt=0.0, lt=1.0)
    """A sequence with a token whose r is below this is left out; for example 1e-4."""
    denominator: Literal["all", "kept"] = "all"
    """Whether rejected tokens count in the divisor of sums."""

    @field_validator("bounds")
    @classmethod
    def _are_bounds(cls, declared: dict[Criterion, Any]) -> dict[Criterion, Any]:
        bounds = {}
        for name, bound in declared.items():
            if name.endswith("k1") and not isinstance(bound, tuple):
                bound = (1.0 / bound, bound) if bound else (0.0, 0.0)
            if name.endswith("k1"):
                is_right = 0.0 < bound[0] <= 1.0 <= bound[1] <= MAX_BOUND
                wanted = (
                    "one number above 1, or two of which the first is in (0, 1] and the second at least 1"
                )
            else:
                is_right = isinstance(bound, float) and 0.0 < bound <= MAX_BOUND
                wanted = "one number above 0"
            if not is_right:
                raise ValueError(f"{name}: got {declared[name]}, expected {wanted}, at most {MAX_BOUND:g}")
            bounds[name] = bound
        return bounds

    @property
    def of_tokens(self) -> list[str]:
        return [name for name in self.bounds if name.startswith("token")]

    @property
    def of_sequences(self) -> list[str]:
        return [name for name in self.bounds if name.startswith("seq")]

    @property
    def is_on(self) -> bool:
        return bool(self.bounds) or self.veto is not None


class KlConfig(Section):
    """A penalty for moving away from the reference model."""

    place: Annotated[Literal["off", "loss", "reward"], OFF] = "off"
    """`loss` adds the penalty to each token's loss, `reward` subtracts it from each token's reward."""
    estimator: Literal["k1", "k2", "k3", "k3+", "corrected_k3", "abs"] = "k3"
    """docs/algorithms.md has values and gradients."""
    coefficient: float = Field(0.001, gt=0.0, le=100.0)
    """Weight of the penalty (beta)."""
    bound: float | None = Field(10.0, gt=0.0, le=1e9)
    """Largest k3 of a token, beyond which it has no gradient (verl's); null: GRPO's formula."""


class TeacherTermConfig(Section):
    """How a teacher's logprobs enter training, times its `weight`."""

    place: Literal["reward", "loss"] = "reward"
    """`reward` adds the difference to the token's advantage, `loss` an estimate of KL(policy, teacher) to its
    loss."""
    gamma: float = Field(0.0, ge=0.0, le=1.0)
    """With `place: reward`: discount of later tokens; 0: the token alone."""
    clip: float = Field(20.0, gt=0.0, le=20.0)
    """Largest difference of a token's two logprobs, in nats."""
    estimator: Literal["k1", "k2", "k3"] = "k2"
    """With `place: loss`; docs/algorithms.md has the gradients."""


class ReferenceConfig(Section):
    """The model that `kl` compares with."""

    model: Annotated[Literal["off", "frozen", "updated"], OFF] = "off"
    """`frozen` stays the starting model; `updated` follows the trained one."""
    every: int = Field(100, ge=1)
    """Steps between updates of an `updated` reference."""
    mixup: float = Field(1.0, gt=0.0, le=1.0)
    """Share of the trained model in an update (TR-DPO, arXiv 2404.09656)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which its weights are kept."""


class RouterConfig(Section):
    """Losses of the routers of a mixture of experts, summed over layers."""

    balance: float = Field(0.0, ge=0.0, le=100.0)
    """Weight of DeepSeek-V3's balance loss of each sequence (arXiv 2412.19437, eq. 17 to 20; there
    0.0001)."""
    z: float = Field(0.0, ge=0.0, le=100.0)
    """Weight of ST-MoE's z-loss of each position (arXiv 2202.08906, eq. 5; there 0.001)."""
    measure: bool = False
    """Record the metrics `experts/*` also without a loss."""

    @property
    def is_on(self) -> bool:
        return self.measure or self.balance > 0.0 or self.z > 0.0


class KlControlConfig(Section):
    """Moves `kl.coefficient` towards a target (arXiv 1909.08593, eq. 2; verl's `kl_ctrl.type=adaptive`)."""

    target: float | None = Field(None, gt=0.0, le=1e6)
    """Target of `kl`, in nats a token; null is off."""
    horizon: float = Field(10_000.0, gt=0.0, le=1e12)
    """Samples over which the coefficient changes by the relative error, at most 20%."""


class EntropyControlConfig(Section):
    """Moves `entropy_coefficient` towards a target (Skywork-OR1, arXiv 2505.22312; TRL's
    `use_adaptive_entropy`)."""

    target: float | None = Field(None, gt=0.0, le=100.0)
    """Target of `entropy`, in nats a token; at or below it the coefficient rises and is used. Null is off."""
    delta: float = Field(0.005, gt=0.0, le=100.0)
    """Change of the coefficient after each step."""
    low: float = Field(0.0, ge=0.0, le=100.0)
    """Smallest coefficient."""
    high: float = Field(1.0, gt=0.0, le=100.0)
    """Largest coefficient."""

    def rules(self) -> Rules:
        if self.low > self.high:
            yield f"low ({self.low:g}) is above high ({self.high:g}): no coefficient lies between"


class ValueConfig(Section):
    """The value head of `advantage: gae`."""

    model: Literal["policy", "own"] = "policy"
    """Where it sits: on the policy's last hidden state, or on a critic of its own, which begins as a copy."""
    lr: float | None = Field(None, gt=0.0, le=1.0)
    """Its peak learning rate; null takes the policy's."""
    coefficient: float = Field(0.5, gt=0.0, le=100.0)
    """Weight of the value loss."""
    clip: float | None = Field(0.2, gt=0.0, le=1e6)
    """How far the value may move in a step; null does not clip."""
    detach: bool = False
    """Keep the value loss's gradient out of the policy."""
    whiten: bool = True
    """Advantages of a mini-batch get mean 0 and deviation 1."""


class OverlongConfig(Section):
    """DAPO's penalty of completions near the length limit."""

    penalty: float = Field(0.0, ge=0.0, le=1e6)
    """Subtracted from the reward at the limit; 0 is off."""
    buffer_share: float = Field(0.2, gt=0.0, le=1.0)
    """Last share of `max_tokens`, over which the penalty grows from 0."""


class LengthPenaltyConfig(Section):
    """weight * the group's pass rate * length / the longest in the group, subtracted from the reward
    (prime-rl's `length_penalty`)."""

    tokens: float = Field(0.0, ge=0.0, le=1e6)
    """Weight of the model's tokens; 0 is off."""
    turns: float = Field(0.0, ge=0.0, le=1e6)
    """Weight of a session's turns; 0 is off."""
    of: Literal["all", "successes"] = "all"
    """Whether completions below `success_threshold` are penalised too."""

    @property
    def is_on(self) -> bool:
        return self.tokens > 0.0 or self.turns > 0.0
