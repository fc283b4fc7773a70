"""The `trainer.diagnostics` section: between which bounds each number of a step is healthy.

Bounds are wide: a warning should mean that something is wrong, not that a run is unusual.
"""

from pydantic import Field, model_validator

from common.config.section import Section


class HealthyRange(Section):
    """Lowest and highest healthy value; a bound that is null does not exist, and both null is no check."""

    low: float | None = Field(None, ge=-1e9, le=1e9)
    """Lowest healthy value."""
    high: float | None = Field(None, ge=-1e9, le=1e9)
    """Highest healthy value."""

    @model_validator(mode="after")
    def _is_a_range(self) -> "HealthyRange":
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low ({self.low:g}) is above high ({self.high:g}): no value would be healthy")
        return self

    def holds(self, value: float) -> bool:
        """Whether `value` is healthy; what is not a number never is, where there is a bound at all."""
        if self.low is None and self.high is None:
            return True
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


class DiagnosticsConfig(Section):
    """Warnings in plain words when a number of the step stays outside of its healthy range."""

    enabled: bool = True
    """Watch the step metrics and warn."""
    patience_steps: int = Field(3, ge=1, le=10_000)
    """So many steps in a row outside make a warning, so many in a row inside end it: one step is noise."""
    logprob_gap: HealthyRange = HealthyRange(high=0.1)
    """`logprob_gap/mean`, in nats. bfloat16 kernels that differ give 0.005 to 0.03, a step of staleness
    as much again; 0.1 is an engine that computes another distribution."""
    logprob_gap_max: HealthyRange = HealthyRange(high=8.0)
    """`logprob_gap/max`, in nats: one token the engine thought e^8 = 3,000 times more or less likely."""
    rollout_kl: HealthyRange = HealthyRange(high=0.1)
    """`rollout_kl`, in nats a token. Healthy runs stay near 0.001; collapses begin above 0.1."""
    effective_sample_size: HealthyRange = HealthyRange(low=0.5)
    """`sampling/effective_sample_size`: below one half, the weights waste more than half of the batch."""
    importance_mean: HealthyRange = HealthyRange(low=0.8, high=1.25)
    """`sampling/importance_sampling_ratio/mean`: 1 in expectation where the weights are not bounded."""
    importance_bounded: HealthyRange = HealthyRange(high=0.2)
    """`sampling/importance_sampling_ratio/bounded_mean`: a bound is for outliers, not for every fifth
    token."""
    zero_variance: HealthyRange = HealthyRange(high=0.8)
    """`frac_reward_zero_std`: such groups teach nothing; above this, four of five completions are wasted."""
    groups_dropped: HealthyRange = HealthyRange(high=0.7)
    """`groups_dropped_ratio`: above this, a step costs more than three times its generation."""
    clipped: HealthyRange = HealthyRange(high=0.3)
    """`clip_ratio/region_mean`: PPO runs clip up to 0.2 of their tokens; more learns from few."""
    truncated: HealthyRange = HealthyRange(high=0.5)
    """`completions/clipped_ratio`: an answer that was cut off is usually scored as wrong."""
    grad_norm: HealthyRange = HealthyRange(low=1e-8, high=100.0)
    """`grad_norm` before it is scaled down: 0 learns nothing, 100 times the usual bound is divergence."""
    update_skipped: HealthyRange = HealthyRange(high=0.0)
    """`update_skipped`: gradients that are not finite, or that a step had nothing to train on."""
    entropy: HealthyRange = HealthyRange(low=0.01, high=5.0)
    """`entropy`, in nats a token: below, samples of a group are all alike; above, they are noise."""
    failed_scores: HealthyRange = HealthyRange(high=0.1)
    """`scores/failed_ratio`: rewards that fail are left out, and what is left may be biased."""
    staleness: HealthyRange = HealthyRange(high=8.0)
    """`staleness/mean`, in steps: importance weights cannot repair much more."""
    waiting: HealthyRange = HealthyRange(high=0.5)
    """`time/wait_share`: the trainer's part of the step spent waiting for others."""
    explained_variance: HealthyRange = HealthyRange(low=-0.5)
    """`value/explained_variance`: below 0, the value head is worse than a constant."""
