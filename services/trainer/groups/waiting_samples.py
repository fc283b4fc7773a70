"""Samples that wait until there are enough of them for a micro-batch."""

from collections.abc import Sequence

from tidemill.services.trainer.groups.bins import Layout, PrefixOrder, fit_together, form_micro_batches
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample

MIN_FILL = 0.5
"""A micro-batch filled less than this waits for more samples, unless its mini-batch has no more to come."""


class WaitingSamples:
    """The samples of one mini-batch that are in no micro-batch yet.

    With room for 100 tokens in a micro-batch: 30 tokens wait, since 50 are wanted; with 40 more they are one
    micro-batch of 70; of 130 tokens in two micro-batches of 90 and 40, the second goes on waiting.
    """

    def __init__(self, bins: tuple[int, int], layout: Layout, is_at_start: bool) -> None:
        """`bins` and `layout` are the policy's; `is_at_start` as for `MicroBatch`."""
        self._bin_tokens, self._num_bins = bins
        self._layout = layout
        self._is_at_start = is_at_start
        self._least_tokens = MIN_FILL * self._bin_tokens * self._num_bins
        self._samples: list[Sample] = []
        self._num_tokens = 0
        """Tokens of those that wait, common beginnings of those that came together once."""

    def take_full(self, arrived: Sequence[Sample]) -> list[MicroBatch]:
        """Add samples that have arrived, and take the micro-batches that are full enough; more samples are on
        their way."""
        self._samples += arrived
        self._num_tokens += self._count(arrived)
        is_short = self._num_tokens < self._least_tokens
        if is_short and fit_together(self._samples, self._bin_tokens, self._num_bins, self._layout):
            return []
        batches = self._take_all()
        if batches:
            num_tokens = self._count(batches[-1].samples)
            if num_tokens < self._least_tokens:
                self._samples = list(batches.pop().samples)
                self._num_tokens = num_tokens
        return batches

    def take_last(self, arrived: Sequence[Sample]) -> list[MicroBatch]:
        """Add the last samples, and take all in micro-batches."""
        self._samples += arrived
        return self._take_all()

    def _take_all(self) -> list[MicroBatch]:
        samples = self._samples
        self._samples = []
        self._num_tokens = 0
        return form_micro_batches(
            samples, self._bin_tokens, self._num_bins, self._layout, is_at_start=self._is_at_start
        )

    def _count(self, samples: Sequence[Sample]) -> int:
        """Tokens of samples, common beginnings once."""
        return PrefixOrder(samples, self._layout).num_tokens
