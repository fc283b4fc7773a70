"""Sessions as a rollout worker publishes them: turns of the model, answers of the environment, forks."""

from typing import Any

import numpy as np

from tests.support.samples import changed
from tests.support.trajectories import make_trajectory
from tidemill.common.wire.messages import Trajectory
from tidemill.common.wire.segments import Segment, Session
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.sessions.recorder import SegmentRecorder
from tidemill.services.trainer.groups.sample import Sample, make_sample, turn_ends

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
    remaining = iter(rewards)
    for number, ids in enumerate(parts):
        if number % 2:
            recorder.add_context(ids)
            continue
        logprobs = [logprob - 0.01 * position for position in range(len(ids))]
        recorder.add_turn(Generation(list(ids), logprobs, ((version + number // 2, 0),), "stop"))
        recorder.describe_last_turn(reward=next(remaining, None), num_calls=1, num_wrong_calls=number // 2)
    return recorder.segment()


def make_session(
    ticket: int = 0, index: int = 0, *segments: Segment, finish: str = "stop", **fields: Any
) -> Trajectory:
    """A session of these segments; `fields` are those of the Trajectory, and others of its `Session`."""
    if not segments:
        segments = (make_segment((1, 2, 3), (4, 5), (7, 8), (9,)),)
    first, *forks = segments
    own_fields = {name: fields.pop(name) for name in tuple(fields) if name in Trajectory.model_fields}
    session = Session(
        environment="tools", turns=first.turns, forks=tuple(forks), **({"messages": MESSAGES} | fields)
    )
    names = ("prompt_ids", "completion_ids", "logprobs", "loss_mask", "spans")
    values = {name: getattr(first, name) for name in names}
    return make_trajectory(ticket, index, finish=finish, session=session, **(values | own_fields))


def rows_by_hand(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    """The token ids of each row, and the places in it that are trained: straight from the wire."""
    rows = []
    for segment in trajectory.segments:
        ids = [*map(int, segment.prompt_ids), *map(int, segment.completion_ids)]
        num_prompt = len(segment.prompt_ids)
        trained = [num_prompt + int(position) for position in np.flatnonzero(segment.mask)]
        rows.append((ids, trained))
    return rows


def random_session(
    ticket: int, index: int, num_segments: int = 2, seed: int = 0, **fields: Any
) -> Trajectory:
    """A session with two turns and an answer of the environment in each segment, with rewards of turns; at
    most 20 tokens a segment, and rollout logprobs around -2.5."""
    rng = np.random.default_rng((seed, ticket, index))

    def ids(most: int) -> Ids:
        return tuple(int(token) for token in rng.integers(3, 32, rng.integers(1, most + 1)))

    segments = []
    for _ in range(num_segments):
        rewards = tuple(rng.normal(size=2).round(3).tolist())
        segment = make_segment(ids(6), ids(5), ids(4), ids(5), rewards=rewards, logprob=-2.5)
        segments.append(segment.model_copy(update={"spans": ((0, 0),)}))
    return make_session(ticket, index, *segments, **fields)


def session_samples(count: int, seed: int = 0) -> list[Sample]:
    """Samples of one to three segments with an advantage each."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(count):
        trajectory = random_session(i // 4 + 100, i % 4, i % 3 + 1, seed)
        turns = tuple(turn_ends(trajectory.segments, 0.0))
        sample = make_sample(trajectory)
        samples.append(
            changed(sample, turns=turns, advantage=float(rng.normal()), reward=float(rng.random()))
        )
    return samples


def played(single: Trajectory) -> Trajectory:
    """A session in place of a single turn, by the same version: an answer of the environment, another turn,
    and a second segment."""
    ids = tuple(single.completion_ids.tolist())
    first = (3, 4)
    (version, _) = single.spans[0]
    segments = [
        make_segment(prompt, ids, first, (*ids, 5), rewards=(0.25, None), logprob=-1.0)
        for prompt in (tuple(single.prompt_ids.tolist()), (7, 8, 9))
    ]
    fixed = [segment.model_copy(update={"spans": ((version, 0),)}) for segment in segments]
    kept = single.model_dump(include={"step", "group_size", "prompt_text", "ground_truth", "extra"})
    return make_session(single.ticket, single.index, *fixed, **kept)
