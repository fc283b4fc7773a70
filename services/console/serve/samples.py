"""Samples of another trainer, as they come over HTTP, and the trajectories that are made of them.

Imported by the process that reads large requests too.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from tidemill.common.data.dataset import PROMPT
from tidemill.common.wire.codec import encode_payload, pack, schema_of
from tidemill.common.wire.messages import Lane, Trajectory, TrajectoryKey
from tidemill.common.wire.segments import Session

Chat = list[dict[str, Any]]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class SampleIn(BaseModel):
    """One completion to score; prompt and completion are text, or chat messages."""

    model_config = ConfigDict(extra="forbid")
    completion: str | Chat
    prompt: str | Chat = ""
    ground_truth: Any = None
    data_source: str = ""
    extra_info: dict[str, Any] = Field(default_factory=dict, description="the row's further columns")
    completion_ids: list[TokenId] = Field(default_factory=list, description="for rewards that read token ids")
    group: str | int | None = Field(
        None, description="samples of a request with the same one are a group; without it each is its own"
    )
    step: int = Field(0, ge=0, description="of the trainer, for records")
    evaluation: bool = Field(False, description="scored before training, by the rewards of that lane")

    @field_validator("completion", "prompt", "ground_truth", "extra_info")
    @classmethod
    def _can_be_sent(cls, value: Any) -> Any:
        try:
            pack(value)
        except (OverflowError, ValueError) as error:
            raise ValueError(f"write numbers of more than 64 bits as text, and nest less: {error}") from None
        return value


class ScoringRequest(BaseModel):
    """Samples to score."""

    samples: list[SampleIn] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """A trajectory as it goes into its stream."""

    lane: Lane
    key: TrajectoryKey
    schema: bytes
    payload: bytes


class Batch:
    """The samples of one request; each group has its ticket, and so has each sample without a group."""

    def __init__(self, samples: Sequence[SampleIn]) -> None:
        self.samples = samples
        groups: dict[Any, list[int]] = {}
        for position, sample in enumerate(samples):
            name = (position,) if sample.group is None else sample.group
            groups.setdefault((name, sample.evaluation), []).append(position)
        self.num_groups = len(groups)
        self._places: dict[int, tuple[int, int, int]] = {}
        """By position in the request: number of the group, index in it, and its size."""
        for number, positions in enumerate(groups.values()):
            for index, position in enumerate(positions):
                self._places[position] = (number, index, len(positions))

    def encoded(self, first_ticket: int, position: int) -> EncodedSample:
        """The sample at a position, as a trajectory; its groups have the tickets from `first_ticket` on."""
        number, index, group_size = self._places[position]
        sample = self.samples[position]
        trajectory = trajectory_of(sample, first_ticket + number, index, group_size)
        lane = Lane.EVAL if sample.evaluation else Lane.TRAIN
        return EncodedSample(lane, trajectory.key, schema_of(trajectory), encode_payload(trajectory))


def _messages_with_text(chat: Any) -> list[dict[str, Any]] | None:
    """The messages of a chat, each with its text; None where it is plain text."""
    return [_with_text(message) for message in chat] if isinstance(chat, list) else None


def trajectory_of(sample: SampleIn, ticket: int, index: int, group_size: int) -> Trajectory:
    ids = np.asarray(sample.completion_ids, dtype=np.int32)
    chat = _messages_with_text(sample.prompt)
    said = _messages_with_text(sample.completion)
    answers = [
        str(message.get("content") or "") for message in said or () if message.get("role") == "assistant"
    ]
    if said is None:
        text = str(sample.completion)
    else:
        text = answers[-1] if answers else ""
    thoughts = [message["reasoning_content"] for message in said or () if "reasoning_content" in message]
    prompt = "" if chat is not None else str(sample.prompt)
    now = time.time()
    return Trajectory(
        ticket=ticket,
        index=index,
        step=sample.step,
        group_size=group_size,
        data_source=sample.data_source,
        ground_truth=sample.ground_truth,
        extra=sample.extra_info | ({PROMPT: chat} if chat is not None else {}),
        prompt_text=prompt,
        own_text=prompt,
        prompt_ids=np.empty(0, dtype=np.int32),
        completion_ids=ids,
        logprobs=np.zeros(len(ids), dtype=np.float32),
        spans=((0, 0),),
        text=text,
        thought=str(thoughts[-1] or "") if thoughts else None,
        worker="serve-rewards",
        started_at=now,
        finished_at=now,
        # More than one message is a session: calls of tools and their results.
        session=Session(environment="", messages=tuple(said)) if said is not None and len(said) > 1 else None,
    )


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the text of its parts as content, where it has parts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    texts = (str(block.get("text", "")) for block in parts if isinstance(block, dict))
    return {**message, "content": "".join(texts)}
