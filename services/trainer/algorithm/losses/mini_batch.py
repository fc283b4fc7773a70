"""What the loss of a token takes from its whole mini-batch: computed before any of it is trained.

A quantile, a mean or a selection over all trained tokens of a mini-batch cannot be computed within a
micro-batch without depending on the split. So the mini-batch waits for its last group, the statistics are
computed from logprobs and entropies under the weights at the start of the step (`Policy.precompute`), and
every token gets its share as a constant:

* `factors` multiply the policy's term: 0 for tokens that an entropy quantile or the loss leaves out, and 1 /
  (mean weight) where importance weights are normalised;
* `penalised` are the tokens that the loss penalises.

Guarantee: neither depends on the order in which groups arrived, on micro-batches or on ranks.

Shape legend: N trained tokens of a mini-batch.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.algorithms.table import LOSSES
from tidemill.common.wire.arrays import Bits, Float64
from tidemill.services.trainer.algorithm.losses.importance import importance_weights
from tidemill.services.trainer.algorithm.losses.tokens import LOGPROB_FLOOR, Tokens
from tidemill.services.trainer.groups.group import Group
from tidemill.services.trainer.groups.sample import Sample


def fill_statistics(groups: Sequence[Group], algorithm: AlgorithmConfig) -> None:
    """Fill in what the samples of one optimizer update take from all of it; their groups, in any order, have
    advantages and precomputed columns already."""
    if not algorithm.needs_statistics:
        return
    # By key: sums, quantiles and ties are the same, whatever the order of arrival.
    samples = sorted((sample for group in groups for sample in group.samples), key=lambda s: s.key)
    factors_N = np.ones(sum(sample.num_trained for sample in samples))
    penalised_N = None
    if algorithm.top_entropy_quantile < 1.0:
        factors_N *= top_entropy(_trained(samples, "entropies"), algorithm.top_entropy_quantile)
    if algorithm.importance.normalise:
        factors_N /= mean_weight(samples, algorithm)
    loss = LOSSES.get(algorithm.loss)
    if loss and loss.choose:
        tokens = start_tokens(samples, algorithm)
        positions = [(sample.key, int(index)) for sample in samples for index in np.flatnonzero(sample.mask)]
        chosen = loss.choose(tokens, loss.surrogate(tokens, algorithm), positions, algorithm)
        if loss.leaves_out:
            factors_N[chosen] = 0.0
        else:
            penalised_N = np.zeros(len(positions))
            penalised_N[chosen] = 1.0
    start = 0
    for sample in samples:
        end = start + sample.num_trained
        sample.fill("factors", sample.spread(factors_N[start:end]))
        if penalised_N is not None:
            sample.fill("penalised", sample.spread(penalised_N[start:end]))
        for name in ("start_logprobs", "entropies"):  # nothing else reads them
            sample.columns.pop(name, None)
        start = end
    for group in groups:
        # Whoever trains these samples in another step, or again, has to compute what was dropped.
        group.precomputed_for = -1


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
    drift_N = _trained(samples, "start_logprobs") - _trained(samples, "rollout_logprobs")
    sequence_N = _sequences(samples)
    weights_N, *_ = importance_weights(
        torch.from_numpy(drift_N), torch.from_numpy(sequence_N), len(samples), algorithm
    )
    weights_M = weights_N.numpy()
    if algorithm.importance.level != "token":
        weights_M = weights_M[np.unique(sequence_N, return_index=True)[1]]  # one of each sequence
    # Where all weights are 0, to divide by their mean would give NaN.
    return float(weights_M.mean()) if len(weights_M) and weights_M.any() else 1.0


def start_tokens(samples: Sequence[Sample], algorithm: AlgorithmConfig) -> Tokens:
    """The trained tokens of the samples as the loss will see them first, in float64."""
    start_N = _trained(samples, "start_logprobs")
    rollout_N = _trained(samples, "rollout_logprobs")
    advantages = [sample.columns["advantages"][sample.mask].astype(np.float64) for sample in samples]
    # With `recompute` the old policy is that of the start: the ratio is 1.
    old_N = start_N if algorithm.old_logprobs == "recompute" else rollout_N
    arrays = (start_N - old_N, _joined(advantages), start_N, _sequences(samples))
    log_N, advantages_N, logprobs_N, sequence_N = map(torch.from_numpy, arrays)
    return Tokens(
        logprobs_N=logprobs_N,
        weights_N=torch.ones_like(logprobs_N),
        sequence_N=sequence_N,
        num_sequences=len(samples),
        entropies_N=torch.zeros_like(logprobs_N),
        columns={"rollout_logprobs": torch.from_numpy(rollout_N), "advantages": advantages_N},
        log_N=log_N,
    )


def _sequences(samples: Sequence[Sample]) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(samples)), [sample.num_trained for sample in samples])


def _trained(samples: Sequence[Sample], name: str) -> Float64:
    """A column at the trained tokens of all samples. Shape [N]."""
    assert all(name in sample.columns for sample in samples), "`Policy.precompute` comes before statistics"
    joined_N = _joined([sample.columns[name][sample.mask].astype(np.float64) for sample in samples])
    # A token that the model rules out counts as in the loss.
    return np.maximum(joined_N, LOGPROB_FLOOR)


def _joined(parts: Sequence[Float64]) -> Float64:
    return np.concatenate([np.zeros(0), *parts])
