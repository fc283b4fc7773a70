"""Terms of the loss beside the policy's own: KL penalties, a teacher, the entropy bonus, values, routers.

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

Shape legend: N trained tokens.
"""

import torch
from torch import Tensor

from tidemill.common.config.algorithm import AlgorithmConfig
from tidemill.common.config.algorithm_sections import KlConfig, TeacherTermConfig
from tidemill.services.trainer.algorithm.losses.sums import TileSums
from tidemill.services.trainer.algorithm.losses.tokens import MAX_LOG_RATIO, Tokens


def with_terms(loss_N: Tensor, tokens: Tokens, algorithm: AlgorithmConfig, sums: TileSums) -> Tensor:
    """The loss of each token with the terms that this config and these tokens have; their diagnostics go into
    `sums`. Shape [N]."""
    if "reference_logprobs" in tokens.columns:
        # Over all ids on both sides: over the kept ones alone a policy would differ from itself.
        unmasked_N = tokens.unmasked_logprobs_N
        kl_N = kl_penalty(unmasked_N, tokens.columns["reference_logprobs"], algorithm.kl, tokens.ratio_N)
        sums["kl_sum"] = kl_N.detach().sum()
        if algorithm.kl.place == "loss":
            loss_N = loss_N + algorithm.kl.coefficient * kl_N
    if algorithm.rollout_penalty:
        penalty_N = rollout_penalty(tokens.logprobs_N, tokens.rollout_logprobs_N)
        loss_N = loss_N + algorithm.rollout_penalty * penalty_N
    if algorithm.teacher.place == "loss":
        loss_N = loss_N + _teacher_term(tokens, algorithm, sums)
    if algorithm.entropy_coefficient:
        loss_N = loss_N - algorithm.entropy_coefficient * tokens.entropies_N
    if tokens.values_N is not None:
        loss_N = loss_N + _value_term(tokens, algorithm, sums)
    if tokens.routing:
        from tidemill.services.trainer.algorithm.losses.routing import router_term

        loss_N = loss_N + router_term(tokens, algorithm, sums)
    return loss_N


def _teacher_term(tokens: Tokens, algorithm: AlgorithmConfig, sums: TileSums) -> Tensor:
    """weight * KL(policy || teacher) of each token; its sums go into `sums`."""
    weights_N = tokens.teacher_weights_N
    if weights_N is None:
        return torch.zeros_like(tokens.weights_N)
    kl_N = teacher_kl(tokens.unmasked_logprobs_N, tokens.columns["teacher_logprobs"], algorithm.teacher)
    has_teacher_N = weights_N > 0
    sums["teacher_kl_sum"] = (kl_N.detach() * has_teacher_N).sum()
    sums["teacher_tokens"] = has_teacher_N.sum()
    return weights_N * kl_N


def _value_term(tokens: Tokens, algorithm: AlgorithmConfig, sums: TileSums) -> Tensor:
    """The weighted value loss of each token; its diagnostics go into `sums`."""
    assert tokens.values_N is not None, "it is asked for where there is a value head"
    old_N = tokens.columns["values"]
    returns_N = tokens.columns["returns"]
    loss_N = value_loss(tokens.values_N, old_N, returns_N, algorithm.value.clip)
    sums["value_loss_sum"] = loss_N.detach().sum()
    sums["value_square_error_sum"] = (old_N - returns_N).square().sum()
    sums["return_sum"] = returns_N.sum()
    sums["return_square_sum"] = returns_N.square().sum()
    return algorithm.value.coefficient * loss_N


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
