"""REINFORCE++: returns normalised over the whole batch in place of the group. arXiv 2501.03262.

Both functions take the N sequences of a batch (a mini-batch of the step), with their A trained tokens each,
and give arrays of these shapes. The mean and the deviation are over tokens, as in verl and OpenRLHF.
"""

from collections.abc import Sequence

import numpy as np

from services.trainer.advantages.grpo import dr_grpo
from services.trainer.advantages.whitening import Float64s, whiten


def reinforce_plus_plus(token_rewards: Sequence[Float64s], gamma: float = 1.0) -> list[Float64s]:
    """whiten(G_t) with G_t = r_t + gamma G_{t+1}. N arrays [A], float64.

    Token rewards hold the KL penalty of each token (k1, by `kl.place: reward`), and the sequence's reward at
    its last token. Rewards 1 and 0 of sequences of 1 and 2 tokens: returns [1], [0, 0], mean 1/3, variance
    1/3; advantages [1.1547], [-0.57735, -0.57735].
    """
    return whiten([returns(rewards_A, gamma) for rewards_A in token_rewards])


def reinforce_plus_plus_baseline(
    groups: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]]
) -> list[Float64s]:
    """whiten(r - mean of the group). N arrays [A], one value repeated, float64.

    `lengths` are the numbers of trained tokens, which weigh the mean and the deviation.

    Raises:
        ValueError: a reward is not finite.
    """
    centred = [dr_grpo(rewards) for rewards in groups]
    return whiten(
        [
            np.full(length, value)
            for values, counts in zip(centred, lengths, strict=True)
            for value, length in zip(values, counts, strict=True)
        ]
    )


def returns(rewards_A: Float64s, gamma: float) -> Float64s:
    """Discounted sums of a token's reward and all later ones. Shape [A].

    Without a discount, rewards 0, 0, 1 give exactly 1, 1, 1.
    """
    result, following = [0.0] * len(rewards_A), 0.0
    for t, reward in reversed(list(enumerate(rewards_A.tolist()))):
        following = reward + gamma * following
        result[t] = following
    return np.array(result, dtype=np.float64)
