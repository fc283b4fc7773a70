"""Samples of another trainer, as they come over HTTP, and the trajectories that are made of them.

Imported by the process that reads large requests too.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from tidemill.common.data.dataset import PROMPT
from tidemill.common.data.image_columns import IMAGE_PART, IMAGE_PARTS, in_order
from tidemill.common.images.sources import ImageSource, parse_source
from tidemill.common.process.json_api import InputError
from tidemill.common.wire.codec import encode_payload, pack, schema_of
from tidemill.common.wire.images import PICTURES_FAULT, Image
from tidemill.common.wire.messages import Lane, Trajectory, TrajectoryKey
from tidemill.common.wire.segments import Session

if TYPE_CHECKING:
    from tidemill.common.config.images import ImagesConfig
    from tidemill.common.images.door import ImageDoor

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
    images: list[str | Annotated[int, Field(ge=0)]] = Field(
        default_factory=list,
        description="pictures of the prompt in the order of their places: data URLs in base64, or indices "
        "into the request's `images`; the service's config needs the section `images`",
    )
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
    images: list[str] = Field(
        default_factory=list, description="pictures that samples refer to: data URLs in base64, each once"
    )

    def sources(self) -> list[list[ImageSource]]:
        """The pictures of each sample, by the order of their places.

        Raises:
            InputError: an index is beyond the end of `images`.
        """
        shared = [_source_of(value) for value in self.images]
        return [_sources(sample, position, shared) for position, sample in enumerate(self.samples)]


def _sources(sample: SampleIn, position: int, shared: Sequence[ImageSource]) -> list[ImageSource]:
    column = []
    for value in sample.images:
        if isinstance(value, str):
            column.append(_source_of(value))
        elif value < len(shared):
            column.append(shared[value])
        else:
            raise InputError(
                f"samples[{position}].images names picture {value}, and the request has {len(shared)} images"
            )
    return list(in_order(_pictures_in_parts(sample.prompt), column))


def _pictures_in_parts(prompt: str | Chat) -> list[ImageSource | None]:
    """The picture of each part of a prompt that is one; None where it is in `images`."""
    sources: list[ImageSource | None] = []
    for message in prompt if isinstance(prompt, list) else []:
        for block in _parts_of(message):
            if block.get("type") in IMAGE_PARTS:
                held = block.get("image_url") or block.get("image") or block.get("url")
                sources.append(None if held is None else _source_of(held))
    return sources


def _parts_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def _source_of(value: Any) -> ImageSource:
    source = parse_source(value, Path())
    if source.path or source.url:
        # A path would be one of this machine, and a URL would be asked from inside of its network.
        return ImageSource(fault="it is an address; send the picture itself, as a data URL in base64")
    return source


@dataclass(frozen=True, slots=True)
class StoredPictures:
    """The pictures of a sample in the run's store; or `fault`: why it has none.

    Example: `images` one of 64 x 48 pixels. Of a sample with a damaged one only `fault` "its pictures: a
    picture in the data: it is empty".
    """

    images: tuple[Image, ...] = ()
    fault: str = ""


NO_PICTURES = StoredPictures()


def has_pictures(request: ScoringRequest) -> bool:
    """Whether a sample of the request has pictures."""
    return any(sample.images or _pictures_in_parts(sample.prompt) for sample in request.samples)


def store_pictures(
    request: ScoringRequest, door: "ImageDoor", config: "ImagesConfig"
) -> list[StoredPictures]:
    """Store the pictures of all samples.

    Raises:
        InputError: a sample names a picture that the request does not have.
        StorageError, StoreError: the store does not take one.
    """
    stored = []
    for sources in request.sources():
        if len(sources) > config.max_per_prompt:
            reason = f"{len(sources)}, more than images.max_per_prompt ({config.max_per_prompt})"
            stored.append(StoredPictures(fault=f"{PICTURES_FAULT}{reason}"))
            continue
        pictures = door.take(sources)
        faults = [picture.fault for picture in pictures if picture.fault]
        if faults:
            stored.append(StoredPictures(fault=f"{PICTURES_FAULT}{faults[0]}"))
            continue
        images = [picture.at(number, num_tokens=1) for number, picture in enumerate(pictures)]
        stored.append(StoredPictures(tuple(images)))
    return stored


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """A trajectory as it goes into its stream."""

    lane: Lane
    key: TrajectoryKey
    schema: bytes
    payload: bytes


class Batch:
    """The samples of one request; each group has its ticket, and so has each sample without a group."""

    def __init__(self, samples: Sequence[SampleIn], pictures: Sequence[StoredPictures] = ()) -> None:
        """`pictures` are those of each sample; none where no sample has any."""
        self.samples = samples
        self._pictures = pictures
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
        pictures = self._pictures[position] if self._pictures else NO_PICTURES
        trajectory = trajectory_of(sample, first_ticket + number, index, group_size, pictures)
        lane = Lane.EVAL if sample.evaluation else Lane.TRAIN
        return EncodedSample(lane, trajectory.key, schema_of(trajectory), encode_payload(trajectory))


def _messages_with_text(chat: Any) -> list[dict[str, Any]] | None:
    """The messages of a chat, each with its text; None where it is plain text."""
    return [_with_text(message) for message in chat] if isinstance(chat, list) else None


def trajectory_of(
    sample: SampleIn,
    ticket: int,
    index: int,
    group_size: int,
    pictures: StoredPictures = NO_PICTURES,
) -> Trajectory:
    ids = np.asarray(sample.completion_ids, dtype=np.int32)
    chat = _messages_with_places(sample.prompt) if pictures.images else _messages_with_text(sample.prompt)
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
        # A token for each picture: what the trainer's prompt is in tokens is not known here.
        prompt_ids=np.zeros(len(pictures.images), dtype=np.int32),
        images=pictures.images,
        fault=pictures.fault,
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


def _messages_with_places(chat: Any) -> list[dict[str, Any]] | None:
    """The messages of a chat with a part of type `image` for each picture; None where it is plain text."""
    return [_with_places(message) for message in chat] if isinstance(chat, list) else None


def _with_places(message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("content"), list):
        return {**message, "content": str(message.get("content") or "")}
    parts = []
    for block in _parts_of(message):
        if block.get("type") in IMAGE_PARTS:
            parts.append({"type": IMAGE_PART})
        else:
            parts.append({"type": "text", "text": str(block.get("text", ""))})
    return {**message, "content": parts}


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the text of its parts as content, where it has parts."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    texts = (str(block.get("text", "")) for block in parts if isinstance(block, dict))
    return {**message, "content": "".join(texts)}
