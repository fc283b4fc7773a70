"""The checks of a step's numbers: healthy range, what it means to leave it, and what to do then."""

from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from tidemill.common.config.section import Section


class HealthyRange(Section):
    """A healthy range; null is no bound."""

    low: float | None = Field(None, ge=-1e9, le=1e9)
    """Lowest value."""
    high: float | None = Field(None, ge=-1e9, le=1e9)
    """Highest value."""

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


@dataclass(frozen=True, slots=True)
class Check:
    """One number that is watched. `name` stands in `trainer.diagnostics` and in Prometheus."""

    name: str
    metric: str
    healthy: HealthyRange
    problem: str
    """What it means when the number is too high, or too low where it can only be that."""
    advice: str
    problem_low: str = ""
    """Where the number can leave at both ends: what it means when it is too low."""
    advice_low: str = ""


CHECKS = (
    Check(
        "logprob_gap",
        "logprob_gap/mean",
        # Nats; bfloat16 kernels that differ give 0.005 to 0.03, a step of staleness as much
        # again; 0.1 is an engine that computes another distribution.
        HealthyRange(high=0.1),
        "trainer and engine disagree about the tokens that were sampled",
        "Look at max_staleness and the learning rate first: with max_staleness 0 the gap is numerics alone. "
        "If it stays, compare model.dtype, temperature, top_p and top_k, and the kernels of both.",
    ),
    Check(
        "logprob_gap_max",
        "logprob_gap/max",
        # One token the engine thought e^8 = 3,000 times more or less likely.
        HealthyRange(high=8.0),
        "trainer and engine disagree completely about single tokens",
        "Bound the importance weights (trainer.algorithm.importance), or mask them on both sides as IcePop "
        "does.",
    ),
    Check(
        "rollout_kl",
        "rollout_kl",
        # Nats a token; healthy runs stay near 0.001; collapses begin above 0.1.
        HealthyRange(high=0.1),
        "the policy under training is far from the one that sampled",
        "Lower the learning rate, max_staleness or mini_batches, or add trainer.algorithm.kl.",
    ),
    Check(
        "effective_sample_size",
        "sampling/effective_sample_size",
        # Below one half, the weights waste more than half of the batch.
        HealthyRange(low=0.5),
        "a few tokens or sequences carry most of the importance weight",
        "Lower max_staleness or the learning rate, bound the weights, or take importance.level token.",
    ),
    Check(
        "importance_mean",
        "sampling/importance_sampling_ratio/mean",
        # 1 in expectation where the weights are not bounded.
        HealthyRange(low=0.8, high=1.25),
        "importance weights are too large on average",
        "Trainer and engine compute different distributions: compare dtype, temperature, top_p and top_k.",
        "importance weights are too small on average: bounds remove much of the gradient",
        "Lower max_staleness or the learning rate, or widen trainer.algorithm.importance.",
    ),
    Check(
        "importance_bounded",
        "sampling/importance_sampling_ratio/bounded_mean",
        # A bound is for outliers, not for every fifth token.
        HealthyRange(high=0.2),
        "many importance weights are truncated or masked",
        "Lower max_staleness or the learning rate, or widen trainer.algorithm.importance.",
    ),
    Check(
        "rejected",
        "sampling/rejected_mean",
        # A criterion is for outliers; above this, most tokens teach nothing.
        HealthyRange(high=0.5),
        "trainer.algorithm.rejection leaves out most tokens",
        "Trainer and engine may compute two distributions: compare dtype, temperature, top_p and top_k. "
        "Else widen the bounds of the criterion, or lower max_staleness or the learning rate.",
    ),
    Check(
        "zero_variance",
        "frac_reward_zero_std",
        # Such groups teach nothing; above this, four of five completions are wasted.
        HealthyRange(high=0.8),
        "in most groups all rewards are equal, and such groups teach nothing",
        "If rewards are mostly 0, prompts are too hard or the reward cannot parse the answers; if mostly 1, "
        "too easy. Choose prompts by difficulty (data.curriculum), raise group_size, or set "
        "algorithm.filter_zero_variance.",
    ),
    Check(
        "groups_dropped",
        "groups_dropped_ratio",
        # Above this, a step costs more than three times its generation.
        HealthyRange(high=0.7),
        "most generated groups are thrown away and generated again",
        "The reasons are in the commits and the summary. Zero variance: choose prompts by difficulty. Failed "
        "scores: look at the reward workers' log.",
    ),
    Check(
        "clipped",
        "clip_ratio/region_mean",
        # PPO runs clip up to 0.2 of their tokens; more learns from few.
        HealthyRange(high=0.3),
        "the clip silences a large share of the tokens",
        "Lower the learning rate or mini_batches, or widen algorithm.clip_low and clip_high.",
    ),
    Check(
        "truncated",
        "completions/clipped_ratio",
        # An answer that was cut off is usually scored as wrong.
        HealthyRange(high=0.5),
        "many completions are cut off before they end",
        "Raise rollout.sampling.max_tokens (of sessions the limits of rollout.environment), or punish length "
        "(algorithm.overlong). If completions ended before, the policy has learned not to stop: look at some "
        "of them.",
    ),
    Check(
        "grad_norm",
        "grad_norm",
        # 0 learns nothing, 100 times the usual bound is divergence.
        HealthyRange(low=1e-8, high=100.0),
        "gradients are exploding",
        "Lower the learning rate or max_grad_norm; go back to a checkpoint from before it began.",
        "there is no gradient: nothing is learned",
        "All advantages or all importance weights are zero: look at frac_reward_zero_std and the masks.",
    ),
    Check(
        "update_skipped",
        "update_skipped",
        # Gradients that are not finite, or that a step had nothing to train on.
        HealthyRange(high=0.0),
        "optimizer updates are skipped",
        "Gradients were not finite or a step had no token to train on; the trainer's log names the reason. "
        "Try model.dtype float32 and a lower learning rate.",
    ),
    Check(
        "entropy",
        "entropy",
        # Below, samples of a group are all alike; above, they are noise.
        HealthyRange(low=0.01, high=5.0),
        "the policy samples almost at random",
        "The entropy bonus or the learning rate is too high; go back to a checkpoint from before it began.",
        "the policy has nearly stopped exploring: its samples are all alike",
        "Raise algorithm.clip_high (as DAPO does) or entropy_coefficient, add KL, or stop: it may have "
        "learned what these prompts can teach.",
    ),
    Check(
        "failed_scores",
        "scores/failed_ratio",
        # Rewards that fail are left out, and what is left may be biased.
        HealthyRange(high=0.1),
        "many rewards fail, and what is left may be biased",
        "`tidemill status` counts failures by reward and kind; look at the reward workers' log, and raise "
        "timeouts or add replicas.",
    ),
    Check(
        "staleness",
        "staleness/mean",
        # Importance weights cannot repair much more.
        HealthyRange(high=8.0),
        "the run trains on old tokens",
        "Lower max_staleness; add rollout workers so that the trainer does not run ahead of them.",
    ),
    Check(
        "waiting",
        "time/wait_share",
        # The trainer's part of the step spent waiting for others.
        HealthyRange(high=0.5),
        "the trainer waits for most of the step",
        "",
    ),
    Check(
        "explained_variance",
        "value/explained_variance",
        # Below 0, the value head is worse than a constant.
        HealthyRange(low=-0.5),
        "the value head predicts worse than a constant",
        "Raise algorithm.value.lr or its coefficient, or take an advantage without a value head.",
    ),
)
"""All checks, in the order in which they are shown."""


def _are_checks(ranges: dict[str, HealthyRange]) -> dict[str, HealthyRange]:
    known = [check.name for check in CHECKS]
    if unknown := [name for name in ranges if name not in known]:
        raise ValueError(f"there is no check {', '.join(unknown)}; the checks are {', '.join(known)}")
    return ranges


Ranges = Annotated[dict[str, HealthyRange], AfterValidator(_are_checks)]
"""By the name of a check: the healthy range in place of the one above."""


def checks_with(ranges: Ranges) -> list[Check]:
    """All checks, some of them with other ranges."""
    return [replace(check, healthy=ranges.get(check.name, check.healthy)) for check in CHECKS]
