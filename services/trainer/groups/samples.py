"""One trajectory as the trainer sees it: token ids, rollout logprobs, loss mask, and its advantage.

A session is one sample, however many segments it has: arrays of its tokens are those of its segments end to
end, so that all of them share its advantage, and whatever counts sequences counts sessions. Only the forward
pass sees the segments, each as a row of its own (`policy/packing.py`).

The arrays of a sample fit each other, its numbers are finite, and its prompt is not empty (the last prompt
token predicts the first completion token). A sample that breaks this is never built, so later code need not
look for NaN.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from tidemill.common.errors import TidemillError
from tidemill.common.wire.arrays import Bits, Float32, Float64, Int32
from tidemill.common.wire.choices import KEPT, NUM_ROWS, ROUTES, Rows
from tidemill.common.wire.messages import Trajectory, TrajectoryKey
from tidemill.common.wire.segments import Segment

Kind = TypeVar("Kind", bound=np.generic)

PER_TOKEN = (
    "advantage",
    "returns",
    "proximal_logprobs",
    "reference_logprobs",
    "values",
    "start_logprobs",
    "entropies",
    "factors",
    "penalised",
)
"""Fields that, where they are arrays, have an entry for each completion token."""


class SegmentTokens(NamedTuple):
    """A segment of a sample: its own prompt, and how many of the sample's completion tokens belong to it."""

    prompt_ids: Int32
    num_completion: int


class Routes(NamedTuple):
    """Which experts the engine chose for each token of a segment but the last, which it never computed."""

    experts: NDArray[np.unsignedinteger]
    """[tokens - 1, layers, experts of a token]."""
    keys: Int32
    """[tokens - 1, 2]: a 64-bit hash of each token's experts, as two numbers."""


def make_routes(experts: NDArray[np.unsignedinteger]) -> Routes:
    """Hash by multilinear hashing over 64-bit words, whose multipliers are hashes of their places."""
    flat = np.ascontiguousarray(experts).reshape(len(experts), -1).view(np.uint8)
    num_words = -(-flat.shape[1] // 8)
    padded = np.zeros((len(flat), 8 * num_words), dtype=np.uint8)
    padded[:, : flat.shape[1]] = flat
    odd = np.array([xxhash.xxh3_64_intdigest(b"%d" % word) | 1 for word in range(num_words)], dtype=np.uint64)
    hashes = (padded.view(np.uint64) * odd).sum(1, dtype=np.uint64)
    return Routes(experts, hashes.view(np.int32).reshape(-1, 2))


class TurnEnd(NamedTuple):
    """A turn of a session: the completion token after its last one, and its share of the sample's reward."""

    end: int
    reward: float


@dataclass(frozen=True, slots=True, eq=False)
class Teaching:
    """A teacher's logprobs of a sample's tokens [T], 0 at tokens that the model did not sample."""

    teacher: str
    logprobs: Float32
    weight: float
    """Weight of the teacher's term in the loss; 0 only measures it."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """T completion tokens, of which those with `mask` are trained: never those of an environment.

    A completion may be empty (T = 0) or masked entirely: it has no gradient, but counts as a sequence.

    Raises:
        ValueError: lengths differ, a prompt is empty, or a number is not finite.
    """

    key: TrajectoryKey
    prompt_ids: Int32
    completion_ids: Int32
    rollout_logprobs: Float32
    mask: Bits
    reward: float
    shaped_reward: float = 0.0
    """The reward less penalties, from which advantages are computed."""
    token_rewards_A: Float64 | None = None
    """The same at the A trained tokens, while `Advantages.assign` works."""
    advantage: float | Float64 = 0.0
    """One number, or one for each completion token, [T]; `Advantages.assign` fills it in."""
    returns: Float64 | None = None
    """Targets of the value head, [T], with the advantage."""
    proximal_logprobs: Float32 | None = None
    """[T], under the weights at the start of the step; None where those are the current weights."""
    reference_logprobs: Float32 | None = None
    """[T], under the reference model, where there is one."""
    values: Float32 | None = None
    """[T], the value head's estimates at the start of the step, before each token is chosen."""
    start_logprobs: Float32 | None = None
    entropies: Float32 | None = None
    """Both [T], under the weights at the step's start, for a mini-batch's statistics; None after that."""
    factors: Float64 | None = None
    """[T], factor of each token's policy term, from a mini-batch's statistics; None: 1."""
    penalised: Float64 | None = None
    """[T], 1 for tokens that the loss penalises."""
    forked: tuple[SegmentTokens, ...] = ()
    """All segments in order, where there are several; empty for one, whose prompt is `prompt_ids`."""
    routes: tuple[Routes, ...] = ()
    """Routes of each segment; empty where none were recorded."""
    turns: tuple[TurnEnd, ...] = ()
    """Turns of a session, in order; empty for a single turn."""
    kept: Rows | None = None
    """[T], the ids that each token was sampled from; an empty row: from all."""
    teaching: Teaching | None = None
    """Set where the sample's data source has a teacher."""
    imitation: float = 0.0
    """For a demonstration, the weight of its tokens' -logprob, which is their whole loss; else 0."""
    group_size: int = 1
    """Trained samples of its group, itself among them; filled in where `normalisation: prompt` needs it."""
    group_trained: int = 0
    """Tokens in these samples that carry loss."""

    def __post_init__(self) -> None:
        num_tokens = len(self.completion_ids)
        if len(self.rollout_logprobs) != num_tokens or len(self.mask) != num_tokens:
            raise ValueError(
                f"trajectory {self.key}: {num_tokens} completion ids, {len(self.rollout_logprobs)} logprobs "
                f"and a mask of {len(self.mask)} must have one length"
            )
        if sum(segment.num_completion for segment in self.segments) != num_tokens:
            raise ValueError(
                f"trajectory {self.key}: its segments do not have {num_tokens} completion tokens"
            )
        if not all(len(segment.prompt_ids) for segment in self.segments):
            raise ValueError(f"trajectory {self.key}: the prompt is empty, nothing predicts the first token")
        num_routed = [len(segment.prompt_ids) + segment.num_completion - 1 for segment in self.segments]
        if self.routes and (found := [len(own.experts) for own in self.routes]) != num_routed:
            raise ValueError(f"trajectory {self.key}: routes of {found} tokens, expected {num_routed}")
        if not np.isfinite([turn.reward for turn in self.turns]).all():
            raise ValueError(f"trajectory {self.key}: rewards of turns must be finite")
        if not (np.isfinite(self.advantage).all() and np.isfinite(self.reward)):
            raise ValueError(
                f"trajectory {self.key}: reward {self.reward} and advantage {self.advantage} must be finite"
            )
        for name in PER_TOKEN:
            value = getattr(self, name)
            if isinstance(value, np.ndarray) and value.shape != (num_tokens,):
                raise ValueError(f"trajectory {self.key}: {name} of shape {value.shape}, not ({num_tokens},)")
        if self.kept is not None and len(self.kept) != num_tokens:
            raise ValueError(f"trajectory {self.key}: {len(self.kept)} sampling masks, not {num_tokens}")
        if not np.isfinite(self.rollout_logprobs).all():
            raise ValueError(f"trajectory {self.key}: rollout logprobs must be finite")

    @property
    def segments(self) -> tuple[SegmentTokens, ...]:
        """All rows that the model has to see."""
        return self.forked or (SegmentTokens(self.prompt_ids, len(self.completion_ids)),)

    @property
    def num_tokens(self) -> int:
        """Prompts plus completions, of all its rows."""
        return sum(len(segment.prompt_ids) + segment.num_completion for segment in self.segments)

    @property
    def turn_A(self) -> NDArray[np.int64]:
        """The number of the turn that each trained token belongs to. Shape [A]; a single turn is turn 0."""
        ends = [turn.end for turn in self.turns]
        # To the right: the token at an end is the first of the next turn.
        return np.searchsorted(ends, np.flatnonzero(self.mask), side="right").astype(np.int64)

    @property
    def has_turn_rewards(self) -> bool:
        return any(turn.reward for turn in self.turns)

    @property
    def num_trained(self) -> int:
        """Completion tokens that carry loss."""
        return int(np.count_nonzero(self.mask))

    def spread(self, values_A: Float64) -> Float64:
        """Numbers of trained tokens at their places in the completion, 0 at the others. Shape [T]."""
        values_T = np.zeros(len(self.completion_ids))
        values_T[self.mask] = values_A
        return values_T

    @property
    def advantages_T(self) -> Float64:
        """The advantage of each completion token. Shape [T]."""
        return np.broadcast_to(self.advantage, self.mask.shape)

    @property
    def mean_advantage(self) -> float:
        """The advantage; where each token has its own, the mean over the trained tokens (0 without any)."""
        if not isinstance(self.advantage, np.ndarray):
            return float(self.advantage)
        return float(self.advantage[self.mask].mean()) if self.num_trained else 0.0


def make_sample(trajectory: Trajectory, turn_weight: float = 0.0) -> Sample:
    """A trajectory as a sample, its reward still 0; rewards of its turns are multiplied by `turn_weight`.

    Raises:
        ValueError: a logprob or a turn's reward is not finite, or a prompt is empty.
    """
    segments = trajectory.segments
    return Sample(
        key=trajectory.key,
        prompt_ids=trajectory.prompt_ids,
        completion_ids=_joined([segment.completion_ids for segment in segments]),
        rollout_logprobs=_joined([segment.logprobs for segment in segments]),
        mask=_joined([segment.mask for segment in segments]),
        reward=0.0,
        forked=tuple(
            SegmentTokens(s.prompt_ids, len(s.completion_ids)) for s in trajectory.forks and segments
        ),
        routes=tuple(_routes_of(trajectory)),
        turns=tuple(_turn_ends(segments, turn_weight)),
        kept=trajectory.choices.rows.get(KEPT) if trajectory.choices else None,
    )


def without_choices(sample: Sample) -> Sample:
    """The sample without recorded choices, for a model that makes its own: a reference."""
    return replace(sample, kept=None, routes=())


def has_masks(trajectory: Trajectory) -> bool:
    """Whether its engine recorded sampling masks; a mixture of experts may have routes alone."""
    return trajectory.choices is not None and KEPT in trajectory.choices.rows


def missing_mask(trajectory: Trajectory) -> str:
    """Which sampled token is not in its sampling mask, as a sentence; empty where all are."""
    kept = trajectory.choices.rows.get(KEPT) if trajectory.choices else None
    if kept is None or kept.offsets is None:
        return "it has no sampling masks, and its tokens were sampled from some ids only"
    completion_ids = _joined([segment.completion_ids for segment in trajectory.segments])
    row_of_value = np.repeat(np.arange(len(kept)), np.diff(kept.offsets))
    is_missing = _joined([segment.mask for segment in trajectory.segments]).copy()
    is_missing[row_of_value[kept.values == completion_ids[row_of_value]]] = False
    return f"token {np.argmax(is_missing)} is not in its sampling mask" if is_missing.any() else ""


def _routes_of(trajectory: Trajectory) -> Iterator[Routes]:
    if trajectory.choices is None or (rows := trajectory.choices.rows.get(ROUTES)) is None:
        return
    start = 0
    for segment in trajectory.segments:
        end = start + NUM_ROWS[ROUTES](segment)
        yield make_routes(rows.values[start:end])
        start = end


def with_teaching(sample: Sample, teacher: str, logprobs_A: Float32, weight: float) -> Sample:
    """The sample with a teacher's logprobs of its A sampled tokens, before `mask` leaves any of them out.

    Raises:
        ValueError: there are not A of them, so they belong to other tokens.
    """
    if len(logprobs_A) != sample.num_trained:
        raise ValueError(
            f"trajectory {sample.key}: teacher {teacher} has {len(logprobs_A)} logprobs for "
            f"{sample.num_trained} sampled tokens"
        )
    logprobs_T = np.zeros(len(sample.completion_ids), dtype=np.float32)
    logprobs_T[sample.mask] = logprobs_A
    return replace(sample, teaching=Teaching(teacher, logprobs_T, weight))


def num_sampled(trajectory: Trajectory) -> int:
    """Completion tokens that the model sampled, in all segments: a completion's length, in every metric."""
    return sum(int(np.count_nonzero(segment.mask)) for segment in trajectory.segments)


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


def _joined(arrays: list[NDArray[Kind]]) -> NDArray[Kind]:
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]


def _turn_ends(segments: Iterable[Segment], weight: float) -> Iterator[TurnEnd]:
    start = 0
    for segment in segments:
        yield from (TurnEnd(start + turn.end, weight * (turn.reward or 0.0)) for turn in segment.turns)
        start += len(segment.completion_ids)


Precomputed = dict[str, Float32]
"""What a policy computes for one trajectory before training: arrays [T] by name, in the end that of their
field in `Sample`."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Samples whose gradients one call of the policy accumulates: a bin for each rank (`bins.py`)."""

    samples: tuple[Sample, ...]

    @property
    def keys(self) -> tuple[TrajectoryKey, ...]:
        """The composition: the keys in order."""
        return tuple(sample.key for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def num_trained(self) -> int:
        return sum(sample.num_trained for sample in self.samples)

    @property
    def num_groups(self) -> float:
        """Groups, of which each sample counts as its share."""
        return sum(1.0 / sample.group_size for sample in self.samples)


def without_proximal(batch: MicroBatch) -> MicroBatch:
    """The batch as it is trained before the weights of the step have moved: the proximal policy is the
    current one.

    Also where its logprobs were precomputed: the bits must not depend on whether there was time for that.
    """
    return MicroBatch(tuple(replace(sample, proximal_logprobs=None) for sample in batch.samples))


def rebuild(
    composition: Sequence[Sequence[TrajectoryKey]], samples_by_key: Mapping[TrajectoryKey, Sample]
) -> list[MicroBatch]:
    """Make the micro-batches that a commit recorded. Raises TidemillError: a trajectory of the composition is
    not among the samples."""
    keys = [[(ticket, index) for ticket, index in members] for members in composition]
    missing = sorted({key for members in keys for key in members if key not in samples_by_key})
    if missing:
        raise TidemillError(
            f"cannot rebuild a committed step: {len(missing)} of its trajectories are not in the streams, "
            f"the first is {missing[0]}. Restore a later checkpoint, or the archived streams."
        )
    return [MicroBatch(tuple(samples_by_key[key] for key in members)) for members in keys]
