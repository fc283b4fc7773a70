"""GPG, arXiv 2504.02546: groups without a gradient take no weight from the others."""

import numpy as np


def gpg(rewards, tickets):
    """N / (completions of groups whose rewards differ) * (r - mean of the group). Shape [N].

    With F_norm = 1. Groups 1, 0 and 1, 1: 4 / 2 * (0.5, -0.5) = 1, -1, and 0, 0. verl's `gpg` divides by the
    number of rewards that are not 0 instead.
    """
    advantages = np.zeros(len(rewards))
    num_with_gradient = 0
    for ticket in np.unique(tickets):
        is_member = tickets == ticket
        group = rewards[is_member]
        # Compared exactly: the mean of equal numbers may be off by a rounding.
        if (group != group[0]).any():
            advantages[is_member] = group - group.mean()
            num_with_gradient += len(group)
    if num_with_gradient == 0:
        return advantages
    return advantages * (len(advantages) / num_with_gradient)
