"""Sessions as a rollout worker publishes them: turns of the model, answers of the environment, forks."""

from typing import Any

import numpy as np

from common.wire.messages import Trajectory
from common.wire.segments import Segment, Session
from services.rollout.engines.engine import Generation
from services.rollout.sessions.recorder import SegmentRecorder
from tests.support.trajectories import make_trajectory

Ids = tuple[int, ...]

MESSAGES: tuple[dict[str, Any], ...] = (
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "add"}}]},
    {"role": "tool", "name": "add", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
)


def make_segment(
    prompt: Ids, *parts: Ids, version: int = 0, rewards: tuple[float | None, ...] = (), logprob: float = -3.0
) -> Segment:
    """Parts are the model's and the environment's in turn; `rewards` are those of the model's turns."""
    recorder = SegmentRecorder(prompt)
    given = iter(rewards)
    for number, ids in enumerate(parts):
        if number % 2:
            recorder.add_context(ids)
            continue
        logprobs = [logprob - 0.01 * place for place in range(len(ids))]
        recorder.add_turn(Generation(list(ids), logprobs, ((version + number // 2, 0),), "stop"))
        recorder.describe_last_turn(reward=next(given, None), num_calls=1, num_wrong_calls=number // 2)
    return recorder.segment()


def make_session(
    ticket: int = 0, index: int = 0, *segments: Segment, finish: str = "stop", **fields: Any
) -> Trajectory:
    """A session of these segments; `fields` are of its `Session`, and those of the same name of both."""
    first, *forks = segments or (make_segment((1, 2, 3), (4, 5), (7, 8), (9,)),)
    own = {name: fields.pop(name) for name in tuple(fields) if name in Trajectory.model_fields}
    session = Session(
        environment="tools", turns=first.turns, forks=tuple(forks), **({"messages": MESSAGES} | fields)
    )
    names = ("prompt_ids", "completion_ids", "logprobs", "loss_mask", "spans")
    values = {name: getattr(first, name) for name in names}
    return make_trajectory(ticket, index, finish=finish, session=session, **(values | own))


def rows_by_hand(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    """The token ids of each row, and the places in it that are trained: straight from the wire."""
    return [
        (
            [*map(int, segment.prompt_ids), *map(int, segment.completion_ids)],
            [len(segment.prompt_ids) + int(place) for place in np.flatnonzero(segment.mask)],
        )
        for segment in trajectory.segments
    ]
