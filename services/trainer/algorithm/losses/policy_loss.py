"""The loss of a forward pass: surrogate, importance weights, KL, entropy bonus and value loss in one sum.

    sum over tokens of weight * (-importance * objective + beta * KL + c_R * log(p / q)^2 + w * teacher's KL
                                 - c_H * entropy + c_V * value loss + routers' losses),
    with p now and q at the rollout

or, for a demonstration's token, weight * imitation * -logprob and none of these: the loss of supervised
fine-tuning.

Every term is weighted and divided alike (`tokens.py`), so none depends on how an update is split into
micro-batches. Importance weights belong to the surrogate alone, as in TRL.

Shape legend: N trained tokens of a forward pass, from any number of sequences.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tidemill.common.config.algorithm import AlgorithmConfig, is_users_own
from tidemill.common.config.algorithms.table import LOSSES
from tidemill.services.trainer.algorithm.losses.importance import importance_weights
from tidemill.services.trainer.algorithm.losses.sums import TileSums
from tidemill.services.trainer.algorithm.losses.tokens import MAX_LOG_RATIO, Surrogate, Tokens

SurrogateFunction = Callable[[Tokens, AlgorithmConfig], Surrogate]


def find_loss(algorithm: AlgorithmConfig) -> SurrogateFunction:
    """The surrogate that the config names: a built-in one (`common/config/algorithms/losses`), or the user's
    own.

    Raises:
        ConfigError: a user's own cannot be loaded, or fails on three made-up tokens.
    """
    if is_users_own(algorithm.loss):
        from tidemill.services.trainer.algorithm.losses.users_loss import load_users_loss

        return load_users_loss(algorithm)
    return LOSSES[algorithm.loss].surrogate


def policy_loss(
    tokens: Tokens, algorithm: AlgorithmConfig, surrogate: SurrogateFunction
) -> tuple[Tensor, TileSums]:
    """The unnormalised loss of N >= 1 trained tokens, with its gradient, and its diagnostics.

    With `old_logprobs: recompute` the old policy is the one at the step's start: `proximal_logprobs`, or
    where there are none the current one, without gradient. Then the ratio is exactly 1, the clip is inactive,
    and every token keeps its gradient `importance * A * grad logprob`, however stale it is. This is the
    default: clipping against the rollout policy instead (`rollout`) silences the tokens that the steps in
    between have moved most, and counts numerical mismatch as movement. Measured on a toy task (40 steps, 6
    seeds, lr 5e-3 to 5e-2), mean reward over the run: `recompute` with weights up to 2 0.75 to 0.89,
    `rollout` 0.62 to 0.87 at one step of staleness; 0.66 to 0.82 against 0.37 to 0.75 at four.
    """
    tokens = tokens.comparable()
    proximal_N = tokens.logprobs_N.detach()
    if "proximal_logprobs" in tokens.columns and algorithm.loss_traits.has_ratio:
        proximal_N = tokens.columns["proximal_logprobs"]
    old_N = proximal_N if algorithm.old_logprobs == "recompute" else tokens.rollout_logprobs_N
    sequences = (tokens.sequence_N, tokens.num_sequences)
    drift_N = proximal_N - tokens.rollout_logprobs_N
    importance_N, raw_N, is_bounded_N = importance_weights(drift_N, *sequences, algorithm)
    tokens = replace(tokens, log_N=tokens.logprobs_N - old_N)
    importance_N = tokens.of_sampled(importance_N)
    raw_N = tokens.of_sampled(raw_N)
    result = surrogate(tokens, algorithm)
    sums = _sums(tokens, result) | {
        "weight_sum": importance_N.sum(),
        "weight_max": importance_N.max(),
        "weights_bounded": is_bounded_N.sum(),
        "raw_weight_sum": raw_N.sum(),
        "raw_weight_square_sum": raw_N.square().sum(),
    }
    loss_N = -importance_N * result.objective_N
    factors_N = tokens.columns.get("factors")
    if factors_N is not None:
        loss_N = factors_N * loss_N
        sums["left_out"] = (factors_N == 0).sum()
    if algorithm.off_policy_threshold is not None:
        from tidemill.services.trainer.algorithm.losses.rejection import off_policy_tokens

        is_off_N = off_policy_tokens(tokens, algorithm.off_policy_threshold)
        loss_N = loss_N.masked_fill(is_off_N, 0.0)
        sums["off_policy"] = is_off_N.sum()
    # Tokens that were left out above have the terms from here on all the same: they lose the policy's alone.
    if _has_terms(tokens, algorithm):
        from tidemill.services.trainer.algorithm.losses.terms import with_terms

        loss_N = with_terms(loss_N, tokens, algorithm, sums)
    # Before weights: a demonstration's token counts in the denominator as any other does.
    loss_N = _imitated(tokens, loss_N, sums)
    weights_N = tokens.weights_N
    if algorithm.rejection.is_on:
        from tidemill.services.trainer.algorithm.losses.rejection import kept_weights, rejected_tokens

        is_rejected_N = rejected_tokens(drift_N, *sequences, algorithm.rejection)
        weights_N = kept_weights(tokens, is_rejected_N, algorithm)
        sums["rejected"] = is_rejected_N.sum()
        if algorithm.rejection.denominator == "kept" and algorithm.normalisation == "token":
            sums["denominator"] = -sums["rejected"]
    # Last: a rejected token, whose weight is 0, is in none of the terms.
    loss = (weights_N * loss_N).sum()
    sums["loss_sum"] = loss.detach()
    return loss, sums


def _has_terms(tokens: Tokens, algorithm: AlgorithmConfig) -> bool:
    """Whether the loss has terms beside the policy's own."""
    # The conditions of `with_terms`, so that a run without terms need not read them: a term that has no line
    # here would be left out without a word.
    return bool(
        "reference_logprobs" in tokens.columns
        or algorithm.rollout_penalty
        or algorithm.teacher.place == "loss"
        or algorithm.entropy_coefficient
        or tokens.values_N is not None
        or tokens.routing
    )


def _imitated(tokens: Tokens, loss_N: Tensor, sums: TileSums) -> Tensor:
    """The loss of each token, for demonstrations their imitation loss, whose sums go into `sums`.

    Logprobs -0.5 and -2 of demonstrations with a weight of 0.1: 0.05 and 0.2.
    """
    weights_N = tokens.imitation_N
    is_demonstration_N = tokens.is_demonstration_N
    if weights_N is None or is_demonstration_N is None:
        return loss_N
    sums["imitation_sum"] = -(tokens.logprobs_N.detach() * is_demonstration_N).sum()
    sums["imitation_tokens"] = is_demonstration_N.sum()
    return torch.where(is_demonstration_N, -weights_N * tokens.logprobs_N, loss_N)


@torch.no_grad()
def _sums(tokens: Tokens, surrogate: Surrogate) -> TileSums:
    gap_N = tokens.logprobs_N - tokens.rollout_logprobs_N
    unmasked_gap_N = tokens.unmasked_logprobs_N - tokens.rollout_logprobs_N

    def count(is_cut_N: Tensor | None) -> Tensor:
        return torch.zeros_like(gap_N[0]) if is_cut_N is None else is_cut_N.sum()

    return {
        "entropy_sum": tokens.entropies_N.sum(),
        # k3 with r = current / rollout, on tokens of the rollout.
        "rollout_kl_sum": (torch.expm1(gap_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - gap_N).sum(),
        "clipped_low": count(surrogate.is_low_N),
        "clipped_high": count(surrogate.is_high_N),
        "clipped_dual": count(surrogate.is_dual_N),
        "mismatch_sum": gap_N.abs().sum(),
        "mismatch_max": gap_N.abs().max(),
        "unmasked_mismatch_sum": unmasked_gap_N.abs().sum(),
    }
