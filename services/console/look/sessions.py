"""A session turn by turn: what the model said, what the environment answered, what each of them took.

A record has tokens by turn, and what was said as chat messages; it does not link them. A session without
forks says one message of the model for each turn. Where the numbers differ, because an agent program has
rewritten its history, messages are not given to turns: a guess would show the words of another turn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tidemill.common.data.image_columns import IMAGE_PARTS
from tidemill.common.wire.messages import Trajectory
from tidemill.common.wire.segments import Segment, Turn

PICTURE = "[picture]"
"""Stands for a picture in a message."""
Said = Mapping[str, Any]
"""A chat message."""


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn of a session, with what was said in it."""

    number: int
    """Counted from 0 over all segments."""
    segment: int
    """0, or the number of the fork that it belongs to."""
    turn: Turn
    versions: tuple[int, ...]
    """The versions that produced its tokens, in order."""
    num_trained: int
    """Number of its tokens that are trained, if its group is."""
    num_answer_tokens: int
    """Number of the environment's tokens until the next turn or the end of the segment."""
    said: Said | None = None
    """The model's message; None where it is not known."""
    answers: tuple[Said, ...] = ()
    """The environment's messages after it."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The turns of a session, and what was said that belongs to none of them."""

    turns: tuple[TurnRecord, ...]
    unplaced: tuple[Said, ...] = ()
    """Messages before the first turn, or all of them where they do not fit the turns."""


def read_session(trajectory: Trajectory) -> SessionRecord:
    """The session of a trajectory; a single turn has none."""
    if trajectory.session is None:
        return SessionRecord(())
    segments = enumerate(trajectory.segments)
    places = [(number, s, turn_index) for number, s in segments for turn_index in range(len(s.turns))]
    before, exchanges = _exchanges(trajectory.session.messages)
    if len(exchanges) != len(places):
        before = tuple(trajectory.session.messages)
        exchanges = [(None, ())] * len(places)
    turns = []
    for at, (location, exchange) in enumerate(zip(places, exchanges, strict=True)):
        turns.append(_record(at, *location, *exchange))
    return SessionRecord(tuple(turns), before)


def generation_s(trajectory: Trajectory) -> float | None:
    """Seconds from its first request to its last token; None where nothing was generated: for demonstrations,
    and for samples that failed before."""
    return trajectory.finished_at - trajectory.started_at if trajectory.started_at else None


def num_completion_tokens(trajectory: Trajectory) -> tuple[int, int]:
    """Completion tokens of all its segments: those that are trained, and those of the environment."""
    whole = sum(len(segment.completion_ids) for segment in trajectory.segments)
    trained = sum(int(np.count_nonzero(segment.mask)) for segment in trajectory.segments)
    return trained, whole - trained


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What a sample of several turns has beside what every sample has."""

    turns: tuple[Turn, ...]
    """Turns of all segments, in order."""
    num_forks: int
    num_environment_tokens: int
    """Completion tokens that are not trained."""
    end: str
    """`done`, or the limit that it reached, with what was late."""
    num_faults: int

    @property
    def engine_s(self) -> float:
        """Seconds that the engine took, over all turns."""
        return sum(turn.engine_s for turn in self.turns)

    @property
    def environment_s(self) -> float:
        """Seconds that the environment took, over all turns."""
        return sum(turn.environment_s for turn in self.turns)


def session_facts(trajectory: Trajectory) -> SessionFacts | None:
    """Numbers of a trajectory's session; None for a single turn."""
    session = trajectory.session
    if session is None:
        return None
    turns = tuple(turn for segment in trajectory.segments for turn in segment.turns)
    _, num_others = num_completion_tokens(trajectory)
    end = f"{session.end} ({LATE[session.late]})" if session.late else session.end
    return SessionFacts(turns, len(trajectory.forks), num_others, end, session.num_faults)


LATE = {
    "session": "the session was over its time",
    "call": "a call of the environment was late",
    "reward": "the environment's reward was late",
    "program": "the program was silent",
}


def calls_of(said: Said | None) -> list[tuple[str, str]]:
    """The calls of tools in a message of the model: names with their arguments as text."""
    calls = said.get("tool_calls") if said else None
    named_calls = []
    for call in calls if isinstance(calls, list | tuple) else ():
        function = call.get("function", call) if isinstance(call, Mapping) else call
        if isinstance(function, Mapping):
            named_calls.append((str(function.get("name", "?")), text_of(function.get("arguments", ""))))
        else:
            named_calls.append(("?", text_of(call)))
    return named_calls


def text_of(value: Any) -> str:
    """What a message says: text as it is, the parts of a list, where a mark stands for a picture, anything
    else as Python shows it."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list | tuple):
        return "\n".join(text_of(item) for item in value)
    if isinstance(value, Mapping) and isinstance(value.get("text"), str):
        return str(value["text"])
    if isinstance(value, Mapping) and value.get("type") in IMAGE_PARTS:
        return PICTURE
    return repr(value)


def _exchanges(
    messages: Sequence[Said],
) -> tuple[tuple[Said, ...], list[tuple[Said | None, tuple[Said, ...]]]]:
    """What was said before the model said anything, and each of its messages with what followed."""
    starts = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    ends = [*starts[1:], len(messages)] if starts else []
    return tuple(messages[: starts[0]] if starts else messages), [
        (messages[at], tuple(messages[at + 1 : end])) for at, end in zip(starts, ends, strict=True)
    ]


def _record(
    at: int, number: int, segment: Segment, turn_index: int, said: Said | None, answers: tuple[Said, ...]
) -> TurnRecord:
    turn = segment.turns[turn_index]
    is_last = turn_index + 1 == len(segment.turns)
    following = len(segment.completion_ids) if is_last else segment.turns[turn_index + 1].first
    lasts = [first for _, first in segment.spans[1:]] + [len(segment.completion_ids)]
    versions = [
        version
        for (version, first), last in zip(segment.spans, lasts, strict=True)
        if first < max(turn.end, turn.first + 1) and last > turn.first
    ]
    num_trained = int(np.count_nonzero(segment.mask[turn.first : turn.end]))
    return TurnRecord(at, number, turn, tuple(versions), num_trained, following - turn.end, said, answers)
