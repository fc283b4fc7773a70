"""Recorded sessions: a model that asks a calculator, with every field of a turn given by hand."""

from typing import Any

import numpy as np

from tidemill.common.wire.messages import Trajectory
from tidemill.common.wire.segments import Segment, Session, Turn

QUESTION = "17 * 23"
RESULT = "391 exactly"
ANSWER = "The product is 391."
SECOND = "I said it before: 391."
MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "assistant", "content": "I ask the calculator.", "tool_calls": [{"id": "c0", "type": "function",
     "function": {"name": "calculator", "arguments": QUESTION}}]},
    {"role": "tool", "name": "calculator", "tool_call_id": "c0", "content": RESULT},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": "Say it again."},
    {"role": "assistant", "content": SECOND},
)  # fmt: skip
TURNS = (
    Turn(
        first=0, num_tokens=4, num_prompt_tokens=4, num_cached_tokens=0, num_calls=2, num_wrong_calls=1,
        engine_s=0.5, environment_s=0.25, reward=0.125,
    ),
    Turn(first=7, num_tokens=3, num_prompt_tokens=11, num_cached_tokens=8, engine_s=0.375),
)  # fmt: skip
FORK = Segment(
    prompt_ids=np.arange(6, dtype=np.int32),
    completion_ids=np.arange(50, 54, dtype=np.int32),
    logprobs=np.array([-0.25, -0.5, -0.75, 0.0], dtype=np.float32),
    loss_mask=np.array([True, True, True, False]),
    spans=((3, 0),),
    turns=(Turn(first=0, num_tokens=3, finish="length", num_prompt_tokens=6, engine_s=0.125),),
)
IS_MODELS = [1, 1, 1, 1, 0, 0, 0, 1, 1, 1]
"""Mask of the first segment: a turn of four tokens, three of the environment's, a turn of three."""


def as_session(trajectory: Trajectory, **fields: Any) -> Trajectory:
    """The same sample as a session of three turns, the last of them in a fork; truncated, after one fault."""
    session = {
        "environment": "tools", "turns": TURNS, "forks": (FORK,), "messages": MESSAGES, "end": "max_tokens",
        "reward": 0.75, "num_faults": 1, "metrics": {"right": 1.0}, "histories": {"clean": 2, "forked": 1},
    } | fields  # fmt: skip
    return trajectory.model_copy(
        update={
            "completion_ids": np.arange(10, 20, dtype=np.int32),
            "logprobs": np.array([-0.5] * 4 + [0.0] * 3 + [-0.25] * 3, dtype=np.float32),
            "loss_mask": np.array(IS_MODELS, dtype=np.bool_),
            "finish": "length" if session["end"] != "done" else "stop",
            "text": SECOND,
            "session": Session.model_validate(session),
        }
    )
