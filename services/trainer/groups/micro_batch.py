"""What one call of the policy trains on: it adds the gradients of these samples to those before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemill.common.errors import TidemillError
from tidemill.common.wire.messages import TrajectoryKey
from tidemill.services.trainer.groups.sample import Sample


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Samples for one call of the policy, of all ranks: each takes its share (`bins.py`).

    Example: `keys` ((7, 0), (7, 3), (8, 1)) are two samples of ticket 7 and one of ticket 8, in order of
    training.
    """

    samples: tuple[Sample, ...]
    is_at_start: bool = False
    """Whether the weights of the step have not moved yet. Then the proximal policy is the current one, and
    `proximal_logprobs` are not read: some samples have them, computed while the trainer waited, and the bits
    must not depend on whether there was time for that."""

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
        """Groups: each sample counts as its share of its own, so 3 of 4 samples are 0.75."""
        return sum(1.0 / sample.group_size for sample in self.samples)


def rebuild(
    composition: Sequence[Sequence[TrajectoryKey]],
    samples_by_key: Mapping[TrajectoryKey, Sample],
    is_at_start: bool = False,
) -> list[MicroBatch]:
    """Make the micro-batches that a commit recorded. Raises TidemillError: a trajectory of the composition is
    not among the samples."""
    batches: list[tuple[Sample, ...]] = []
    absent: set[TrajectoryKey] = set()
    for members in composition:
        samples: list[Sample] = []
        for ticket, index in members:  # a commit that was read has lists for keys
            sample = samples_by_key.get((ticket, index))
            if sample is None:
                absent.add((ticket, index))
            else:
                samples.append(sample)
        batches.append(tuple(samples))
    missing = sorted(absent)
    if missing:
        raise TidemillError(
            f"cannot rebuild a committed step: {len(missing)} of its trajectories are not in the streams, "
            f"the first is {missing[0]}. Restore a later checkpoint, or the archived streams."
        )
    return [MicroBatch(samples, is_at_start) for samples in batches]
