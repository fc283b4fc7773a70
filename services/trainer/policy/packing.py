"""Plans how the samples of a micro-batch lie in rectangles of token ids ("tiles"), one forward pass each.

Guarantee: in every layout a token attends to the tokens before it in its own sequence and to no other (no
leakage), so that packed, padded and row-by-row logprobs are equal up to rounding.

* `padded`: rows of like length, padded on the right, *no* attention mask. A causal model's real tokens
  never see what comes after them, so the mask would change nothing; without it attention takes its
  causal fast path, and it is right for every causal architecture (sliding windows, recurrent layers).
* `tree`: one row of tokens in which common beginnings of rows are there once (`trees.py`).
* `tree_or_padded`: the same where enough is shared, else padded rows: without a kernel for sequences of
  unlike length these are faster.
* `varlen`: sequences end to end in one row, nothing shared; flash attention gets their boundaries
  (`cu_seq_lens`).

Position ids that restart at 0 do not isolate by themselves: transformers infers boundaries from them only
where neither a mask nor a KV cache is present, and a cache is made by default (`use_cache`).
"""

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedConfig

from tidemill.common.wire.arrays import Bits
from tidemill.common.wire.images import Image, images_of
from tidemill.services.trainer.groups.bins import Layout
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.groups.trie import (
    ENOUGH_IN_COMMON,
    MOST_KEYS,
    NodeCount,
    common_lengths,
    in_order,
    share_in_common,
)
from tidemill.services.trainer.policy.attention import VARLEN
from tidemill.services.trainer.policy.tile import Row, Tile

SOFTMAX_ATTENTION = {"full_attention", "sliding_attention"}
"""Kinds of layers, as transformers names them, that kernels can keep apart at boundaries."""

CPU_TILE_TOKENS = 512
"""Most tokens in one forward pass on a CPU. Measured on 256 sequences of 20 to 60 tokens, 1 M parameters, one
thread: tiles of 320 to 768 tokens 0.74 to 0.77 s, of 2,048 0.82 s; one padded rectangle of all rows 2.0 s;
row by row 1.5 s."""


def make_rows(samples: Sequence[Sample], scored: Sequence[Bits], first: int = 0) -> list[Row]:
    """One row for each segment of a sample with a scored token; `scored` marks completion tokens, [T] each.
    Tokens after the last scored one, and that one itself, predict nothing that is needed: cut off. Samples
    are numbered from `first` on."""
    rows = []
    longest = max((sample.num_tokens for sample in samples), default=0)
    # Of a completion that is scored as a whole, places and sources are slices of this.
    numbers = np.arange(longest)
    for i, (sample, scored_T) in enumerate(zip(samples, scored, strict=True), first):
        start = 0
        is_whole = bool(scored_T.all())
        for number, (prompt_ids, num_completion) in enumerate(sample.segments):
            end = start + num_completion
            chosen = numbers[:num_completion] if is_whole else np.flatnonzero(scored_T[start:end])
            if len(chosen):
                first_source = len(prompt_ids) - 1
                targets = sample.completion_ids[start:end]
                if is_whole:
                    places = numbers[start:end]
                    sources = numbers[first_source : first_source + num_completion]
                else:
                    places = start + chosen
                    sources = first_source + chosen
                    targets = targets[chosen]
                ids = sample.rows[number][: sources[-1] + 1]
                kept = None if sample.kept is None else sample.kept.take(places)
                routes = sample.routes[number] if sample.routes else None
                images: tuple[Image, ...] = ()
                if sample.images:
                    # The row ends before the last scored token, and with it go later pictures. None is cut in
                    # its middle, for that token is no part of one.
                    of_segment = images_of(sample.images, number)
                    images = tuple(image for image in of_segment if image.first < len(ids))
                rows.append(Row(i, ids, sources, targets, places, kept, routes, images))
            start = end
    return rows


def choose_layout(packing: bool, config: PreTrainedConfig, is_recurrent: bool = False) -> Layout:
    """The layout that is exact and fast for a model of this configuration (that of its text, where it has
    several), as far as a configuration tells; `forward.pick_layout` tries it.

    A model with recurrent layers (state space, linear attention, convolution) is padded: no mask stops their
    state at a boundary.
    """
    kinds = kinds_of_layers(config)
    attention = str(config._attn_implementation)
    if not packing or is_recurrent or not kinds <= SOFTMAX_ATTENTION:
        return "padded"
    if attention.startswith("flash_attention"):
        return "varlen"
    if attention == VARLEN:
        return "tree"
    return "tree_or_padded" if attention == "sdpa" else "padded"


def kinds_of_layers(config: PreTrainedConfig) -> set[str]:
    """Kinds of a text model's layers, as transformers names them."""
    window = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return set(getattr(config, "layer_types", None) or [window])


def plan_tiles(
    rows: Sequence[Row],
    layout: Layout,
    max_tokens: int,
    keeps_samples: bool = False,
    most_shared: int = 0,
) -> list[Tile]:
    """Tiles of at most `max_tokens` positions, padding included; without tensors, which `lay_out` makes.

    A row longer than that has a tile of its own. Deterministic: longest first, ties in the given order; trees
    in the order of their ids. A row that has most of its tokens in common with its tile may widen that to
    `most_shared` tokens.

    `keeps_samples` puts all rows of a sample into one tile, for losses that look at whole sequences: a sample
    of several rows has a tile of its own then, whatever its size.
    """
    if keeps_samples:
        by_sample: dict[int, list[Row]] = {}
        for row in rows:
            by_sample.setdefault(row.sample, []).append(row)
        single: list[Row] = []
        tiles_of_several: list[Tile] = []
        for rows_of_sample in by_sample.values():
            if len(rows_of_sample) == 1:
                single += rows_of_sample
                continue
            all_positions = sum(map(len, rows_of_sample)) * len(rows_of_sample)
            tiles_of_several += plan_tiles(rows_of_sample, layout, all_positions)
        return plan_tiles(single, layout, max_tokens, most_shared=most_shared) + tiles_of_several
    if layout.startswith("tree"):
        branches = [row.branch for row in rows]
        beginnings = [in_order(branch) for branch in branches]
        # Stable, as below.
        order = sorted(range(len(rows)), key=lambda number: beginnings[number])
        sorted_rows = [rows[number] for number in order]
        commons = common_lengths([branches[number] for number in order])
        lengths = [len(row) for row in sorted_rows]
        if layout == "tree" or share_in_common(lengths, commons) >= ENOUGH_IN_COMMON:
            trees = _grow(sorted_rows, commons, max_tokens, most_shared)
            return [Tile("tree", rows_of_tree) for rows_of_tree in trees]
    # Stable: rows of one length stay in the given order, which is the one of a replay.
    ordered = sorted(rows, key=len, reverse=True)
    if layout == "varlen":
        return [Tile("varlen", packed) for packed in _fill(ordered, max_tokens)]
    # A row alone is a tree, too: of one node.
    alone: Layout = "padded" if layout == "padded" else "tree"
    tiles = []
    for rectangle in _rectangles(ordered, max_tokens):
        tiles.append(Tile("padded" if len(rectangle) > 1 else alone, rectangle))
    return tiles


def _grow(rows: Sequence[Row], commons: Sequence[int], max_tokens: int, most_shared: int) -> list[list[Row]]:
    """Rows in their order, in trees of at most `max_tokens` different tokens, or of `most_shared` where the
    next row has most of its tokens in the tree already. `commons` are their `common_lengths`."""
    trees: list[list[Row]] = []
    count = NodeCount()
    num_keys = 0
    for row, common in zip(rows, commons, strict=True):
        length = len(row)
        shared = count.shared(common)
        limit = max(max_tokens, most_shared) if 2 * shared > length else max_tokens
        is_full = count.size + length - shared > limit or num_keys + length > MOST_KEYS * limit
        if not trees or is_full:
            trees.append([])
            count = NodeCount()
            num_keys = 0
        count.add(length, common if trees[-1] else 0)
        num_keys += length
        trees[-1].append(row)
    return trees


def _fill(rows: Sequence[Row], width: int) -> list[list[Row]]:
    """First-fit: rows end to end in lines of at most `width` tokens."""
    lines: list[list[Row]] = []
    room: list[int] = []
    for row in rows:
        index = next((i for i, free in enumerate(room) if len(row) <= free), len(lines))
        if index == len(lines):
            lines.append([])
            room.append(width)
        lines[index].append(row)
        room[index] -= len(row)
    return lines


def _rectangles(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Group rows, longest first, so that count times width stays within `max_tokens`."""
    groups: list[list[Row]] = []
    for row in rows:
        if not groups or (len(groups[-1]) + 1) * len(groups[-1][0]) > max_tokens:
            groups.append([])
        groups[-1].append(row)
    return groups
