"""A micro-batch: the samples of one call of `Policy.accumulate`, and how a commit names them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tidemill.common.errors import TidemillError
from tidemill.common.wire.messages import TrajectoryKey
from tidemill.services.trainer.groups.sample import Sample


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Samples in order of training. Where there are several ranks, `bins.split_samples` gives a bin to each.

    Example: `keys` ((7, 0), (7, 3), (8, 1)) are two samples of ticket 7 and one of ticket 8.
    """

    samples: tuple[Sample, ...]
    is_at_start: bool = False
    """Whether the step has not updated the weights yet. Then the policy at the start of the step is the
    current one, and the column `proximal_logprobs` is not used, also where it was computed: whether there was
    time for that must not change the result."""

    @property
    def keys(self) -> tuple[TrajectoryKey, ...]:
        """By which a commit names it: `Commit.mini_batches` has them."""
        return tuple(sample.key for sample in self.samples)

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)

    @property
    def num_trained(self) -> int:
        return sum(sample.num_trained for sample in self.samples)

    @property
    def num_groups(self) -> float:
        """The sum of the samples' shares of their groups: of a group of 4, a sample counts as 0.25."""
        return sum(1.0 / sample.group_size for sample in self.samples)


def rebuild(
    composition: Sequence[Sequence[TrajectoryKey]],
    samples_by_key: Mapping[TrajectoryKey, Sample],
    is_at_start: bool = False,
) -> list[MicroBatch]:
    """Make the micro-batches of one mini-batch again, whose keys a commit has recorded.

    Raises:
        TidemillError: a key is not among the samples.
    """
    batches: list[MicroBatch] = []
    missing: set[TrajectoryKey] = set()
    for keys in composition:
        samples: list[Sample] = []
        for ticket, index in keys:  # of a commit that was read, a key is a list
            sample = samples_by_key.get((ticket, index))
            if sample is None:
                missing.add((ticket, index))
            else:
                samples.append(sample)
        batches.append(MicroBatch(tuple(samples), is_at_start))
    if missing:
        raise TidemillError(
            f"cannot rebuild a committed step: {len(missing)} of its trajectories are not in the streams, "
            f"the first is {min(missing)}. Restore a later checkpoint, or the archived streams."
        )
    return batches
