"""The six messages of a run. Streams hold nothing else.

Control fields are validated by pydantic; arrays are checked against each other for dtype and length.
Fields of a newer minor schema are ignored. Token ids travel end to end and are never re-tokenized;
`text` rides along for people and reward functions only.
"""

import math
import time
from collections.abc import Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, Literal, Self

import numpy as np
import xxhash
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from tidemill.common.wire.arrays import BitArray, Bits, Float32Array, Int32Array, is_same
from tidemill.common.wire.choices import WireRows, check_rows
from tidemill.common.wire.images import Image, check_images
from tidemill.common.wire.sampling import FILTERS, TokenFilters
from tidemill.common.wire.segments import Finish, Segment, Session, VersionSpan, check_tokens, check_turns

TrajectoryKey = tuple[int, int]
"""`(ticket, index)`: identifies one trajectory and its score everywhere downstream."""

FIRST_DEMONSTRATION = 10**9
"""First ticket number of demonstrations: the trainer publishes their trajectories itself, no stream has these
tickets, and they have no score. The number is this plus the place in the batches of the run."""


def is_demonstration(ticket: int) -> bool:
    return ticket >= FIRST_DEMONSTRATION


class Lane(StrEnum):
    """Training and evaluation have streams of their own; workers take evaluation first."""

    TRAIN = "train"
    EVAL = "eval"


class Message(BaseModel):
    """Base of all messages: frozen, compared by value, unknown fields ignored.

    Example: `Ticket`, with the `kind` "ticket" and its fields. Two tickets with equal arrays are equal.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", arbitrary_types_allowed=True)
    kind: ClassVar[str]
    changes_meaning: ClassVar[frozenset[str]] = frozenset()
    """Fields that, where set, change the meaning of others: a reader that does not know one must refuse."""

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        mine = self.__dict__
        theirs = other.__dict__
        return all(is_same(mine[name], theirs[name]) for name in type(self).model_fields)


class PromptFields(Message):
    """Fields of a prompt, from the dataset to the reward: shared by tickets and trajectories.

    Example: `prompt_ids` [32, 10, 32, 28], `prompt_text` "2+2=", `data_source` "arith", `ground_truth` "4",
    `extra` {"split": "train", "index": 7}.
    """

    prompt_ids: Int32Array
    """[P] ids of the prompt, the generation prompt of a chat template included."""
    data_source: str = ""
    ground_truth: Any = None
    extra: dict[str, Any] = Field(default_factory=dict)
    prompt_text: str = ""
    own_text: str = Field(
        "", description="the row's own text where `prompt_text` is more, such as a chat template's rendering"
    )
    source: str = Field("", description="the source of `data.train`, or the evaluation set, it is of")
    images: tuple[Image, ...] = Field(
        (),
        description="its pictures, and those of the session after it, by the order of their tokens",
        exclude_if=lambda images: not images,
    )


FIRST_FILTERS = ("top_p", "top_k")
"""Filters that are in every ticket. Older workers do not know the others, which are left out where they are
off."""


class SamplingParams(TokenFilters):
    """How completions are sampled. Logprobs are those of the distribution sampled from.

    Example: `max_tokens` 256, `temperature` 1.0, `top_p` 0.9: of the likeliest ids that have 90 % together.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    max_tokens: int = Field(ge=1)
    temperature: float = Field(1.0, ge=0.0)
    # Only for turns, never in a ticket: texts that an agent's client gives.
    stop: tuple[str, ...] = Field((), exclude_if=lambda texts: not texts)
    # Only for turns, too: number of rows of `routes` that are known, from the prompt's beginning.
    num_routed: int = Field(0, ge=0, exclude_if=lambda count: count == 0)

    @property
    def is_filtered(self) -> bool:
        """Whether tokens are sampled from some ids only."""
        return self.temperature > 0.0 and bool(self.filters_on)

    @model_serializer(mode="wrap")
    def _without_later_filters(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        for name, off in FILTERS.items():
            if name not in FIRST_FILTERS and fields.get(name) == off:
                del fields[name]
        return fields


Outcome = tuple[str, int, int, int]
"""Result of a group for its prompt: source, row, samples that solved it, and samples that have a reward."""


def outcome_of(values: Sequence[Any]) -> Outcome:
    """The outcome in these values of a checkpoint's JSON."""
    name, row, num_solved, num_scored = values
    return str(name), int(row), int(num_solved), int(num_scored)


class Ticket(PromptFields):
    """Permission to generate one group.

    Example: `ticket` 12, `step` 3, `min_version` 2, `group_size` 4, `row` 7: four completions of row 7, for
    step 3, by version 2 or a newer one. Its answer is four trajectories with the keys (12, 0) to (12, 3).
    """

    kind: ClassVar[str] = "ticket"
    changes_meaning: ClassVar[frozenset[str]] = frozenset({"images"})
    ticket: int = Field(ge=0)
    step: int = Field(ge=0, description="the step that is meant to train on the group")
    min_version: int = Field(ge=0, description="an engine older than this must not start the group")
    group_size: int = Field(ge=1, le=4096)
    sampling: SamplingParams
    row: int = Field(-1, description="row of the dataset")
    replaces: int = Field(-1, description="the ticket in whose place this one was issued")
    outcome: Outcome | None = Field(None, description="of the replaced group, where a curriculum wants it")
    issued_at: float = Field(default_factory=time.time)

    @model_validator(mode="after")
    def _check_images(self) -> Self:
        check_images(self.images, [len(self.prompt_ids)])
        return self


CLAIMS_FOLDER = "claims"
"""Name of the folder of payloads in the run's folder."""
NAMES_A_CLAIM = b"\xa5claim"
"""Bytes in the payload of every entry with a claim: others need not be decoded."""


class Claim(BaseModel):
    """Address of a payload that is too large for a stream.

    Example: `pointer` "12-3-" and the 32 digits of `digest`: sample 3 of ticket 12, in `claims` below the
    run's folder; `num_bytes` 180,000.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    pointer: str = Field(
        pattern=r"^((s3|gs|az|memory)://[^\s?#]+/)?[0-9]+-[0-9]+-[0-9a-f]{32}$",
        description="name below `claims` in the run's folder, or address in an object store",
    )
    num_bytes: int = Field(ge=0)
    digest: str = Field(pattern=r"^[0-9a-f]{32}$", description="xxh3-128 of the bytes")


class Choices(BaseModel):
    """What the engine chose beside the tokens of a sample. In streams there is only the claim; `rows` are
    there once they were read, and in archives that keep choices.

    Example: `rows` {"kept": a row for each completion token, "routes": a row for each token but the last}.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    claim: Claim | None = Field(None, description="to the rows; absent before they are checked in")
    rows: dict[str, WireRows] = Field(default_factory=dict, description="by name")


class ChoiceRows(Message):
    """The payload behind a claim to choices: the rows, and the tokens that they belong to.

    Example: `ticket` 12, `index` 3, the `tokens_digest` of that trajectory, `rows` as in `Choices`.
    """

    kind: ClassVar[str] = "choices"
    ticket: int = Field(ge=0)
    index: int = Field(ge=0)
    tokens_digest: str
    rows: dict[str, WireRows]


class Trajectory(PromptFields):
    """One sample of a group: a completion, or a whole session. G is `group_size`, T the number of tokens in
    the completion of its first segment, which is the only one of a single turn.

    Example: `ticket` 12, `index` 3 of `group_size` 4; `prompt_ids` of "2+2=", `completion_ids` of "4" and the
    end of the text (T = 2), `logprobs` [-0.2, -0.01], `spans` ((2, 0),): version 2 wrote both; `finish`
    "stop", `text` "4".
    """

    kind: ClassVar[str] = "trajectory"
    changes_meaning: ClassVar[frozenset[str]] = frozenset({"claim", "choices", "images"})
    ticket: int = Field(ge=0)
    index: int = Field(ge=0)
    step: int = Field(ge=0)
    group_size: int = Field(ge=1, le=4096)
    completion_ids: Int32Array
    """[T] ids of the first segment's completion."""
    logprobs: Float32Array
    """[T] of the distribution that the engine sampled from; 0.0 where the mask is 0."""
    loss_mask: BitArray | None = Field(None, description="which tokens are trained; absent means all")
    """[T], or None."""
    spans: tuple[VersionSpan, ...]
    finish: Finish = Field("stop", description="`length` where it is truncated: by a limit, not by itself")
    text: str = ""
    thought: str | None = Field(
        None, description="what the model thought, where `text` is its answer alone (`model.special_tokens`)"
    )
    worker: str = ""
    started_at: float = 0.0
    finished_at: float = 0.0
    session: Session | None = Field(None, description="absent for a single turn")
    is_greedy: bool = Field(False, description="not sampled: a baseline for the others, never trained")
    claim: Claim | None = Field(None, description="to everything else but the key, where that is too large")
    choices: Choices | None = Field(None, description="absent where tokens are all that the engine chose")
    fault: str = Field(
        "",
        description="why it is not scored: its environment failed, what it claims cannot be had, or the "
        "engine gave logprobs or routes that cannot be right",
    )

    @property
    def key(self) -> TrajectoryKey:
        return self.ticket, self.index

    @property
    def num_tokens(self) -> int:
        """T, the number of completion tokens of the first segment."""
        return len(self.completion_ids)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All rows to train on; a single turn is one."""
        first = Segment.model_construct(
            prompt_ids=self.prompt_ids,
            completion_ids=self.completion_ids,
            logprobs=self.logprobs,
            loss_mask=self.loss_mask,
            spans=self.spans,
            turns=self.session.turns if self.session else (),
        )
        return (first, *self.forks)

    @property
    def token_rows(self) -> "tuple[Trajectory | Segment, ...]":
        """Its segments where only their tokens are asked for. The first is the trajectory itself, which has
        the fields of its first segment, so that nothing is built for it."""
        return (self, *self.forks)

    @property
    def forks(self) -> tuple[Segment, ...]:
        """The segments after the first one."""
        return self.session.forks if self.session else ()

    @cached_property
    def mask(self) -> Bits:
        """The loss mask with its default filled in. Shape [T], bool."""
        return np.ones(self.num_tokens, dtype=np.bool_) if self.loss_mask is None else self.loss_mask

    @property
    def min_version(self) -> int:
        """The oldest version that produced a token of this trajectory."""
        return min(self._versions)

    @property
    def max_version(self) -> int:
        """The newest version that produced a token of this trajectory."""
        return max(self._versions)

    @property
    def _versions(self) -> list[int]:
        if self.session is None and len(self.spans) == 1:  # nearly always; asked for several times
            return [self.spans[0][0]]
        versions = [version for version, _ in self.spans]
        for fork in self.forks:
            versions += [version for version, _ in fork.spans]
        return versions

    @cached_property
    def tokens_digest(self) -> str:
        """Digest of the tokens of all segments and of the pictures: a score belongs to exactly these. Empty
        where a claim stands for them."""
        if self.claim is not None:
            return ""
        digest = xxhash.xxh3_64()
        for row in self.token_rows:
            for ids in (row.prompt_ids, row.completion_ids):
                digest.update(len(ids).to_bytes(8, "little"))
                digest.update(np.ascontiguousarray(ids).data)
        for image in self.images:
            digest.update(image.digest.encode())
        return digest.hexdigest()

    @property
    def prompt_images(self) -> tuple[Image, ...]:
        """The row's pictures, as rewards get them; of a session `images` has later ones, too."""
        if self.session is not None and self.session.row_images is not None:
            return self.session.row_images
        num_prompt = len(self.prompt_ids)
        return tuple(image for image in self.images if not image.segment and image.first < num_prompt)

    @property
    def claims(self) -> list[Claim]:
        both = (self.claim, self.choices.claim if self.choices else None)
        return [claim for claim in both if claim is not None]

    @property
    def lacks_choices(self) -> bool:
        """Whether it has choices whose rows were not read."""
        return self.choices is not None and not self.choices.rows

    def token_versions(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The version that produced each completion token, over all segments, int32. Tokens that no version
        produced have the version of those before them."""
        of_segments = []
        for row in self.token_rows:
            lengths = np.diff([*(first for _, first in row.spans), len(row.completion_ids)])
            of_segments.append(np.repeat([version for version, _ in row.spans], lengths))
        versions: np.ndarray[Any, np.dtype[np.int32]] = np.concatenate(of_segments).astype(np.int32)
        return versions

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.claim is None:
            check_tokens(self.completion_ids, self.logprobs, self.loss_mask, self.spans)
            if self.images:
                check_images(self.images, [segment.num_tokens for segment in self.segments])
            if self.choices is not None:
                check_rows(self.choices.rows, self.segments)
        if self.session is not None:
            check_turns(self.session.turns, len(self.completion_ids))
        if self.index >= self.group_size:
            raise ValueError(f"index {self.index} is outside a group of {self.group_size}")
        return self


LOGPROBS_FAULT = "its logprobs "
"""How the reason begins, if a sample has failed because of its logprobs."""


def fault_of(sample: Trajectory) -> str:
    """Why the sample has failed, whatever its score: its environment failed, or its payload cannot be read.
    Empty for others."""
    if sample.claim is None:
        return sample.fault
    return sample.fault or "its payload lies in the run's folder, which was not looked into"


class ScoreStatus(StrEnum):
    """Only `ok` has a value; a failure is never a silent zero."""

    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"


OnFailure = Literal["", "drop_sample", "drop_group"]
"""What a failed score asks for; empty leaves it to the run's `reward.on_failure`."""


Try = tuple[str, float, float, str]
"""One attempt at a reward: its name, how long it took and how long we paused before, in seconds, and why it
failed; empty where it did not."""


class Score(Message):
    """The reward of one trajectory.

    Example: `ticket` 12, `index` 3, `status` ok, `value` 0.9, `components` {"exact": 1.0, "format": 0.8} of
    the two rewards that the value sums up, `attempts` 1. A failed one: `status` timeout, `value` None,
    `error` why.
    """

    kind: ClassVar[str] = "score"
    ticket: int = Field(ge=0)
    index: int = Field(ge=0)
    status: ScoreStatus
    value: float | None = None
    components: dict[str, float | None] = Field(default_factory=dict)
    detail: dict[str, Any] = Field(default_factory=dict)
    error: str = ""
    is_code_error: bool = Field(
        False,
        description="failed by the user's own code or data, not by a server, a limit of rate or the machine",
    )
    on_failure: OnFailure = ""
    attempts: int = Field(1, ge=1)
    tries: tuple[Try, ...] = Field((), description="all attempts of the rewards that needed several")
    worker: str = ""
    latency_s: float = Field(0.0, ge=0.0)
    scored_at: float = Field(default_factory=time.time)
    teacher_logprobs: Float32Array | None = Field(
        None, description="of the tokens that the model sampled, over all segments; absent without a teacher"
    )
    """[number of tokens with mask 1 in all segments], or None."""
    tokens_digest: str = Field(
        "", max_length=16, description="the trajectory's; absent of older releases, and without its payload"
    )

    @property
    def key(self) -> TrajectoryKey:
        return self.ticket, self.index

    def is_of(self, tokens_digest: str) -> bool:
        """Whether it can be the reward of these tokens: after a loss of Redis, a key may get other tokens."""
        return not self.tokens_digest or not tokens_digest or self.tokens_digest == tokens_digest

    @model_validator(mode="after")
    def _check_value(self) -> Self:
        if (self.status is ScoreStatus.OK) != (self.value is not None):
            raise ValueError(f"a score with status {self.status} cannot have value {self.value}")
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError(f"a score must be finite, got {self.value}")
        if self.teacher_logprobs is not None and not np.isfinite(self.teacher_logprobs).all():
            raise ValueError("a teacher's logprobs must be finite")
        return self


class WeightFile(BaseModel):
    """One file of a version, relative to the version's folder.

    Example: `name` "model-00001-of-00002.safetensors", `num_bytes` 4,976,698,672, `checksum` xxh3-128 of its
    bytes.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")
    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=200)
    num_bytes: int = Field(ge=0)
    checksum: str = Field(pattern=r"^[0-9a-f]{32}$")


DELTA_ENCODING = "delta-2"
"""Name, in manifests, of the format of deltas that this release writes and reads (`weights/delta.py`)."""


class WeightManifest(Message):
    """A version whose bytes are complete, checked, and ready to load.

    Example: a delta: `version` 8, `folder` "v00000008", `parent` 7, `base` 5: full weights of version 5, and
    the deltas 6, 7 and 8 on top of them; `share_changed` 0.02. A full one has `parent` and `base` -1.
    """

    kind: ClassVar[str] = "weights"
    version: int = Field(ge=0)
    folder: str = Field(pattern=r"^v[0-9]{8}$", description="below the run's `weights` folder")
    files: tuple[WeightFile, ...]
    digest: str = Field(
        pattern=r"^(w1:)?[0-9a-f]{32}$", description="of these weights, or as an older release had it"
    )
    announced_at: float = Field(default_factory=time.time)
    term: int = Field(
        0, ge=0, description="which trainer process of the run announced it: each has a greater number"
    )
    encoding: str = Field("full", max_length=40, description="`full`, or the format of a delta")
    parent: int = Field(-1, ge=-1, description="the version that a delta changes; -1 of a full one")
    parent_digest: str = Field("", pattern=r"^((w1:)?[0-9a-f]{32})?$", description="the parent's")
    base: int = Field(-1, ge=-1, description="the full version that the delta's chain begins with")
    share_changed: float = Field(-1.0, ge=-1.0, le=1.0, description="of the elements; -1 where not measured")
    chain_bytes: int = Field(0, ge=0, description="of all deltas since the base, this one's too")
    full_bytes: int = Field(0, ge=0, description="of the same version in full; known of deltas")
    encode_s: float = Field(0.0, ge=0.0, description="what encoding and writing took, beside training")

    @property
    def is_delta(self) -> bool:
        """Whether it has only the changes to another version."""
        return self.encoding != "full"

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @model_validator(mode="after")
    def _check_chain(self) -> Self:
        is_chained = 0 <= self.base <= self.parent < self.version and self.parent_digest
        if self.is_delta and not is_chained:
            raise ValueError(
                f"version {self.version} in {self.encoding} needs a base and a parent below it, got base "
                f"{self.base} and parent {self.parent}"
            )
        return self


class Commit(Message):
    """The durable record of one step: what was trained, in what micro-batches, with what result.

    Example: `step` 3, `version` 4, `groups` (12,), `mini_batches` ((((12, 0), (12, 1)), ((12, 3),)),): one
    optimizer update of two micro-batches, without sample 2, whose reward failed: `dropped` ((12, 2,
    "timeout"),); `advantages` {"12": [0.7, -0.7, 0.0]}, in the order of the trained samples.
    """

    kind: ClassVar[str] = "commit"
    step: int = Field(ge=0)
    version: int = Field(ge=1, description="the version this step produced: step + 1")
    mini_batches: tuple[tuple[tuple[TrajectoryKey, ...], ...], ...] = Field(
        description="per optimizer update, per micro-batch: the trajectories, in order"
    )
    passes: int = Field(1, ge=1, description="how often the step went over these mini-batches")
    groups: tuple[int, ...] = Field(description="tickets trained, in the order in which they entered")
    dropped: tuple[tuple[int, int, str], ...] = Field(
        (), description="(ticket, index, reason) of trajectories left out; index -1 is the whole group"
    )
    advantages: dict[str, list[float]] = Field(default_factory=dict, description="ticket -> per trajectory")
    outcomes: tuple[Outcome, ...] = Field((), description="what a curriculum learns from the step's groups")
    sizes: dict[str, int] = Field(
        default_factory=dict, description="ticket -> samples of its group, where not `trainer.group_size`"
    )
    metrics: dict[str, float] = Field(default_factory=dict)
    digest: str = ""
    processor: str = Field(
        "", description="name and digest of the image processor; empty where no picture is trained"
    )
    samples_digest: str = Field(
        "", max_length=16, description="of tokens and rewards trained; absent of older releases"
    )
    started_at: float = 0.0
    finished_at: float = 0.0

    @property
    def trained_keys(self) -> list[TrajectoryKey]:
        """Every trajectory this step trained on, once per optimizer update of a pass that used it."""
        return [key for mini in self.mini_batches for micro in mini for key in micro]


class DeadLetter(Message):
    """A message that could not be processed: its original bytes, and why.

    Example: `origin` "trajectories", `entry_id` "1727000000000-0", `fields` {"v": b"1", "p": its payload},
    `error` "given up after 5 deliveries", `attempts` 5, `ticket` 12, `index` 3.
    """

    kind: ClassVar[str] = "dead"
    origin: str = Field(description="the stream it came from, without the run's prefix")
    entry_id: str
    fields: dict[str, bytes] = Field(default_factory=dict)
    error: str
    attempts: int = Field(1, ge=0)
    ticket: int = Field(-1, description="-1 where the message could not be decoded")
    index: int = -1
    worker: str = ""
    died_at: float = Field(default_factory=time.time)
