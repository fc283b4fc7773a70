"""The sections of `trainer.algorithm`: corrections of the ratio, options of losses, further terms, and what
shapes rewards."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from tidemill.common.config.section import OFF, Rules, Section


class ImportanceConfig(Section):
    """Weights that correct for tokens sampled by another policy than the one that is trained: older weights,
    and an engine that computes a little differently."""

    mode: Annotated[Literal["auto", "truncate", "mask", "off"], OFF] = "auto"
    """`truncate` brings weights into [low, high]; `mask` leaves out what lies outside (with `low: 0.5, high:
    5` IcePop). `auto` is `truncate`, and `off` with `old_logprobs: rollout`, whose ratio is that weight
    already."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """One weight for each token, or one for a sequence: the product over its tokens, or their geometric
    mean."""
    low: float = Field(0.0, ge=0.0, le=1.0)
    """Smallest weight."""
    high: float = Field(2.0, ge=1.0, le=1000.0)
    """Largest weight."""
    normalise: bool = False
    """Divide truncated weights by their mean over the mini-batch (verl's batch normalisation), which then
    waits for all its groups."""


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
"""As verl's `rollout_rs` names them: of single tokens, or of a sequence's sum, mean or largest."""

MAX_BOUND = 1e9


class RejectionConfig(Section):
    """What is left out because the old policy is too far from the one that sampled, beside the weights of
    `importance`. With r = old / rollout: k1 is r itself, k2 = log(r)^2 / 2, k3 = r - 1 - log r."""

    bounds: dict[Criterion, float | tuple[float, float]] = Field(default_factory=dict)
    """All of them have to hold. `token_` judges tokens; `seq_sum_`, `seq_mean_`, `seq_max_` (k2 and k3 only)
    whole sequences, such as `{seq_mean_k1: [0.99, 1.01]}`. k1 has a lowest and a highest ratio, one number x
    stands for 1 / x and x; the others have a largest value."""
    veto: float | None = Field(None, gt=0.0, lt=1.0)
    """A sequence with a token whose r is below this is left out, such as 1e-4."""
    denominator: Literal["all", "kept"] = "all"
    """Whether rejected tokens count in what sums are divided by; a rejected sequence does as a sequence."""

    @field_validator("bounds")
    @classmethod
    def _are_bounds(cls, given: dict[Criterion, Any]) -> dict[Criterion, Any]:
        bounds = {}
        for name, bound in given.items():
            if name.endswith("k1") and not isinstance(bound, tuple):
                bound = (1.0 / bound, bound) if bound else (0.0, 0.0)
            if name.endswith("k1"):
                is_right = 0.0 < bound[0] <= 1.0 <= bound[1] <= MAX_BOUND
                wanted = (
                    "one number above 1, or two of which the first is in (0, 1] and the second at least 1"
                )
            else:
                is_right, wanted = isinstance(bound, float) and 0.0 < bound <= MAX_BOUND, "one number above 0"
            if not is_right:
                raise ValueError(f"{name}: got {given[name]}, expected {wanted}, at most {MAX_BOUND:g}")
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


class DppoConfig(Section):
    """DPPO, beside its bounds `clip_low` and `clip_high` (arXiv 2602.04879)."""

    max_ratio: float | None = Field(None, gt=1.0, le=1e6)
    """A token weighs this much at most (verl's `clip_ratio_c` in `dppo_tv` and `dppo_kl`); null has no bound,
    as in prime-rl."""


class CovarianceConfig(Section):
    """clip-cov and kl-cov (arXiv 2505.22617): the few tokens whose logprob and advantage vary together most,
    over a mini-batch, lose their gradient or are held back. Both keep the entropy from collapsing."""

    share: float = Field(2e-4, gt=0.0, le=1.0)
    """Of all tokens of a mini-batch, and at least one (verl's `clip_cov_ratio`, `kl_cov_ratio`)."""
    low: float = Field(1.0, ge=-1e9, le=1e9)
    """`clip_cov` chooses among tokens with a covariance above this (verl's `clip_cov_lb`) ..."""
    high: float = Field(5.0, ge=-1e9, le=1e9)
    """... and below this (`clip_cov_ub`)."""
    coefficient: float = Field(1.0, gt=0.0, le=1e6)
    """Weight of |log r| on the tokens of `kl_cov` (verl's `ppo_kl_coef`)."""

    def rules(self) -> Rules:
        yield self.low >= self.high, f"low ({self.low}) must be below high ({self.high})"


Exponents = tuple[
    Annotated[float, Field(gt=0.0, le=100.0)],
    Annotated[float, Field(gt=0.0, le=100.0)],
]


class VespoConfig(Section):
    """VESPO's weight W^k exp(lambda (1 - W)) of a sequence with the ratio W (arXiv 2602.10693)."""

    positive: Exponents = (2.0, 3.0)
    """k and lambda where the advantage is not negative (TRL's `vespo_k_pos`, `vespo_lambda_pos`)."""
    negative: Exponents = (3.0, 2.0)
    """The same where it is negative (`vespo_k_neg`, `vespo_lambda_neg`)."""


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

    def rules(self) -> Rules:
        yield (
            self.low > self.high,
            f"low ({self.low:g}) is above high ({self.high:g}): no coefficient lies between",
        )


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
        return self.tokens > 0.0 or self.turns > 0.0
