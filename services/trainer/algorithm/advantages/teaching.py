"""On-policy distillation: the reverse KL to a teacher as a reward for each token."""

from dataclasses import replace

import numpy as np

from tidemill.common.config.algorithm_sections import TeacherTermConfig
from tidemill.services.trainer.algorithm.advantages.episode import Float64s
from tidemill.services.trainer.algorithm.advantages.estimators import returns
from tidemill.services.trainer.groups.samples import Sample, Teaching


def log_ratios(sample: Sample, teaching: Teaching) -> Float64s:
    """log p_rollout - log p_teacher of the A trained tokens, which they were sampled by. Shape [A], float64.

    Their mean over tokens of the policy estimates KL(policy || teacher), the reverse KL.
    """
    gap_T = sample.rollout_logprobs.astype(np.float64) - teaching.logprobs.astype(np.float64)
    return gap_T[sample.mask]


def with_teacher(sample: Sample, config: TeacherTermConfig) -> Sample:
    """The sample with what its teacher adds to the advantage of each token: weight * R_t.

    r_t = -clip(log p_rollout(x_t) - log p_teacher(x_t), -clip, clip) and R_t = r_t + gamma R_{t+1} over the
    trained tokens; gamma 0 looks at the token alone. The gradient of the expected r_t is that of the negative
    reverse KL of this token's distribution (GKD, arXiv 2306.13649, with the reverse KL and the policy's own
    samples alone; "On-policy distillation", Thinking Machines, 2025). It stands beside what rewards say: no
    group's mean is taken off it, and nothing is divided by a deviation.

    Rollout probabilities 0.5, 0.2, teacher's 0.25, 0.4, weight 2: gaps log 2, -log 2; -1.386, 1.386 is added;
    with gamma 0.5 -0.693, 1.386.
    """
    teaching = sample.teaching
    if teaching is None or not teaching.weight or config.place != "reward":
        return sample
    rewards_A = -log_ratios(sample, teaching).clip(-config.clip, config.clip)
    # A copy: a broadcast number has one place in memory, and the sample's own array must stay as it is.
    advantage_T = np.broadcast_to(np.asarray(sample.advantage, np.float64), sample.mask.shape).copy()
    advantage_T[sample.mask] += teaching.weight * returns(rewards_A, config.gamma)
    return replace(sample, advantage=advantage_T)
