"""What moves coefficients of the loss while a run goes on: sections of `trainer.algorithm`."""

from pydantic import Field, model_validator

from tidemill.common.config.section import Section


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


def check_controls(
    kl: KlControlConfig, entropy: EntropyControlConfig, has_penalty: bool, entropy_coefficient: float
) -> None:
    """Raises ValueError: something would move a coefficient that is not used, or is out of its range."""
    if kl.target is not None and not has_penalty:
        raise ValueError(
            "kl_control.target moves the coefficient of a KL penalty, and kl.place is off: set it to loss or "
            "reward, or leave the target out"
        )
    if entropy.target is not None and not entropy.low <= entropy_coefficient <= entropy.high:
        raise ValueError(
            f"entropy_coefficient ({entropy_coefficient:g}) is where entropy_control begins, and lies "
            f"outside of its low and high ({entropy.low:g} to {entropy.high:g})"
        )
