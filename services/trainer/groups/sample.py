"""One trajectory as the trainer sees it: made once, when it has arrived, and filled until it is trained.

A session is one sample, however many segments it has: arrays of its tokens are those of its segments end to
end, so that all of them share its advantage, and whatever counts sequences counts sessions. Only the forward
pass sees the segments, each as a row of its own (`policy/packing.py`).

The arrays of a sample fit each other, its numbers are finite, and its prompt is not empty (the last prompt
token predicts the first completion token). A sample that breaks this is never made, so later code need not
look for NaN.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tidemill.common.wire.arrays import Bits, Float32, Float64, Int32
from tidemill.common.wire.choices import KEPT, Rows
from tidemill.common.wire.images import Image, check_images, images_of
from tidemill.common.wire.messages import Trajectory, TrajectoryKey, fault_of
from tidemill.common.wire.segments import Segment
from tidemill.services.trainer.groups.columns import SampleColumns, Values

if TYPE_CHECKING:
    from tidemill.services.trainer.groups.choices import Routes

Kind = TypeVar("Kind", bound=np.generic)


class SegmentTokens(NamedTuple):
    """A segment of a sample: its own prompt, and how many of the sample's completion tokens belong to it.

    Example: `prompt_ids` [7, 8], `num_completion` 2.
    """

    prompt_ids: Int32
    """[P]."""
    num_completion: int


class TurnEnd(NamedTuple):
    """A turn of a session: the completion token after its last one, and its share of the sample's reward.

    Example: turns with the ends 3 and 5: tokens 0 to 2 are the first turn's, 3 and 4 the second's.
    """

    end: int
    reward: float


@dataclass(slots=True, eq=False)
class Sample:
    """T completion tokens, of which those with `mask` are trained: never those of an environment.

    A completion may be empty (T = 0) or masked entirely: it has no gradient, but counts as a sequence. A
    session of two segments, with a prompt of two tokens each:

        segments        [1 2] + 3 tokens     [7 8] + 2 tokens
        completion_ids  4 5 6                9 3
        mask            1 0 1                1 1              (5 is the environment's)
        columns         {"rollout_logprobs": [-.5 0 -.1 -.2 -.9], "advantages": [.7 .7 .7 .7 .7]}

    Raises:
        ValueError: lengths differ, a prompt is empty, or a number is not finite.
    """

    key: TrajectoryKey
    segments: tuple[SegmentTokens, ...]
    """At least one, in order: rows that the model has to see."""
    completion_ids: Int32
    """[T], of all segments end to end."""
    mask: Bits
    """[T]; `set_mask` changes it."""
    columns: SampleColumns
    """[T] each, by the names of `columns.COLUMNS`; `fill` adds one, and `set_advantage` the advantages."""
    reward: float = 0.0
    """The score of the reward service; `GroupFilter` sets it, and refuses one that is not finite."""
    shaped_reward: float = 0.0
    """The reward less penalties, from which advantages are computed."""
    advantage: float | None = 0.0
    """The number that fills the column `advantages`; None where each token has its own. 0 while there is no
    such column: before `set_advantage`, and for demonstrations."""
    turns: tuple[TurnEnd, ...] = ()
    """Turns of a session, in order; empty for a single turn."""
    routes: "tuple[Routes, ...]" = ()
    """Routes of each segment; empty where none were recorded."""
    kept: Rows | None = None
    """[T], the ids that each token was sampled from; an empty row: from all."""
    images: tuple[Image, ...] = ()
    """Pictures of the segments, by the order of their tokens."""
    teacher: str = ""
    """The teacher of its data source."""
    teacher_weight: float = 0.0
    """Weight of the teacher's term in the loss; 0 only measures it."""
    imitation: float = 0.0
    """For a demonstration, the weight of its tokens' -logprob, which is their whole loss; else 0."""
    group_size: int = 1
    """Trained samples of its group, itself among them; filled in where `normalisation: prompt` needs it."""
    group_trained: int = 0
    """Tokens in these samples that carry loss."""
    num_tokens: int = field(init=False)
    """Prompts plus completions, of all its rows."""
    num_trained: int = field(init=False)
    """Completion tokens that carry loss."""
    _rows: tuple[Int32, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        num_tokens = len(self.completion_ids)
        if {len(self.mask), *map(len, self.columns.values())} != {num_tokens}:
            lengths = {name: len(values_T) for name, values_T in self.columns.items()}
            raise ValueError(
                f"trajectory {self.key}: {num_tokens} completion ids, columns of {lengths} and a mask of "
                f"{len(self.mask)} must have one length"
            )
        num_prompt = 0
        num_completion = 0
        for segment in self.segments:
            if not len(segment.prompt_ids):
                raise ValueError(
                    f"trajectory {self.key}: the prompt is empty, nothing predicts the first token"
                )
            num_prompt += len(segment.prompt_ids)
            num_completion += segment.num_completion
        if num_completion != num_tokens:
            raise ValueError(
                f"trajectory {self.key}: its segments do not have {num_tokens} completion tokens"
            )
        if self.images:
            self._check_images()
        if self.routes:
            self._check_routes()
        if self.kept is not None and len(self.kept) != num_tokens:
            raise ValueError(f"trajectory {self.key}: {len(self.kept)} sampling masks, not {num_tokens}")
        if not np.isfinite(self.columns["rollout_logprobs"]).all():
            raise ValueError(f"trajectory {self.key}: rollout logprobs must be finite")
        self.num_tokens = num_prompt + num_tokens
        self.num_trained = int(np.count_nonzero(self.mask))

    def _check_images(self) -> None:
        check_images(
            self.images, [len(segment.prompt_ids) + segment.num_completion for segment in self.segments]
        )

    def _check_routes(self) -> None:
        expected = [len(segment.prompt_ids) + segment.num_completion - 1 for segment in self.segments]
        lengths = [len(of_segment.experts) for of_segment in self.routes]
        if lengths != expected:
            raise ValueError(f"trajectory {self.key}: routes of {lengths} tokens, expected {expected}")

    @property
    def prompt_ids(self) -> Int32:
        """The prompt of the first segment, which is the only one of a single turn."""
        return self.segments[0].prompt_ids

    @property
    def rollout_logprobs(self) -> Values:
        """[T]."""
        return self.columns["rollout_logprobs"]

    @property
    def rows(self) -> tuple[Int32, ...]:
        """Prompt and completion of each segment, end to end; joined once."""
        if not self._rows:
            rows = []
            start = 0
            for prompt_ids, num_completion in self.segments:
                rows.append(np.concatenate([prompt_ids, self.completion_ids[start : start + num_completion]]))
                start += num_completion
            self._rows = tuple(rows)
        return self._rows

    @property
    def text_mask(self) -> Bits:
        """Which completion tokens are text, of the model or of an environment: a token that stands for a part
        of a picture has no probability. Shape [T]."""
        is_text = np.ones(len(self.completion_ids), dtype=np.bool_)
        start = 0
        for number, segment in enumerate(self.segments):
            first = start - len(segment.prompt_ids)
            for image in images_of(self.images, number):
                is_text[max(start, first + image.first) : max(start, first + image.end)] = False
            start += segment.num_completion
        return is_text

    def fill(self, name: str, values_T: Values) -> None:
        """Add a column, or replace it; not the advantages, which `set_advantage` writes.

        Raises:
            ValueError: it does not have T numbers.
        """
        assert name != "advantages", "`set_advantage` keeps `advantage` and its column alike"
        self._check_length(name, values_T)
        self.columns[name] = values_T

    def _check_length(self, name: str, values_T: Values) -> None:
        if values_T.shape != self.mask.shape:
            raise ValueError(
                f"trajectory {self.key}: {name} of shape {values_T.shape}, not {self.mask.shape}"
            )

    def set_mask(self, mask: Bits) -> None:
        """Say which tokens carry loss."""
        self.mask = mask
        self.num_trained = int(np.count_nonzero(mask))

    def set_advantage(self, value: float | Float64) -> None:
        """Fill the column `advantages` with one number for all tokens, or with one for each, [T].

        Raises:
            ValueError: a number is not finite, or there are not T of them; the sample is as it was.
        """
        is_finite = np.isfinite(value).all() if isinstance(value, np.ndarray) else math.isfinite(value)
        if not is_finite:
            raise ValueError(
                f"trajectory {self.key}: reward {self.reward} and advantage {value} must be finite"
            )
        if isinstance(value, np.ndarray):
            self._check_length("advantages", value)
            self.columns["advantages"] = value
            self.advantage = None
        else:
            self.columns["advantages"] = np.full(len(self.mask), value)
            self.advantage = value

    @property
    def turn_A(self) -> NDArray[np.int64]:
        """The number of the turn that each trained token belongs to. Shape [A]; a single turn is turn 0."""
        ends = [turn.end for turn in self.turns]
        # To the right: the token at an end is the first of the next turn.
        return np.searchsorted(ends, np.flatnonzero(self.mask), side="right").astype(np.int64)

    @property
    def has_turn_rewards(self) -> bool:
        return any(turn.reward for turn in self.turns)

    def spread(self, values_A: Float64) -> Float64:
        """Numbers of trained tokens at their places in the completion, 0 at the others. Shape [T]."""
        values_T = np.zeros(len(self.completion_ids))
        values_T[self.mask] = values_A
        return values_T

    @property
    def mean_advantage(self) -> float:
        """The advantage; where each token has its own, the mean over the trained tokens (0 without any)."""
        if self.advantage is not None:
            return float(self.advantage)
        return float(self.columns["advantages"][self.mask].mean()) if self.num_trained else 0.0


def make_sample(trajectory: Trajectory) -> Sample:
    """A trajectory as a sample, still without its reward and its turns, which `GroupFilter` sets.

    Raises:
        ValueError: a logprob is not finite, a prompt is empty, or a picture of it cannot be had.
    """
    fault = fault_of(trajectory)
    if trajectory.images and fault:
        raise ValueError(f"trajectory {trajectory.key}: {fault}")
    rows = trajectory.token_rows
    choices = trajectory.choices
    routes: tuple[Routes, ...] = ()
    if choices is not None:
        from tidemill.services.trainer.groups.choices import routes_of

        routes = tuple(routes_of(trajectory))
    return Sample(
        key=trajectory.key,
        segments=tuple([SegmentTokens(row.prompt_ids, len(row.completion_ids)) for row in rows]),
        completion_ids=_joined([row.completion_ids for row in rows]),
        mask=_joined([row.mask for row in rows]),
        columns={"rollout_logprobs": _joined([row.logprobs for row in rows])},
        routes=routes,
        kept=choices.rows.get(KEPT) if choices is not None else None,
        images=trajectory.images,
    )


def has_masks(trajectory: Trajectory) -> bool:
    """Whether its engine recorded sampling masks; a mixture of experts may have routes alone."""
    return trajectory.choices is not None and KEPT in trajectory.choices.rows


def fill_teacher(
    sample: Sample, sampled_mask: Bits, teacher: str, logprobs_A: Float32, weight: float
) -> None:
    """Fill in a teacher's logprobs of the A sampled tokens, those of `sampled_mask` [T], of which the sample
    may train fewer.

    Raises:
        ValueError: there are not A of them, so they belong to other tokens.
    """
    num_sampled = int(np.count_nonzero(sampled_mask))
    if len(logprobs_A) != num_sampled:
        raise ValueError(
            f"trajectory {sample.key}: teacher {teacher} has {len(logprobs_A)} logprobs for "
            f"{num_sampled} sampled tokens"
        )
    logprobs_T = np.zeros(len(sample.completion_ids), dtype=np.float32)
    logprobs_T[sampled_mask] = logprobs_A
    sample.teacher = teacher
    sample.teacher_weight = weight
    sample.fill("teacher_logprobs", logprobs_T)


def num_sampled(trajectory: Trajectory) -> int:
    """Completion tokens that the model sampled, in all segments: a completion's length, in every metric."""
    count = 0
    for row in trajectory.token_rows:
        is_whole = row.loss_mask is None
        count += len(row.completion_ids) if is_whole else int(np.count_nonzero(row.mask))
    return count


def sampled_mask(trajectory: Trajectory) -> Bits:
    """Which completion tokens the model sampled, over all segments. Shape [T]."""
    return _joined([row.mask for row in trajectory.token_rows])


def mask_of_whole_turns(trajectory: Trajectory) -> Bits:
    """The sample's mask without turns that a limit has cut: a session that ends well may have such turns of a
    sub-agent. Shape [T]."""
    # Copies: the record keeps its own masks, by which metrics count sampled tokens.
    masks = [segment.mask.copy() for segment in trajectory.segments]
    for mask, segment in zip(masks, trajectory.segments, strict=True):
        for turn in segment.turns:
            if turn.finish == "length":
                mask[turn.first : turn.end] = False
    return _joined(masks)


def turn_ends(segments: Iterable[Segment], weight: float) -> Iterator[TurnEnd]:
    """The turns of a session's segments, their rewards multiplied by `weight`."""
    start = 0
    for segment in segments:
        for turn in segment.turns:
            yield TurnEnd(start + turn.end, weight * (turn.reward or 0.0))
        start += len(segment.completion_ids)


def _joined(arrays: list[NDArray[Kind]]) -> NDArray[Kind]:
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
