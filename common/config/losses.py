"""Sections of `trainer.algorithm` for losses and for what corrects them, and which of them go together."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from tidemill.common.config.section import Section

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig

OFF = BeforeValidator(lambda value: "off" if value is False else value)
"""YAML reads `off` as false."""


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


TOKEN_CRITERIA = ("token_k1", "token_k2", "token_k3")
SEQUENCE_CRITERIA = (
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)
"""Fields of `RejectionConfig`, as verl's `rollout_rs` names them."""

Divergence = Annotated[float | None, Field(gt=0.0, le=1e9)]
Ratios = Annotated[
    tuple[Annotated[float, Field(gt=0.0, le=1.0)], Annotated[float, Field(ge=1.0, le=1e9)]] | None,
    BeforeValidator(lambda value: (1.0 / value, value) if _is_number(value) else value),
]
"""Lowest and highest ratio; one number x stands for 1 / x and x."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


class RejectionConfig(Section):
    """What is left out because the old policy is too far from the one that sampled, beside the weights of
    `importance`. All criteria that are set have to hold. With r = old / rollout: k1 is r itself (two bounds;
    one number x means 1 / x and x), k2 = log(r)^2 / 2, k3 = r - 1 - log r."""

    token_k1: Ratios = None
    """Ratios of tokens."""
    token_k2: Divergence = None
    """Largest k2 of a token."""
    token_k3: Divergence = None
    """Largest k3 of a token."""
    seq_sum_k1: Ratios = None
    """Ratio of a sequence: the product over its tokens."""
    seq_sum_k2: Divergence = None
    """Largest sum of k2 over a sequence."""
    seq_sum_k3: Divergence = None
    """Largest sum of k3 over a sequence."""
    seq_mean_k1: Ratios = None
    """Geometric mean of a sequence's ratios, such as [0.99, 1.01]."""
    seq_mean_k2: Divergence = None
    """Largest mean of k2 over a sequence."""
    seq_mean_k3: Divergence = None
    """Largest mean of k3 over a sequence."""
    seq_max_k2: Divergence = None
    """Largest k2 of any token of a sequence."""
    seq_max_k3: Divergence = None
    """Largest k3 of any token of a sequence."""
    veto: float | None = Field(None, gt=0.0, lt=1.0)
    """A sequence with a token whose r is below this is left out, such as 1e-4."""
    denominator: Literal["all", "kept"] = "all"
    """Whether rejected tokens count in what sums are divided by; a rejected sequence does as a sequence."""

    @property
    def of_tokens(self) -> list[str]:
        """Criteria that leave out single tokens."""
        return [name for name in TOKEN_CRITERIA if getattr(self, name) is not None]

    @property
    def of_sequences(self) -> list[str]:
        """Criteria that leave out whole sequences."""
        return [name for name in (*SEQUENCE_CRITERIA, "veto") if getattr(self, name) is not None]

    @property
    def is_on(self) -> bool:
        """Whether anything can be left out."""
        return bool(self.of_tokens or self.of_sequences)


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


SECTIONS_OF_LOSSES = {
    "dppo": ("dppo_tv", "dppo_kl"),
    "covariance": ("clip_cov", "kl_cov"),
    "vespo": ("vespo",),
}
"""Section -> the losses that read it."""


def check_loss(algorithm: "AlgorithmConfig") -> None:
    """Raises ValueError: a section belongs to another loss, or parts of the loss do not go together."""
    if algorithm.kl.place == "reward" and algorithm.kl.estimator in ("k3+", "corrected_k3"):
        raise ValueError(
            f"kl.estimator: {algorithm.kl.estimator} is k3 with another gradient, and a penalty in the "
            "reward has none: take k3, or kl.place: loss"
        )
    if algorithm.importance.normalise and algorithm.importance_mode != "truncate":
        raise ValueError(
            f"importance.normalise brings truncated weights to a mean of 1, and importance.mode is "
            f"{algorithm.importance_mode}; take mode truncate, or leave it out"
        )
    if algorithm.top_entropy_quantile < 1.0 and algorithm.loss_traits.level == "sequence":
        raise ValueError(
            f"loss: {algorithm.loss} has one ratio for a sequence, whose gradient reaches all its tokens: "
            "top_entropy_quantile could not leave out any; take a loss of tokens"
        )
    rejection = algorithm.rejection
    if rejection.denominator == "kept" and not rejection.is_on:
        raise ValueError(
            "rejection.denominator: kept has no meaning without a criterion of rejection; set one"
        )
    if rejection.denominator == "kept" and algorithm.normalisation == "prompt":
        raise ValueError(
            "rejection.denominator: kept is defined for normalisation token and sequence, and normalisation: "
            "prompt averages over the tokens of a group; leave it at all, or take another normalisation"
        )
    if rejection.of_tokens and algorithm.loss_traits.level == "sequence":
        raise ValueError(
            f"loss: {algorithm.loss} has one ratio for a sequence, and rejection.{rejection.of_tokens[0]} "
            "would leave out single tokens of it; take a criterion of sequences (seq_...), or another loss"
        )
    for section, losses in SECTIONS_OF_LOSSES.items():
        given = getattr(algorithm, section)
        if given != type(given)() and algorithm.loss not in losses:
            raise ValueError(
                f"{section} belongs to loss {' and '.join(losses)}, and loss: {algorithm.loss} does not read "
                "it; leave it out, or change the loss"
            )
