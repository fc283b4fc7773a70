"""REINFORCE, Williams 1992, with the baseline in the advantage; RLOO and REINFORCE++ use it."""

from typing import TYPE_CHECKING

from tidemill.common.config.algorithms.loss import Loss, Surrogate, Tokens

if TYPE_CHECKING:
    from tidemill.common.config.algorithm import AlgorithmConfig


def reinforce(ratio: Tokens, algorithm: "AlgorithmConfig") -> Surrogate:
    """A * logprob: its gradient is A times the gradient of the logprob. Shapes [N].

    Nothing is clipped: `importance` weights alone correct for policies other than the current one. A = 2, p
    = 0.5: 2 log 0.5 = -1.3863, with the slope 2.
    """
    return Surrogate(ratio.advantages_N * ratio.logprobs_N)


LOSSES = (Loss(name="reinforce", surrogate=reinforce, summary="A logprob", has_ratio=False),)
