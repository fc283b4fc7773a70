"""Pass@k training: reward for a set of k completions that holds at least one success.

"Pass@k Training for Adaptively Balancing Exploration and Exploitation", arXiv 2508.10751: its analytical
derivation, the expectation over all sets of k out of the G completions, in closed form.
"""

from math import comb

import numpy as np
from numpy.typing import NDArray

from services.trainer.advantages.rewards import Rewards, finite_rewards


def pass_at_k(rewards: Rewards, k: int, threshold: float = 0.5) -> NDArray[np.float64]:
    """Analytic pass@k advantages. Shape [G], float64.

    With n of G rewards below `threshold`, a set of k succeeds with probability p = 1 - C(n, k) / C(G, k), and
    rewards of sets have the deviation s = sqrt(p (1 - p)). A success belongs to sets that all succeed: (1 -
    p) / s. A failure belongs to sets that fail where the other k - 1 do: (1 - p - C(n - 1, k - 1) / C(G - 1,
    k - 1)) / s. Where every set has one outcome (p is 0 or 1), all are zero. k = 1 is GRPO with the biased
    deviation. A group that has lost samples and is smaller than k counts as one set.

    G = 4, k = 2, one success: n = 3, p = 1 - 3/6 = 0.5, s = 0.5; the success gets 1, a failure (0.5 - 2/3) /
    0.5 = -1/3.

    Raises:
        ValueError: a reward is not finite, or k is below 1.
    """
    if k < 1:
        raise ValueError(f"k is {k}; pass@k needs at least 1")
    rewards_G = finite_rewards(rewards)
    size = len(rewards_G)
    k = min(k, size)
    is_success_G = rewards_G >= threshold
    failures = int((~is_success_G).sum())
    if size < 2 or failures in (0, size) or failures < k:
        return np.zeros_like(rewards_G)
    fail = comb(failures, k) / comb(size, k)
    deviation = (fail * (1.0 - fail)) ** 0.5
    fail_given_failure = comb(failures - 1, k - 1) / comb(size - 1, k - 1)
    return np.where(is_success_G, fail / deviation, (fail - fail_given_failure) / deviation)
