"""Samples as rewards see them, from the little that a test says of one."""

from typing import Any

import numpy as np

from tests.support.trajectories import make_trajectory
from tidemill.common.wire.messages import Lane, TrajectoryKey
from tidemill.services.reward.sample import RewardSample


def make_sample(
    key: TrajectoryKey = (0, 0),
    is_evaluation: bool = False,
    data_source: str = "",
    solution_str: str = "",
    ground_truth: Any = None,
    extra_info: dict[str, Any] | None = None,
    prompt_text: str = "",
    prompt_ids: Any = (),
    completion_ids: Any = (),
    **fields: Any,
) -> RewardSample:
    """A single turn with these fields, by the names that reward functions know."""
    trajectory = make_trajectory(
        *key,
        solution_str,
        data_source=data_source,
        ground_truth=ground_truth,
        extra=extra_info or {},
        prompt_text=prompt_text,
        prompt_ids=np.array(prompt_ids, dtype=np.int32),
        completion_ids=np.array(completion_ids, dtype=np.int32),
        logprobs=np.zeros(len(completion_ids), dtype=np.float32),
        **fields,
    )
    return RewardSample(trajectory, Lane.EVAL if is_evaluation else Lane.TRAIN)
