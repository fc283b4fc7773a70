"""Sections of `trainer.algorithm` for losses and for what corrects them, and which of them go together."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from common.config.section import Section

if TYPE_CHECKING:
    from common.config.algorithm import AlgorithmConfig

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


class DppoConfig(Section):
    """DPPO, beside its bounds `clip_low` and `clip_high` (arXiv 2602.04879)."""

    max_ratio: float | None = Field(None, gt=1.0, le=1e6)
    """A token weighs this much at most (verl's `clip_ratio_c` in `dppo_tv` and `dppo_kl`); null has no bound,
    as in prime-rl."""


SECTIONS_OF_LOSSES = {"dppo": ("dppo_tv", "dppo_kl")}
"""Section -> the losses that read it."""


def check_loss(algorithm: "AlgorithmConfig") -> None:
    """Raises ValueError: a section belongs to another loss, or parts of the loss do not go together."""
    if algorithm.kl.place == "reward" and algorithm.kl.estimator in ("k3+", "corrected_k3"):
        raise ValueError(
            f"kl.estimator: {algorithm.kl.estimator} is k3 with another gradient, and a penalty in the "
            "reward has none: take k3, or kl.place: loss"
        )
    for section, losses in SECTIONS_OF_LOSSES.items():
        given = getattr(algorithm, section)
        if given != type(given)() and algorithm.loss not in losses:
            raise ValueError(
                f"{section} belongs to loss {' and '.join(losses)}, and loss: {algorithm.loss} does not read "
                "it; leave it out, or change the loss"
            )
