"""The plain policy gradient."""

from common.config.algorithm import AlgorithmConfig
from services.trainer.losses.tokens import Ratio, Surrogate, unclipped


def reinforce(ratio: Ratio, algorithm: AlgorithmConfig) -> Surrogate:
    """A * logprob: its gradient is A times the gradient of the logprob. Shapes [N].

    Williams 1992, with the baseline in the advantage; RLOO (arXiv 2402.14740) and REINFORCE++ use it. Nothing
    is clipped: `importance` weights alone correct for policies other than the current one.
    """
    return unclipped(ratio.advantages_N * ratio.logprobs_N)
