"""Samples that wait until there are enough of them for a micro-batch."""

from collections.abc import Sequence

from tidemill.services.trainer.groups.bins import Layout, PrefixOrder, fill_micro_batches, fit_together
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
        self._order = PrefixOrder((), layout)
        """The samples that wait."""

    def take_full(self, arrived: Sequence[Sample]) -> list[MicroBatch]:
        """Add the samples of whole groups that have arrived, and take the micro-batches that are full enough;
        more samples are on their way."""
        self._order.add(arrived)
        is_short = self._order.num_tokens < self._least_tokens
        if is_short and fit_together(self._order.samples, self._bin_tokens, self._num_bins, self._layout):
            return []
        batches = self._take_all()
        if batches:
            last = PrefixOrder(batches[-1].samples, self._layout)
            if last.num_tokens < self._least_tokens:
                self._order = last
                batches.pop()
        return batches

    def take_last(self, arrived: Sequence[Sample]) -> list[MicroBatch]:
        """Add the last samples, and take all in micro-batches."""
        self._order.add(arrived)
        return self._take_all()

    def _take_all(self) -> list[MicroBatch]:
        order = self._order
        self._order = PrefixOrder((), self._layout)
        return fill_micro_batches(order, self._bin_tokens, self._num_bins, self._is_at_start)
