"""ScaleRL's advantage, arXiv 2510.13786. `scale_rl.yaml` has the other settings of the paper."""

import numpy as np

STD_EPSILON = 1e-4


def scale_rl(rewards, tickets):
    """(r - mean of the group) / (std of all those differences + 1e-4). Shape [N].

    Unlike `grpo_batch`, the deviation is without that between prompts. Groups 1, 0 and 3, 0: +-0.5 and +-1.5
    have the variance 5/3, so they are divided by 1.29099 + 1e-4.
    """
    differences = np.zeros(len(rewards))
    for ticket in np.unique(tickets):
        is_member = tickets == ticket
        group = rewards[is_member]
        # Compared exactly: the mean of equal numbers may be off by a rounding.
        if (group != group[0]).any():
            differences[is_member] = group - group.mean()
    if not differences.any():
        return differences
    return differences / (differences.std(ddof=1) + STD_EPSILON)
