"""What each check of a step's numbers means, and what a user should do about it, in plain words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """One number that is watched. `name` is the field of `trainer.diagnostics` with its range."""

    name: str
    metric: str
    problem: str
    """What it means when the number is too high, or too low where it can only be that."""
    advice: str
    problem_low: str = ""
    """Where the number can leave at both ends: what it means when it is too low."""
    advice_low: str = ""

    def problem_for(self, is_low: bool) -> str:
        """What is wrong."""
        return self.problem_low if is_low and self.problem_low else self.problem

    def advice_for(self, is_low: bool) -> str:
        """What to do."""
        return self.advice_low if is_low and self.advice_low else self.advice


CHECKS = (
    Check(
        "logprob_gap",
        "logprob_gap/mean",
        "trainer and engine disagree about the tokens that were sampled",
        "Look at max_staleness and the learning rate first: with max_staleness 0 the gap is numerics alone. "
        "If it stays, compare model.dtype, temperature, top_p and top_k, and the kernels of both.",
    ),
    Check(
        "logprob_gap_max",
        "logprob_gap/max",
        "trainer and engine disagree completely about single tokens",
        "Bound the importance weights (trainer.algorithm.importance), or mask them on both sides as IcePop "
        "does.",
    ),
    Check(
        "rollout_kl",
        "rollout_kl",
        "the policy under training is far from the one that sampled",
        "Lower the learning rate, max_staleness or mini_batches, or add trainer.algorithm.kl.",
    ),
    Check(
        "effective_sample_size",
        "sampling/effective_sample_size",
        "a few tokens or sequences carry most of the importance weight",
        "Lower max_staleness or the learning rate, bound the weights, or take importance.level token.",
    ),
    Check(
        "importance_mean",
        "sampling/importance_sampling_ratio/mean",
        "importance weights are too large on average",
        "Trainer and engine compute different distributions: compare dtype, temperature, top_p and top_k.",
        "importance weights are too small on average: bounds remove much of the gradient",
        "Lower max_staleness or the learning rate, or widen trainer.algorithm.importance.",
    ),
    Check(
        "importance_bounded",
        "sampling/importance_sampling_ratio/bounded_mean",
        "many importance weights are truncated or masked",
        "Lower max_staleness or the learning rate, or widen trainer.algorithm.importance.",
    ),
    Check(
        "rejected",
        "sampling/rejected_mean",
        "trainer.algorithm.rejection leaves out most tokens",
        "Trainer and engine may compute two distributions: compare dtype, temperature, top_p and top_k. "
        "Else widen the bounds of the criterion, or lower max_staleness or the learning rate.",
    ),
    Check(
        "zero_variance",
        "frac_reward_zero_std",
        "in most groups all rewards are equal, and such groups teach nothing",
        "If rewards are mostly 0, prompts are too hard or the reward cannot parse the answers; if mostly 1, "
        "too easy. Choose prompts by difficulty (data.curriculum), raise group_size, or set "
        "algorithm.filter_zero_variance.",
    ),
    Check(
        "groups_dropped",
        "groups_dropped_ratio",
        "most generated groups are thrown away and generated anew",
        "The reasons are in the commits and the summary. Zero variance: choose prompts by difficulty. Failed "
        "scores: look at the reward workers' log.",
    ),
    Check(
        "clipped",
        "clip_ratio/region_mean",
        "the clip silences a large share of the tokens",
        "Lower the learning rate or mini_batches, or widen algorithm.clip_low and clip_high.",
    ),
    Check(
        "truncated",
        "completions/clipped_ratio",
        "many completions are cut off before they end",
        "Raise rollout.sampling.max_tokens (of sessions the limits of rollout.environment), or punish length "
        "(algorithm.overlong). If completions ended before, the policy has learned not to stop: look at some "
        "of them.",
    ),
    Check(
        "grad_norm",
        "grad_norm",
        "gradients are exploding",
        "Lower the learning rate or max_grad_norm; go back to a checkpoint from before it began.",
        "there is no gradient: nothing is learned",
        "All advantages or all importance weights are zero: look at frac_reward_zero_std and the masks.",
    ),
    Check(
        "update_skipped",
        "update_skipped",
        "optimizer updates are skipped",
        "Gradients were not finite or a step had no token to train on; the trainer's log names the reason. "
        "Try model.dtype float32 and a lower learning rate.",
    ),
    Check(
        "entropy",
        "entropy",
        "the policy samples almost at random",
        "The entropy bonus or the learning rate is too high; go back to a checkpoint from before it began.",
        "the policy has nearly stopped exploring: its samples are all alike",
        "Raise algorithm.clip_high (as DAPO does) or entropy_coefficient, add KL, or stop: it may have "
        "learned what these prompts can teach.",
    ),
    Check(
        "failed_scores",
        "scores/failed_ratio",
        "many rewards fail, and what is left may be biased",
        "`tidemill top` counts failures by reward and kind; look at the reward workers' log, and raise "
        "timeouts or add replicas.",
    ),
    Check(
        "staleness",
        "staleness/mean",
        "the run trains on old tokens",
        "Lower max_staleness; add rollout workers so that the trainer does not run ahead of them.",
    ),
    Check("waiting", "time/wait_share", "the trainer waits for most of the step", ""),
    Check(
        "explained_variance",
        "value/explained_variance",
        "the value head predicts worse than a constant",
        "Raise algorithm.value.lr or its coefficient, or take an advantage without a value head.",
    ),
)
"""All checks, in the order in which they are shown."""

WAITS = {
    "time/wait_trajectories_s": "generation: add rollout workers or GPUs, or shorten max_tokens",
    "time/wait_scores_s": "scores: add reward workers (they may join now), raise their concurrency, or give "
    "slow judges replicas",
    "time/wait_redis_s": "Redis: look at its load and at the network to it; see docs/operations/sizing.md",
    "time/wait_evaluation_s": "evaluation: evaluate less often, on fewer prompts or samples",
}


def time_advice(numbers: Mapping[str, Any]) -> str:
    """What to do about waiting: about the longest wait of the step."""
    waits = {name: float(numbers.get(name) or 0.0) for name in WAITS}
    longest = max(waits, key=lambda name: waits[name])
    if not waits[longest]:
        return "`tidemill top` says who waits for whom."
    return f"It waited {waits[longest]:.3g} s for {WAITS[longest]}."
