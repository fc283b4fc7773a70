"""Micro-batches: which samples share one accumulation of gradients.

Every sample is in exactly one micro-batch, whatever the order of arrival. A composition (keys in order) that
a commit recorded is rebuilt exactly: sums of floats, and so the weights, depend on it bit by bit.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from common.errors import TidemillError
from common.wire.messages import TrajectoryKey
from services.trainer.groups.samples import Sample

Composition = tuple[tuple[TrajectoryKey, ...], ...]
"""Per micro-batch, its trajectories in order; what a Commit stores for one optimizer update."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Samples whose gradients are accumulated by one call of the policy."""

    samples: tuple[Sample, ...]

    @property
    def keys(self) -> tuple[TrajectoryKey, ...]:
        """The composition: the keys in order."""
        return tuple(sample.key for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        """Prompt plus completion tokens."""
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def num_trained(self) -> int:
        """Tokens that carry loss."""
        return sum(sample.num_trained for sample in self.samples)


def without_proximal(batch: MicroBatch) -> MicroBatch:
    """The batch as it is trained before the weights of the step have moved: the proximal policy is the
    current one.

    Also where its logprobs were precomputed: the bits must not depend on whether there was time for that.
    """
    return MicroBatch(tuple(replace(sample, proximal_logprobs=None) for sample in batch.samples))


def form_micro_batches(samples: Iterable[Sample], max_tokens: int) -> list[MicroBatch]:
    """Distribute samples over micro-batches of at most `max_tokens` (prompt plus completion) tokens.

    First-fit decreasing, ties by key; a sample longer than the budget has a micro-batch of its own. Lengths
    5, 4, 3, 2 under a budget of 7 give [5, 2] and [4, 3].
    """
    bins: list[list[Sample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=lambda sample: (-sample.num_tokens, sample.key)):
        fitting = (i for i, free in enumerate(room) if sample.num_tokens <= free)
        index = next(fitting, len(bins))
        if index == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[index].append(sample)
        room[index] -= sample.num_tokens
    return [MicroBatch(tuple(members)) for members in bins]


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
