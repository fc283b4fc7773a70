"""Importance weights, rejection, KL penalties and the value loss.

Shape legend: N trained tokens, S sequences.

Importance weights compare the old policy with the one that sampled: they correct for stale weights and for
numerics that differ between engine and trainer. Rejection leaves out what these two policies disagree on too
much. Both look at whole sequences, so nothing depends on micro-batches.

KL(policy || reference) is estimated from one sample of each token, with d = logprob - reference logprob
(Schulman 2020, "Approximating KL divergence"): k1 = d is unbiased and often negative; k2 = d^2 / 2 has little
variance and a small bias; k3 = exp(-d) - 1 + d is unbiased and never negative. An unbiased value does not
make an unbiased gradient: differentiating the estimate leaves out that the policy also chooses the tokens
(arXiv 2510.01555). On policy, the gradient of the true KL is E[d * grad logprob], and

* k2's gradient is exactly d * grad logprob: the right one;
* k3's is (1 - exp(-d)) * grad logprob, that of KL(reference || policy) in expectation, which agrees with k2's
  near d = 0. It is GRPO's penalty (arXiv 2402.03300, eq. 4);
* k1's is grad logprob, zero in expectation: noise. So in the loss k1 has the value of k1 and the gradient of
  k2 (verl's `k1+`);
* k3+ has the value of k3 and the gradient of k2 (verl's);
* corrected k3 is r k3, with r the ratio to the old policy (DeepSeek-V3.2, arXiv 2512.02556; TRL's
  `use_bias_correction_kl`): unbiased also where the old policy sampled, and its gradient, r d * grad logprob,
  is the right one there;
* abs is |d|, with the sign of d as its slope (verl's).
"""

import torch
from torch import Tensor

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.algorithm_sections import KlConfig, RejectionConfig, TeacherTermConfig
from tidemill.services.trainer.algorithm.losses.tokens import (
    MAX_LOG_RATIO,
    Tokens,
    sequence_means,
    sequence_sums,
)


def importance_weights(
    log_ratio_N: Tensor, sequence_N: Tensor, num_sequences: int, algorithm: AlgorithmConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights w of the tokens from log(old / rollout), bounded as `algorithm.importance` says; the weights
    without bounds, also with mode `off`; and which of them a bound has changed. Shapes [N], no gradient.

    A weight is that of the token (`level: token`) or of its sequence: the product over tokens (`sequence`) or
    their geometric mean (`geometric`):

    * `truncate`: clip(w, low, high). Truncated importance sampling (Yao et al. 2025, "Your efficient RL
      framework secretly brings you off-policy RL training"); the behaviour weight of decoupled PPO (AReaL,
      arXiv 2505.24298, eq. 5). A little bias for bounded variance.
    * `mask`: w where it lies in [low, high], else 0. Masked importance sampling; on tokens with bounds on
      both sides it is IcePop (Ring-1T, arXiv 2510.18855: low 0.5, high 5). Masked tokens still count in
      the denominator.
    * `off`: 1.
    """
    importance = algorithm.importance
    mode = algorithm.importance_mode
    # Importance weights are constants: else the loss could fall by moving them alone.
    log_ratio_N = log_ratio_N.detach()
    if importance.level == "sequence":
        log_ratio_N = sequence_sums(log_ratio_N, sequence_N, num_sequences)[sequence_N]
    elif importance.level == "geometric":
        log_ratio_N = sequence_means(log_ratio_N, sequence_N, num_sequences)[sequence_N]
    # After the sum: that of a long sequence is far beyond any token's.
    raw_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if mode == "off":
        return torch.ones_like(raw_N), raw_N, torch.zeros_like(raw_N, dtype=torch.bool)
    is_outside_N = (raw_N < importance.low) | (raw_N > importance.high)
    if mode == "mask":
        return raw_N.masked_fill(is_outside_N, 0.0), raw_N, is_outside_N
    return raw_N.clamp(importance.low, importance.high), raw_N, is_outside_N


def kl_penalty(
    logprobs_N: Tensor,
    reference_logprobs_N: Tensor,
    kl: KlConfig,
    ratio_N: Tensor | None = None,
    limit: float = MAX_LOG_RATIO,
) -> Tensor:
    """The penalty of each token, with the gradients above. Shape [N]; `ratio_N` is current / old, for
    corrected k3 (None: 1). d is brought into [-limit, limit].

    p = 0.6 under the policy, 0.4 under the reference: d = log 1.5 = 0.4055; k1 = 0.4055, k2 = 0.0822, k3 =
    2/3 - 1 + 0.4055 = 0.0721. With 0.5 under the old policy corrected k3 is 1.2 * 0.0721 = 0.0866, its slope
    1.2 * 0.4055 = 0.4866.

    k3 grows as exp(-d) where the policy has left a token, and its gradient with it: at d = -10 it is 22,015,
    and the step belongs to that token. So it stops at `kl.bound`, value and gradient, as in verl: 10 is
    reached at d = -2.61. The slopes of k1, k2 and k3+ are d: of k3+ it bounds the value alone. Corrected k3
    has the slope r d, and r has no bound of its own: k3 and r d stop at `kl.bound`, and a token there keeps
    that slope. Beyond 20 nats each estimator keeps the slope that it has at 20.
    """
    gap_N = logprobs_N - reference_logprobs_N
    # Bounded without gradient: a token beyond the bound keeps the slope that it has there.
    d_N = gap_N.detach().clamp(-limit, limit)
    # `exp(-d) - 1` loses its digits where d is nearly 0, as for most tokens.
    k3_N = torch.expm1(-d_N) + d_N
    bounded_N = k3_N if kl.bound is None else k3_N.clamp(max=kl.bound)
    if kl.estimator == "abs":
        return with_slope(d_N.abs(), d_N.sign(), logprobs_N)
    if kl.estimator == "k1":
        return with_slope(d_N, d_N, logprobs_N)
    if kl.estimator == "k2":
        return with_slope(0.5 * d_N.square(), d_N, logprobs_N)
    if kl.estimator == "k3":
        return with_slope(bounded_N, (-torch.expm1(-d_N)).masked_fill(bounded_N < k3_N, 0.0), logprobs_N)
    if kl.estimator == "k3+" or ratio_N is None:
        return with_slope(bounded_N, d_N, logprobs_N)
    weight_N = ratio_N.detach()
    slope_N = weight_N * d_N
    slope_N = slope_N if kl.bound is None else slope_N.clamp(-kl.bound, kl.bound)
    return with_slope(weight_N * bounded_N, slope_N, logprobs_N)


def rollout_penalty(logprobs_N: Tensor, rollout_logprobs_N: Tensor) -> Tensor:
    """log(p / q)^2 of each token, with p its probability now and q at the rollout. Shape [N].

    Kimi K2.5, arXiv 2602.02276. Beyond 20 nats value and slope stay those of 20. p = 0.5, q = 0.25: 0.4805,
    slope 1.3863.
    """
    gap_N = (logprobs_N.detach() - rollout_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return with_slope(gap_N.square(), 2.0 * gap_N, logprobs_N)


def with_slope(value_N: Tensor, slope_N: Tensor, logprobs_N: Tensor) -> Tensor:
    """A term with this value, whose derivative by the logprob is this slope. Shapes [N]; value and slope are
    constants."""
    return value_N + slope_N * (logprobs_N - logprobs_N.detach())


def teacher_kl(logprobs_N: Tensor, teacher_logprobs_N: Tensor, term: TeacherTermConfig) -> Tensor:
    """An estimate of KL(policy || teacher) at each token of the policy's own. Shape [N].

    Like `kl_penalty`, with d = logprob - teacher's brought into [-clip, clip]: in expectation the gradient of
    k1 and k2 is that of the reverse KL, and of k3 that of KL(teacher || policy). A token at the bound keeps
    the gradient of the bound: it is where the two differ most.

    p = 0.5, teacher's 0.25: d = log 2; k2 has value 0.2402, gradient 0.6931, k3 0.5 - 1 + 0.6931 = 0.1931
    and 0.5. Of p = 0.25 against 0.5: 0.2402, -0.6931; 2 - 1 - 0.6931 = 0.3069, -1.
    """
    kl = KlConfig(estimator=term.estimator, bound=None)
    return kl_penalty(logprobs_N, teacher_logprobs_N, kl, limit=term.clip)


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, clip: float | None) -> Tensor:
    """1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2). Shape [N], at least 0.

    PPO's clipped value loss (arXiv 2005.12729, section 3; in OpenAI's baselines, not in the paper): a value
    that has moved c away from its estimate at the step's start has no gradient. `clip=None`: 1/2 (V - R)^2. V
    = 1, V_old = 0.5, c = 0.2, R = 0: max(1, 0.49) / 2 = 0.5; with R = 2: max(1, 1.69) / 2 = 0.845.
    """
    errors_N = (values_N - returns_N).square()
    if clip is None:
        return 0.5 * errors_N
    clipped_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
    return 0.5 * torch.maximum(errors_N, (clipped_N - returns_N).square())


def rejected_tokens(
    log_ratio_N: Tensor, sequence_N: Tensor, num_sequences: int, rejection: RejectionConfig
) -> Tensor:
    """Which tokens are left out, from log(old / rollout). Shapes [N].

    With r = old / rollout of a token and l = log r, a token or a sequence is judged by one or several of

    * k1: r itself, between two bounds; of a sequence the product of its tokens (`seq_sum_k1`) or their
      geometric mean (`seq_mean_k1`);
    * k2 = l^2 / 2 and k3 = r - 1 - l, estimates of KL(rollout || old), up to a bound; of a sequence their
      sum, mean or largest.

    Each criterion that is set has to hold, whatever the weights of `importance` are; `veto` rejects a
    sequence with a token whose r is below it. Like verl's rollout correction, except that bounds of k1 are of
    r, not of 1 / r. A rejected token is in no term of the loss.

    Ratios 0.5 and 3 in one sequence: product 1.5, geometric mean 1.2247, k2 0.2402 and 0.6035, k3 0.1931 and
    0.9014. `token_k1: [0.4, 2]` rejects the second token, `seq_max_k3: 0.9` both.
    """
    log_N = log_ratio_N.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # `expm1`, because most ratios are nearly 1, where `exp(l) - 1` loses its digits.
    measures = {"k1": log_N, "k2": 0.5 * log_N.square(), "k3": torch.expm1(log_N) - log_N}
    is_out_N = torch.zeros_like(log_N, dtype=torch.bool)
    is_out_S = torch.zeros(num_sequences, dtype=torch.bool, device=log_N.device)
    for name, bound in rejection.bounds.items():
        of, _, measure = name.rpartition("_")  # "seq_max_k3" is "seq_max" of "k3"
        if of == "token":
            is_out_N = is_out_N | _is_outside(measures[measure], bound)
        else:
            values_S = _OF_SEQUENCES[of](measures[measure], sequence_N, num_sequences)
            is_out_S = is_out_S | _is_outside(values_S, bound)
    if rejection.veto is not None:
        is_far_N = log_N < _log(rejection.veto, log_N)
        is_out_S = is_out_S | (sequence_sums(is_far_N.to(log_N.dtype), sequence_N, num_sequences) > 0)
    return is_out_N | is_out_S[sequence_N]


def kept_weights(tokens: Tokens, is_rejected_N: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """The weights of tokens, 0 for rejected ones. Shape [N].

    With `denominator: kept` and `normalisation: sequence` a sequence's mean is over its kept tokens: of 4
    tokens with weights 1/4 of which one is rejected, the others have 1/3.
    """
    is_kept_N = (~is_rejected_N).to(tokens.weights_N.dtype)
    if algorithm.rejection.denominator == "kept" and algorithm.normalisation == "sequence":
        shares_S = sequence_means(is_kept_N, tokens.sequence_N, tokens.num_sequences)
        # A sequence of which nothing is kept gives 0 / 1e-12, which is 0, and not 0 / 0.
        is_kept_N = is_kept_N / shares_S.clamp(min=1e-12)[tokens.sequence_N]
    return tokens.weights_N * is_kept_N


def off_policy_tokens(tokens: Tokens, threshold: float) -> Tensor:
    """Tokens with A < 0 in sequences that the policy has left: mean of log(rollout / current) above the
    threshold. Shape [N].

    DeepSeek-V3.2's off-policy sequence mask (arXiv 2512.02556), against the policy that sampled, as in TRL.
    Rollout probabilities 0.5 and 0.4, now 0.25 and 0.2: log 2 = 0.693 on average; a threshold of 0.5 masks
    both where A < 0, and none where A > 0.
    """
    gap_N = (tokens.rollout_logprobs_N - tokens.logprobs_N).detach()
    means_S = sequence_means(gap_N, tokens.sequence_N, tokens.num_sequences)
    return (tokens.advantages_N < 0) & (means_S > threshold)[tokens.sequence_N]


def _is_outside(values: Tensor, bound: float | tuple[float, float]) -> Tensor:
    if isinstance(bound, tuple):
        low, high = bound
        return (values < _log(low, values)) | (values > _log(high, values))
    return values > bound


def _log(number: float, like: Tensor) -> Tensor:
    """The logarithm in the dtype of what it bounds, so that a ratio at its bound is inside."""
    return torch.tensor(number, dtype=like.dtype, device=like.device).log()


def _sequence_maxima(values_N: Tensor, sequence_N: Tensor, num_sequences: int) -> Tensor:
    """Largest value of each sequence; values are at least 0. Shape [S]."""
    return values_N.new_zeros(num_sequences).scatter_reduce(0, sequence_N, values_N, "amax")


_OF_SEQUENCES = {"seq_sum": sequence_sums, "seq_mean": sequence_means, "seq_max": _sequence_maxima}
