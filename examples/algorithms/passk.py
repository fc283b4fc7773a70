"""Only the best completion of a group counts: pass@k with k the size of the group, arXiv 2503.19595."""

import numpy as np

STD_EPSILON = 1e-4


def dr_grpo_passk(rewards):
    """The best completion's lead over the second best; zero for all others. Shape [G].

    The greatest reward of all, less that of the group without the completion. It rewards the best of G, and
    only a best one that no other equals. Rewards 3, 1, 0 give 2, 0, 0.
    """
    advantages = np.zeros(len(rewards))
    if len(rewards) > 1:
        second, best = np.argsort(rewards, kind="stable")[-2:]
        advantages[best] = rewards[best] - rewards[second]
    return advantages


def grpo_passk(rewards):
    """`dr_grpo_passk` / (std(r) + 1e-4), with the unbiased deviation. Shape [G].

    Rewards 3, 1, 0 have the variance 7/3: 2 / (1.52753 + 1e-4) = 1.30922, 0, 0.
    """
    advantages = dr_grpo_passk(rewards)
    if not advantages.any():
        return advantages
    return advantages / (rewards.std(ddof=1) + STD_EPSILON)
