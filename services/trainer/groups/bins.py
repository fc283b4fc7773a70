"""Micro-batches, and the bin that each rank gets of one.

A bin is one rank's samples of a micro-batch; ranks that share their forward passes share it, and count as one
here (`TrainerConfig.num_bins`). On GPUs it is as a rule one forward pass (a tile, `policy/packing.py`), on
CPUs it is computed in several smaller ones.

Guarantees: every sample is in one bin. Bins depend on the samples alone, ties are broken by key: so the ranks
get the same bins when a recorded micro-batch is trained again. A bin fits into one tile of `max_tokens` in
its layout, unless a sample alone is larger; the bins of a micro-batch have like costs.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from tidemill.common.wire.arrays import Int32
from tidemill.common.wire.images import images_of
from tidemill.common.wire.messages import TrajectoryKey
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.groups.trie import (
    ENOUGH_IN_COMMON,
    MOST_KEYS,
    SCORES_OF_A_TOKEN,
    NodeCount,
    common_lengths,
    in_order,
    num_different,
    with_pictures,
    with_routes,
)

Layout = Literal["padded", "tree", "tree_or_padded", "varlen"]
"""How the samples of a forward pass lie beside each other; `policy/packing.py` describes each layout."""
DIVISORS = (1.0, 1.25, 1.75, 2.0, 4.0, 8.0)
"""A bin's size divided by these is the size of the parts it is filled with; all are tried. Smaller parts fill
bins better, and compute more common tokens twice."""


@dataclass(slots=True)
class Bin:
    """Samples of a bin, or of a part of one, by their indices in the given list.

    `tokens` pass through the model, common beginnings once; `rows` have `row_tokens` together and at most
    `widest` each; `scores` are pairs of a token and one that it attends to.

    Samples 3 and 5 with rows of 10 and 8 tokens, of which they share the first 6, have members (3, 5), 12
    tokens, 18 row_tokens, 2 rows, widest 10 and scores 10²/2 + 8²/2 - 6²/2 = 64.
    """

    members: Sequence[int] = ()
    tokens: int = 0
    row_tokens: int = 0
    rows: int = 0
    widest: int = 0
    scores: float = 0.0

    def joined(self, added: "Bin") -> "Bin":
        """This bin with the samples of another one, which shares nothing with it."""
        both = self.copied()
        both.members = (*self.members, *added.members)
        both.add(added)
        return both

    def copied(self) -> "Bin":
        return Bin(self.members, self.tokens, self.row_tokens, self.rows, self.widest, self.scores)

    def add(self, added: "Bin", shared: int = 0) -> None:
        """Add the counts of another bin, of whose tokens `shared` are here already."""
        self.tokens += added.tokens - shared
        self.row_tokens += added.row_tokens
        self.rows += added.rows
        self.widest = max(self.widest, added.widest)
        self.scores += added.scores - shared**2 / 2

    def takes(self, added: "Bin", max_tokens: int, layout: Layout, shared: int = 0) -> bool:
        """Whether both together are one tile of at most `max_tokens` positions."""
        if layout == "padded":
            return (self.rows + added.rows) * max(self.widest, added.widest) <= max_tokens
        row_tokens = self.row_tokens + added.row_tokens
        return self.tokens + added.tokens - shared <= max_tokens and row_tokens <= MOST_KEYS * max_tokens


class PrefixOrder:
    """Samples in an order in which those that begin alike are neighbours; `add` adds whole groups."""

    def __init__(self, samples: Sequence[Sample], layout: Layout) -> None:
        """Only trees compute common beginnings once."""
        self.layout = layout
        self.samples: list[Sample] = []
        self._alone: list[Bin] = []
        self._order: list[int] = []
        self._shared: list[int] = []
        """Tokens that each sample shares with the one before it in the order; 0 where they are too few."""
        self.add(samples)

    def add(self, samples: Sequence[Sample]) -> None:
        """Add samples of groups that have none here yet: what is known of the others stays, for groups share
        nothing."""
        if not samples:
            return
        is_shared = self.layout.startswith("tree")
        first_rows: dict[int, Int32] = {}
        beginnings: dict[int, bytes] = {}
        added = range(len(self.samples), len(self.samples) + len(samples))
        self.samples += samples
        for i in added:
            sample = self.samples[i]
            num_tokens = sample.num_tokens
            num_different_tokens = num_tokens
            num_rows = len(sample.segments)
            if is_shared:
                rows = _rows_of(sample)
                if num_rows > 1:
                    rows = sorted(rows, key=in_order)
                    num_different_tokens = num_different(rows)
                first_rows[i] = rows[0]
                beginnings[i] = in_order(rows[0])
            if num_rows == 1:
                widest = num_tokens
                scores = num_tokens**2 / 2  # causal: half of the square
            else:
                lengths = [len(prompt_ids) + count for prompt_ids, count in sample.segments]
                widest = max(lengths)
                scores = sum(length**2 / 2 for length in lengths)
            self._alone.append(Bin((i,), num_different_tokens, num_tokens, num_rows, widest, scores))
        self._shared += [0] * len(samples)
        order = sorted(
            added,
            key=lambda i: (self._ticket_of(i), beginnings[i] if is_shared else b"", self.samples[i].key),
        )
        if is_shared:
            self._count_shared(order, [first_rows[i] for i in order])
        is_behind = not self._order or self._ticket_of(self._order[-1]) < self._ticket_of(order[0])
        self._order += order
        if not is_behind:
            # Stable: a group, whose samples are all old or all new, keeps its order.
            self._order.sort(key=self._ticket_of)

    def _count_shared(self, order: Sequence[int], first_rows: Sequence[Int32]) -> None:
        ticket = None
        for i, row, common in zip(order, first_rows, common_lengths(first_rows), strict=True):
            if self._ticket_of(i) != ticket:  # groups share nothing
                ticket = self._ticket_of(i)
                common = 0
                count = NodeCount()
            shared = count.add(len(row), common)
            self._shared[i] = shared if shared >= ENOUGH_IN_COMMON * self._alone[i].tokens else 0

    def _ticket_of(self, i: int) -> int:
        return self.samples[i].key[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, common beginnings once."""
        return sum(alone.tokens for alone in self._alone) - sum(self._shared)

    def key_of(self, neighbours: Bin) -> TrajectoryKey:
        return self.samples[neighbours.members[0]].key

    def cut(self, max_tokens: int) -> list[Bin]:
        """Parts of neighbours that share their beginning, each at most one tile of `max_tokens`, unless a
        sample alone is larger."""
        cuts: list[Bin] = []
        members: list[int] = []
        last = Bin()
        for i in self._order:
            alone = self._alone[i]
            shared = self._shared[i]
            if shared and last.takes(alone, max_tokens, self.layout, shared):
                last.add(alone, shared)
            else:
                last = alone.copied()
                members = []
                cuts.append(last)
            members.append(i)
            last.members = members
        for neighbours in cuts:
            neighbours.members = tuple(neighbours.members)
        return cuts

    def fill(self, parts: Iterable[Bin], max_tokens: int) -> list[Bin]:
        """First-fit decreasing: parts in bins of at most one tile of `max_tokens`; a larger part has a bin of
        its own. Parts of 5, 4, 3, 2 tokens in bins of 7 give 5 + 2 and 4 + 3."""
        is_padded = self.layout == "padded"
        bins: list[Bin] = []

        def largest_first(neighbours: Bin) -> tuple[int, TrajectoryKey]:
            num_tokens = neighbours.widest if is_padded else neighbours.tokens
            return -num_tokens, self.key_of(neighbours)

        for neighbours in sorted(parts, key=largest_first):
            for number, partial_bin in enumerate(bins):
                if partial_bin.takes(neighbours, max_tokens, self.layout):
                    bins[number] = partial_bin.joined(neighbours)
                    break
            else:
                bins.append(neighbours)
        return bins

    def level(
        self, parts: Iterable[Bin], num_bins: int, max_tokens: int, scores_of_a_token: float
    ) -> list[Bin]:
        """`num_bins` bins of like cost: the most expensive part first, into the cheapest bin that has room
        for it, else into the cheapest one."""
        bins = [Bin()] * num_bins

        def dearest_first(neighbours: Bin) -> tuple[float, TrajectoryKey]:
            return -cost(neighbours, scores_of_a_token), self.key_of(neighbours)

        for neighbours in sorted(parts, key=dearest_first):
            best = 0
            # Bins with room come before those without, and cheaper ones before others.
            best_preference = (True, math.inf)
            for number, partial_bin in enumerate(bins):
                is_empty = not partial_bin.members
                has_room = is_empty or partial_bin.takes(neighbours, max_tokens, self.layout)
                preference = (not has_room, cost(partial_bin, scores_of_a_token))
                if preference < best_preference:
                    best = number
                    best_preference = preference
            bins[best] = bins[best].joined(neighbours)
        return bins


def cost(filled: Bin, scores_of_a_token: float) -> float:
    """Cost of a bin, in tokens; `scores_of_a_token` attention scores cost as much as a token."""
    return filled.tokens + filled.scores / scores_of_a_token


def fit_together(samples: Iterable[Sample], max_tokens: int, num_ranks: int, layout: Layout) -> bool:
    """Whether samples that have fewer than `max_tokens` different tokens are one bin for certain, so that
    they need not be tried: on one rank, in rows without padding, with few enough keys."""
    row_tokens = sum(sample.num_tokens for sample in samples)
    return num_ranks == 1 and layout != "padded" and row_tokens <= MOST_KEYS * max_tokens


def form_micro_batches(
    samples: Iterable[Sample],
    max_tokens: int,
    num_ranks: int = 1,
    layout: Layout = "tree",
    is_at_start: bool = False,
) -> list[MicroBatch]:
    """Distribute samples over micro-batches, each of a bin of at most `max_tokens` for each of `num_ranks`.
    The longest samples come first, so that the bins of a micro-batch have like sizes. `is_at_start` as for
    `MicroBatch`."""
    return fill_micro_batches(PrefixOrder(list(samples), layout), max_tokens, num_ranks, is_at_start)


def fill_micro_batches(
    order: PrefixOrder, max_tokens: int, num_ranks: int, is_at_start: bool
) -> list[MicroBatch]:
    """`form_micro_batches` of samples that are in order already."""
    filled = [order.fill(order.cut(int(max_tokens / divisor)), max_tokens) for divisor in DIVISORS]
    bins = min(filled, key=lambda filling: (_time(filling, num_ranks), len(filling)))
    batches: list[MicroBatch] = []
    while bins:
        for num_bins in range(min(num_ranks, len(bins)), 0, -1):
            members = tuple(order.samples[i] for full_bin in bins[:num_bins] for i in full_bin.members)
            # `split_samples` sees these samples alone, and may cut them so that they do not fit; seldom.
            if num_bins == 1 or _fillings(PrefixOrder(members, order.layout), num_ranks, max_tokens):
                break
        batches.append(MicroBatch(members, is_at_start))
        bins = bins[num_bins:]
    return batches


def _time(bins: Sequence[Bin], num_ranks: int) -> float:
    """Time of all bins, in tokens: ranks wait for the fullest bin of each micro-batch. The last micro-batch
    may have fewer bins, and counts as divided evenly."""
    sizes = [full_bin.tokens for full_bin in bins]
    num_whole = len(sizes) - len(sizes) % num_ranks
    time = 0
    for first in range(0, num_whole, num_ranks):
        time += max(sizes[first : first + num_ranks])
    return time + sum(sizes[num_whole:]) / num_ranks


def split_samples(
    samples: Sequence[Sample],
    num_ranks: int,
    max_tokens: int,
    layout: Layout = "tree",
    scores_of_a_token: float = SCORES_OF_A_TOKEN,
) -> list[tuple[int, ...]]:
    """Indices of the samples of each of `num_ranks` ranks: bins of like cost, each within one tile of
    `max_tokens` if the micro-batch was formed for as many ranks."""
    order = PrefixOrder(samples, layout)
    cuts = _cuts(order, num_ranks, max_tokens)
    tried = [order.level(parts, num_ranks, max_tokens, scores_of_a_token) for parts in cuts]
    # Bins that are nearly full fit in the order in which they were formed, and hardly in another.
    tried += _fillings(order, num_ranks, max_tokens)

    def badness(bins: Sequence[Bin]) -> tuple[int, float]:
        num_too_large = 0
        for full_bin in bins:
            is_several = len(full_bin.members) > 1
            if is_several and not full_bin.takes(Bin(), max_tokens, layout):
                num_too_large += 1
        return num_too_large, max(cost(full_bin, scores_of_a_token) for full_bin in bins)

    best = min(tried, key=badness)
    return [tuple(full_bin.members) for full_bin in best]


def _cuts(order: PrefixOrder, num_bins: int, max_tokens: int) -> list[list[Bin]]:
    """Cuts into parts of several sizes: of a full bin, and of the mean that a rank gets."""
    mean = min(order.num_tokens // num_bins, max_tokens)
    sizes = {int(most / divisor) for most in (max_tokens, mean) for divisor in DIVISORS}
    return [order.cut(size) for size in sorted(sizes)]


def _fillings(order: PrefixOrder, num_bins: int, max_tokens: int) -> list[list[Bin]]:
    """The fillings that need at most `num_bins` bins, with empty bins up to that number."""
    filled = [order.fill(parts, max_tokens) for parts in _cuts(order, num_bins, max_tokens)]
    return [bins + [Bin()] * (num_bins - len(bins)) for bins in filled if len(bins) <= num_bins]


def split_groups(
    samples: Sequence[Sample], num_ranks: int, max_tokens: int, layout: Layout
) -> list[list[tuple[int, ...]]]:
    """For each rank, parts of groups as indices of samples, each computed by itself. A part depends on its
    group alone, and so do the bits of its results, whichever groups are in the same call."""
    by_group: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        by_group.setdefault(sample.key[0], []).append(i)
    parts: list[Bin] = []
    for indices in by_group.values():
        order = PrefixOrder([samples[i] for i in indices], layout)
        for filled in order.fill(order.cut(max_tokens), max_tokens):
            filled.members = tuple(indices[i] for i in filled.members)
            parts.append(filled)
    parts.sort(key=lambda filled: (-filled.tokens, samples[filled.members[0]].key))
    shares: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for filled in parts:
        # To the rank with the fewest tokens so far.
        least = loads.index(min(loads))
        shares[least].append(tuple(filled.members))
        loads[least] += filled.tokens
    return shares


def _rows_of(sample: Sample) -> Sequence[Int32]:
    """Prompt and completion of each of the sample's rows, end to end, with their routes and pictures."""
    if not sample.images and not sample.routes:
        return sample.rows
    rows = []
    for number, ids in enumerate(sample.rows):
        sequence = with_pictures(ids, images_of(sample.images, number))
        rows.append(with_routes(sequence, sample.routes[number].keys if sample.routes else None))
    return rows
