"""Terms beside the policy's own, and what shapes rewards: sections of `trainer.algorithm`."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tidemill.common.config.section import OFF, Section


class KlConfig(Section):
    """A penalty for moving away from the reference model."""

    place: Annotated[Literal["off", "loss", "reward"], OFF] = "off"
    """`loss` adds the penalty to each token's loss, `reward` takes it off each token's reward."""
    estimator: Literal["k1", "k2", "k3", "k3+", "corrected_k3", "abs"] = "k3"
    """With d = logprob - reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d; `k3+` is k3 with k2's
    gradient, `corrected_k3` k3 times the ratio, `abs` |d|. docs/algorithms.md says how their gradients differ
    in the loss."""
    coefficient: float = Field(0.001, gt=0.0, le=100.0)
    """Weight of the penalty (beta)."""
    bound: float | None = Field(10.0, gt=0.0, le=1e9)
    """Largest k3 of one token (verl's); beyond it, k3 has no gradient. null leaves GRPO's formula, in which a
    token 10 nats below the reference weighs as much as ten thousand others."""


class TeacherTermConfig(Section):
    """What is made of a teacher's logprobs (`reward.rewards.<name>.teacher`), times the teacher's
    `weight`."""

    place: Literal["reward", "loss"] = "reward"
    """`reward` adds -(rollout logprob - teacher logprob) to the advantage of each sampled token: reverse KL
    as a reward per token. `loss` adds an estimate of KL(policy || teacher) to each token's loss."""
    gamma: float = Field(0.0, ge=0.0, le=1.0)
    """With `place: reward`: discount of what later tokens of the completion get; 0 looks at the token
    alone."""
    clip: float = Field(20.0, gt=0.0, le=20.0)
    """Largest difference of the two logprobs of one token, either way, in nats."""
    estimator: Literal["k1", "k2", "k3"] = "k2"
    """With `place: loss`, with d = logprob - teacher's: `k2` has the gradient d of the reverse KL, `k3` that
    of the opposite KL, which grows as exp(-d): lower `clip` for it. `k1` has the value d and `k2`'s
    gradient."""


class ReferenceConfig(Section):
    """The model that `kl` compares with. Without `kl` it is only measured, as the metric `kl`."""

    model: Annotated[Literal["off", "frozen", "updated"], OFF] = "off"
    """`frozen` stays the starting model; `updated` follows the trained one, every `every` steps."""
    every: int = Field(100, ge=1)
    """Steps between updates of an `updated` reference."""
    mixup: float = Field(1.0, gt=0.0, le=1.0)
    """Share of the trained model in an update: 1 copies it, less moves the reference towards it (TR-DPO,
    arXiv 2404.09656)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """How its weights are kept; `bfloat16` halves their memory."""


class RouterConfig(Section):
    """Losses of a mixture model's routers, and metrics of how evenly they use the experts. Each is summed
    over layers, and weighted and divided as the other terms of a token's loss."""

    balance: float = Field(0.0, ge=0.0, le=100.0)
    """Weight of DeepSeek-V3's balance loss of each sequence (arXiv 2412.19437, eq. 17 to 20; alpha, there
    0.0001), over the positions that predict its trained tokens. 1 a layer where experts are used alike."""
    z: float = Field(0.0, ge=0.0, le=100.0)
    """Weight of ST-MoE's z-loss of each position (arXiv 2202.08906, eq. 5; there 0.001): the square of the
    logits' logsumexp, against large logits."""
    measure: bool = False
    """Record `experts/*` in the metrics also without a loss."""

    @property
    def is_on(self) -> bool:
        """Whether the routers' outputs are wanted."""
        return self.measure or self.balance > 0.0 or self.z > 0.0


class KlControlConfig(Section):
    """A `kl.coefficient` that moves so that the KL divergence comes near a target (arXiv 1909.08593, eq. 2;
    verl's `kl_ctrl.type=adaptive`)."""

    target: float | None = Field(None, gt=0.0, le=1e6)
    """The `kl` of a step to come near, in nats a token; null leaves the coefficient as it is."""
    horizon: float = Field(10_000.0, gt=0.0, le=1e12)
    """Samples over which the coefficient moves by its whole error, which counts as at most 20%."""


class EntropyControlConfig(Section):
    """An `entropy_coefficient` that moves by steps so that the entropy stays near a target (Skywork-OR1,
    arXiv 2505.22312; TRL's `use_adaptive_entropy`)."""

    target: float | None = Field(None, gt=0.0, le=100.0)
    """The `entropy` of a step, in nats a token, at or below which the coefficient rises and is used; above it
    falls and is not used. null leaves it as it is."""
    delta: float = Field(0.005, gt=0.0, le=100.0)
    """What the coefficient moves by after each step."""
    low: float = Field(0.0, ge=0.0, le=100.0)
    """Smallest coefficient."""
    high: float = Field(1.0, gt=0.0, le=100.0)
    """Largest coefficient."""

    @model_validator(mode="after")
    def _is_a_range(self) -> "EntropyControlConfig":
        if self.low > self.high:
            raise ValueError(f"low ({self.low:g}) is above high ({self.high:g}): no coefficient lies between")
        return self


class ValueConfig(Section):
    """The value head that `advantage: gae` estimates advantages with, trained with the policy."""

    model: Literal["policy", "own"] = "policy"
    """What it sits on: the policy's last hidden state, or that of a model of its own (a critic), which begins
    as a copy of the policy's, and has its own moments and its own bound of the gradient norm."""
    lr: float | None = Field(None, gt=0.0, le=1.0)
    """Peak learning rate of the head; null takes the policy's."""
    coefficient: float = Field(0.5, gt=0.0, le=100.0)
    """Weight of the value loss."""
    clip: float | None = Field(0.2, gt=0.0, le=1e6)
    """The value may move this far from its estimate at the step's start; null does not clip."""
    detach: bool = False
    """Keep the value loss's gradient in the head and out of the policy."""
    whiten: bool = True
    """Bring the advantages of a mini-batch to mean 0 and deviation 1; it then waits for all its groups."""


class OverlongConfig(Section):
    """DAPO's soft punishment of completions that come near the length limit."""

    penalty: float = Field(0.0, ge=0.0, le=1e6)
    """Taken off the reward of a completion at the limit; 0 is off."""
    buffer_share: float = Field(0.2, gt=0.0, le=1.0)
    """The last share of `rollout.sampling.max_tokens` (of a session: of `rollout.environment.max_tokens`),
    over which the punishment grows from 0."""


class LengthPenaltyConfig(Section):
    """What length costs, the more so the easier the prompt: weight * the group's pass rate * the completion's
    share of the longest one in its group, taken off its reward (prime-rl's `length_penalty`)."""

    tokens: float = Field(0.0, ge=0.0, le=1e6)
    """Weight of the number of tokens that the model wrote; 0 is off."""
    turns: float = Field(0.0, ge=0.0, le=1e6)
    """Weight of the number of turns of a session; 0 is off."""
    of: Literal["all", "successes"] = "all"
    """Which completions of a group pay: `successes` leaves alone those below `success_threshold`."""

    @property
    def is_on(self) -> bool:
        """Whether anything is taken off."""
        return self.tokens > 0.0 or self.turns > 0.0
