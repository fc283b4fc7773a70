"""What the loss of a token takes from its whole mini-batch: computed before any of it is trained.

A quantile, a mean or a selection over all trained tokens of a mini-batch cannot be computed within a
micro-batch without depending on the split. So the mini-batch waits for its last group, the statistics are
computed from logprobs and entropies under the weights at the start of the step (`Policy.precompute`), and
every token gets its share as a constant:

* `factors` multiply the policy's term: 0 for tokens that an entropy quantile or clip-cov leaves out, and 1 /
  (mean weight) where importance weights are normalised;
* `penalised` are the tokens that kl-cov penalises.

Guarantee: neither depends on the order in which groups arrived, on micro-batches or on ranks.

Shape legend: N trained tokens of a mini-batch, A of a sample, T all of its completion tokens.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import xxhash
from numpy.typing import NDArray

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.wire.arrays import Bits, Float64
from tidemill.services.trainer.algorithm.losses.tokens import LOGPROB_FLOOR, MAX_LOG_RATIO
from tidemill.services.trainer.groups.group_filter import TrainableGroup
from tidemill.services.trainer.groups.samples import Sample


def needs_statistics(algorithm: AlgorithmConfig) -> bool:
    return algorithm.needs_start_entropies or algorithm.needs_start_logprobs


def with_statistics(groups: Sequence[TrainableGroup], algorithm: AlgorithmConfig) -> list[TrainableGroup]:
    """The groups of one optimizer update, in any order, with the statistics that their samples need; they
    have advantages and precomputed values already."""
    if not needs_statistics(algorithm):
        return list(groups)
    # By key: sums, quantiles and ties are the same, whatever the order of arrival.
    samples = sorted((sample for group in groups for sample in group.samples), key=lambda s: s.key)
    factors_N, penalised_N = np.ones(sum(sample.num_trained for sample in samples)), None
    if algorithm.top_entropy_quantile < 1.0:
        entropies_N = _joined([_trained(sample, sample.entropies) for sample in samples])
        factors_N *= top_entropy(entropies_N, algorithm.top_entropy_quantile)
    if algorithm.importance.normalise:
        factors_N /= mean_weight(samples, algorithm)
    if algorithm.loss == "clip_cov":
        is_clipped_N = _joined([_clipped(sample, algorithm) for sample in samples]) > 0
        factors_N *= ~clip_cov_tokens(samples, token_covariances(samples), is_clipped_N, algorithm)
    elif algorithm.loss == "kl_cov":
        penalised_N = kl_cov_tokens(token_covariances(samples), algorithm).astype(np.float64)
    found, end = {}, 0
    for sample in samples:
        start, end = end, end + sample.num_trained
        found[sample.key] = replace(
            sample,
            factors=sample.spread(factors_N[start:end]),
            penalised=None if penalised_N is None else sample.spread(penalised_N[start:end]),
            entropies=None,
            start_logprobs=None,
        )
    return [replace(group, samples=[found[sample.key] for sample in group.samples]) for group in groups]


def top_entropy(entropies_N: Float64, share: float) -> Bits:
    """The tokens among the `share` with the highest entropy: at least the quantile 1 - share. Shape [N].

    "Beyond the 80/20 rule", arXiv 2506.01939: a fifth of the tokens, at which a completion forks,
    carries what is learned. Entropies 0, 1, 2, 3 and a share of 0.5: the quantile is 1.5, the last two stay.
    """
    if not len(entropies_N):
        return np.zeros(0, dtype=np.bool_)
    kept: Bits = entropies_N >= np.quantile(entropies_N, 1.0 - share)
    return kept


def mean_weight(samples: Sequence[Sample], algorithm: AlgorithmConfig) -> float:
    """Mean of the truncated importance weights: over tokens, or for weights of sequences over sequences.

    verl's `rollout_is_batch_normalize`. 1 where there is no token.
    """
    importance, weights = algorithm.importance, []
    for sample in samples:
        logs_A = _trained(sample, sample.start_logprobs) - _trained(sample, sample.rollout_logprobs)
        if importance.level != "token" and len(logs_A):
            logs_A = np.array([logs_A.sum() if importance.level == "sequence" else logs_A.mean()])
        weights.append(np.exp(logs_A.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO)))
    weights_M = _joined(weights).clip(importance.low, importance.high)
    # Where all weights are 0, to divide by their mean would give NaN.
    return float(weights_M.mean()) if len(weights_M) and weights_M.any() else 1.0


def token_covariances(samples: Sequence[Sample]) -> Float64:
    """(A - mean A) (logprob - mean logprob) of each token, with means over all of them. Shape [N].

    "The entropy mechanism of reinforcement learning", arXiv 2505.22617: the entropy falls fastest
    where this is large. Advantages 1, -1 with logprobs -1, -3: both 1.
    """
    advantages_N = _joined(
        [_trained(s, np.broadcast_to(np.asarray(s.advantage, np.float64), s.mask.shape)) for s in samples]
    )
    logprobs_N = _joined([_trained(sample, sample.start_logprobs) for sample in samples])
    if not len(logprobs_N):
        return logprobs_N
    covariances_N: Float64 = (advantages_N - advantages_N.mean()) * (logprobs_N - logprobs_N.mean())
    return covariances_N


def clip_cov_tokens(
    samples: Sequence[Sample], covariances_N: Float64, is_clipped_N: Bits, algorithm: AlgorithmConfig
) -> Bits:
    """Tokens that clip-cov takes the gradient from, of N: a share of all tokens, at least one, chosen at
    random among those whose covariance lies in (low, high) and that the ordinary clip leaves alone.

    Clip-Cov of arXiv 2505.22617. Chance is a hash of the token's key and place: the same in every replay.
    """
    bounds, chosen_N = algorithm.covariance, np.zeros(len(covariances_N), dtype=np.bool_)
    inside_N = (covariances_N > bounds.low) & (covariances_N < bounds.high) & ~is_clipped_N
    candidates = np.flatnonzero(inside_N)
    places = [(s.key, int(place)) for s in samples for place in np.flatnonzero(s.mask)]
    order = sorted(candidates.tolist(), key=lambda n: (_chance(*places[n]), n))
    chosen_N[order[: _count(bounds.share, len(covariances_N))]] = True
    return chosen_N


def kl_cov_tokens(covariances_N: Float64, algorithm: AlgorithmConfig) -> Bits:
    """Tokens that kl-cov penalises, of N: the share with the largest covariances, at least one.

    KL-Cov of arXiv 2505.22617. Ties go to the first by key and place.
    """
    chosen_N = np.zeros(len(covariances_N), dtype=np.bool_)
    order = np.argsort(-covariances_N, kind="stable")
    chosen_N[order[: _count(algorithm.covariance.share, len(covariances_N))]] = True
    return chosen_N


def _count(share: float, num_tokens: int) -> int:
    return max(int(share * num_tokens), 1)


def _chance(key: tuple[int, int], place: int) -> int:
    # Little-endian on every machine: it has to be the same hash.
    return xxhash.xxh3_64_intdigest(np.array([*key, place], dtype="<i8").tobytes())


def _clipped(sample: Sample, algorithm: AlgorithmConfig) -> Float64:
    """1 where PPO's clip cuts a trained token's gradient at the start of the step, else 0. Shape [A]."""
    if algorithm.old_logprobs == "recompute":
        return np.zeros(sample.num_trained)  # the ratio is 1
    logs_A = _trained(sample, sample.start_logprobs) - _trained(sample, sample.rollout_logprobs)
    advantages_A = _trained(sample, np.broadcast_to(np.asarray(sample.advantage), sample.mask.shape))
    is_high_A = (advantages_A > 0) & (logs_A > np.log1p(algorithm.clip_high))
    is_low_A = (advantages_A < 0) & (np.exp(logs_A) < 1.0 - algorithm.clip_low)
    clipped_A: Float64 = (is_high_A | is_low_A).astype(np.float64)
    return clipped_A


def _trained(sample: Sample, values_T: NDArray[np.floating] | None) -> Float64:
    assert values_T is not None, "`Policy.precompute` comes before statistics"
    # A token that the model rules out counts as in the loss.
    return np.maximum(values_T[sample.mask].astype(np.float64), LOGPROB_FLOOR)


def _joined(parts: Sequence[Float64]) -> Float64:
    return np.concatenate([np.zeros(0), *parts])
