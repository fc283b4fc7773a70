"""A teacher's part in the advantages of a sample."""

import numpy as np

from tidemill.common.config.algorithm_sections import TeacherTermConfig
from tidemill.common.config.algorithms.advantage import returns
from tidemill.common.wire.arrays import Float64
from tidemill.services.trainer.groups.sample import Sample


def log_ratios(sample: Sample) -> Float64:
    """log p_rollout - log p_teacher of the A trained tokens, which they were sampled by. Shape [A], float64.

    Their mean over tokens of the policy estimates KL(policy || teacher), the reverse KL.
    """
    teacher_T = sample.columns["teacher_logprobs"].astype(np.float64)
    gap_T: Float64 = sample.rollout_logprobs.astype(np.float64) - teacher_T
    return gap_T[sample.mask]


def add_teacher(sample: Sample, config: TeacherTermConfig) -> None:
    """Add to the advantage of each token what the sample's teacher says of it: weight * R_t.

    r_t = -clip(log p_rollout(x_t) - log p_teacher(x_t), -clip, clip) and R_t = r_t + gamma R_{t+1} over the
    trained tokens; gamma 0 looks at the token alone. The gradient of the expected r_t is that of the negative
    reverse KL of this token's distribution (GKD, arXiv 2306.13649, with the reverse KL and the policy's own
    samples alone; "On-policy distillation", Thinking Machines, 2025). It is added to the advantage as it is:
    no group's mean is subtracted from it, and it is not divided by a deviation.

    Rollout probabilities 0.5, 0.2, teacher's 0.25, 0.4, weight 2: gaps log 2, -log 2; -1.386, 1.386 is added;
    with gamma 0.5 -0.693, 1.386.
    """
    if not sample.teacher_weight or config.place != "reward":
        return
    rewards_A = -log_ratios(sample).clip(-config.clip, config.clip)
    advantages_T = sample.columns["advantages"].astype(np.float64)
    advantages_T[sample.mask] += sample.teacher_weight * returns(rewards_A, config.gamma)
    sample.set_advantage(advantages_T)
