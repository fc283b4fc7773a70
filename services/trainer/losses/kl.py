"""Estimates of KL(policy || reference) from one sample of each token, and as a loss.

With d = logprob - reference logprob, on tokens sampled from the policy (Schulman 2020, "Approximating KL
divergence"): k1 = d is unbiased and often negative; k2 = d^2 / 2 has little variance and a small bias; k3 =
exp(-d) - 1 + d is unbiased and never negative.

An unbiased value does not make an unbiased gradient: differentiating the estimate leaves out that the policy
also chooses the tokens (arXiv 2510.01555). On policy, the gradient of the true KL is E[d * grad logprob], and

* k2's gradient is exactly d * grad logprob: the right one;
* k3's is (1 - exp(-d)) * grad logprob, which is that of the forward KL(reference || policy) in expectation,
  and agrees with k2's near d = 0. It is GRPO's penalty (arXiv 2402.03300, eq. 4), as in TRL, so it is kept as
  it is;
* k1's is grad logprob, zero in expectation: noise. So in the loss k1 has the value of k1 and the gradient of
  k2 (verl's `k1+`).
"""

from typing import Literal

import torch
from torch import Tensor

from services.trainer.losses.tokens import MAX_LOG_RATIO

Estimator = Literal["k1", "k2", "k3"]


def kl_penalty(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: Estimator) -> Tensor:
    """The penalty of each token, with the gradients above. Shape [N].

    p = 0.6 under the policy, 0.4 under the reference: d = log 1.5 = 0.4055; k1 = 0.4055, k2 = 0.0822, k3 =
    2/3 - 1 + 0.4055 = 0.0721.
    """
    difference_N = (logprobs_N - reference_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k3":
        return torch.expm1(-difference_N) + difference_N
    squared_N = 0.5 * difference_N.square()
    if estimator == "k2":
        return squared_N
    # Value of k1, gradient of k2.
    return difference_N.detach() + squared_N - squared_N.detach()
