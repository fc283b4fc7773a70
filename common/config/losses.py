"""Sections of `trainer.algorithm` for losses and for what corrects them."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tidemill.common.config.section import OFF, Section


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
        """Criteria that leave out single tokens."""
        return [name for name in self.bounds if name.startswith("token")]

    @property
    def of_sequences(self) -> list[str]:
        """Criteria that leave out whole sequences."""
        return [name for name in self.bounds if name.startswith("seq")]

    @property
    def is_on(self) -> bool:
        """Whether anything can be left out."""
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

    @model_validator(mode="after")
    def _is_a_range(self) -> "CovarianceConfig":
        if self.low >= self.high:
            raise ValueError(f"covariance.low ({self.low}) must be below covariance.high ({self.high})")
        return self


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
