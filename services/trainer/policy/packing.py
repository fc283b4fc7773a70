"""Lays the samples of a micro-batch out as rectangles of token ids ("tiles"), one forward pass each.

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

Shape legend: B rows, T columns, N scored tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tidemill.common.wire.arrays import Bits, Int32
from tidemill.common.wire.choices import Rows
from tidemill.services.trainer.groups.bins import Layout
from tidemill.services.trainer.groups.sample import Routes, Sample
from tidemill.services.trainer.groups.trie import (
    ENOUGH_IN_COMMON,
    MOST_KEYS,
    Indices,
    NodeCount,
    Trie,
    common_lengths,
    in_order,
    share_in_common,
    with_routes,
)
from tidemill.services.trainer.policy.attention import VARLEN
from tidemill.services.trainer.policy.columns import Columns, ContextGroup
from tidemill.services.trainer.policy.trees import TREE, Tree

SOFTMAX_ATTENTION = {"full_attention", "sliding_attention"}
"""Kinds of layers, as transformers names them, that kernels can keep apart at boundaries."""

CPU_TILE_TOKENS = 512
"""Most tokens in one forward pass on a CPU. Measured on 256 sequences of 20 to 60 tokens, 1 M parameters, one
thread: tiles of 320 to 768 tokens 0.74 to 0.77 s, of 2,048 0.82 s; one padded rectangle of all rows 2.0 s;
row by row 1.5 s."""


@dataclass(slots=True, eq=False)
class TokenRow:
    """The part of one sequence that has to pass through the model to score its tokens: a whole sample, or one
    segment of it. `places` are those of the targets among the sample's completion tokens."""

    sample: int
    ids: Int32
    sources: Int32
    targets: Int32
    places: Int32
    kept: Rows | None = None
    """For each target, the ids that it was sampled from."""
    routes: Routes | None = None
    """Routes of at least its own tokens."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def branch(self) -> Int32:
        """The sequence that a trie compares."""
        return with_routes(self.ids, None if self.routes is None else self.routes.keys)


@dataclass(frozen=True, slots=True)
class Tile:
    """One forward pass. `rows` says which rows the N scored tokens come from, in their order. `sources_N`
    indexes the flattened [B * T] positions whose hidden state predicts `targets_N`. With `columns` it is a
    rank's part of a tile: ids, sources and targets are those of its own columns, rows those of all."""

    rows: tuple[TokenRow, ...]
    ids_BT: Tensor
    sources_N: Tensor
    targets_N: Tensor
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    columns: Columns | None = None
    kept: Rows | None = None
    """For each scored token, the ids that it was sampled from; a position may predict several tokens, each
    with ids of its own."""
    routes: Tensor | None = None
    """[B * T, layers, experts of a token], int16: what the engine chose; -1 at padding."""

    @property
    def samples(self) -> list[int]:
        """Indices of the samples, in the order of their scored tokens."""
        return [row.sample for row in self.rows]


NO_ROW = TokenRow(0, *(np.zeros(1, dtype=np.int32) for _ in range(4)))  # type: ignore[arg-type]
"""The row of a rank without rows, in passes that all ranks make."""
NOTHING = Tile(
    rows=(),
    ids_BT=torch.ones((1, 1), dtype=torch.long),
    sources_N=torch.zeros(1, dtype=torch.long),
    targets_N=torch.zeros(1, dtype=torch.long),
)
"""A forward pass over one token, of no sample."""


def make_rows(samples: Sequence[Sample], scored: Sequence[Bits], first: int = 0) -> list[TokenRow]:
    """One row for each segment of a sample with a scored token; `scored` marks completion tokens, [T] each.
    Tokens after the last scored one, and that one itself, predict nothing that is needed: cut off. Samples
    are numbered from `first` on."""
    rows = []
    longest = max((sample.num_tokens for sample in samples), default=0)
    # Of a completion that is scored as a whole, places and sources are slices of this.
    numbers = np.arange(longest, dtype=np.int32)
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
                    places = (start + chosen).astype(np.int32)
                    sources = (first_source + chosen).astype(np.int32)
                    targets = targets[chosen]
                ids = sample.rows[number][: sources[-1] + 1]
                kept = sample.kept and sample.kept.take(places)
                routes = sample.routes[number] if sample.routes else None
                rows.append(TokenRow(i, ids, sources, targets, places, kept, routes))
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
    return "tree" if attention == VARLEN else "tree_or_padded" if attention == "sdpa" else "padded"


def kinds_of_layers(config: PreTrainedConfig) -> set[str]:
    """Kinds of a text model's layers, as transformers names them."""
    window = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    return set(getattr(config, "layer_types", None) or [window])


PlannedTile = tuple[Layout, Sequence[TokenRow]]
"""The layout and the rows of a tile whose tensors are not made yet."""


def plan_tiles(
    rows: Sequence[TokenRow],
    layout: Layout,
    max_tokens: int,
    keeps_samples: bool = False,
    most_shared: int = 0,
) -> list[PlannedTile]:
    """Tiles of at most `max_tokens` positions, padding included; makes no tensor.

    A row longer than that has a tile of its own. Deterministic: longest first, ties in the given order; trees
    in the order of their ids. A row that has most of its tokens in common with its tile may widen that to
    `most_shared` tokens.

    `keeps_samples` puts all rows of a sample into one tile, for losses that look at whole sequences: a sample
    of several rows has a tile of its own then, whatever its size.
    """
    if keeps_samples:
        by_sample: dict[int, list[TokenRow]] = {}
        for row in rows:
            by_sample.setdefault(row.sample, []).append(row)
        several = [own for own in by_sample.values() if len(own) > 1]
        single = [own[0] for own in by_sample.values() if len(own) == 1]
        whole = [tile for own in several for tile in plan_tiles(own, layout, sum(map(len, own)) * len(own))]
        return plan_tiles(single, layout, max_tokens, most_shared=most_shared) + whole
    if layout.startswith("tree"):
        # Stable, as below.
        sorted_rows = sorted(rows, key=lambda row: in_order(row.branch))
        commons = common_lengths([row.branch for row in sorted_rows])
        lengths = [len(row) for row in sorted_rows]
        if layout == "tree" or share_in_common(lengths, commons) >= ENOUGH_IN_COMMON:
            return [("tree", branches) for branches in _grow(sorted_rows, commons, max_tokens, most_shared)]
    # Stable: rows of one length stay in the given order, which is the one of a replay.
    ordered = sorted(rows, key=len, reverse=True)
    if layout == "varlen":
        return [("varlen", packed) for packed in _fill(ordered, max_tokens)]
    # A row alone is a tree, too: of one node.
    alone: Layout = "padded" if layout == "padded" else "tree"
    return [("padded" if len(own) > 1 else alone, own) for own in _rectangles(ordered, max_tokens)]


def make_tile(planned: PlannedTile) -> Tile:
    """A planned tile, with its tensors."""
    layout, rows = planned
    if layout == "padded":
        return _rectangle([[row] for row in rows])
    return _varlen_tile(rows) if layout == "varlen" else _tree_tile(rows)


def cut_tile(tile: Tile, context: ContextGroup) -> Tile:
    """This rank's columns of a tree's tile."""
    columns = Columns(context, tile.ids_BT.shape[1], tile.sources_N)
    tree: Tree = tile.model_kwargs[TREE]
    tree.columns = columns  # for attention
    routes = tile.routes
    if routes is not None:
        routes = columns.cut(routes.flatten(1).T, filler=-1).T.unflatten(1, routes.shape[1:])
    return replace(
        tile,
        ids_BT=columns.cut(tile.ids_BT),
        sources_N=tile.sources_N[columns.own_n] - columns.own.start,
        targets_N=tile.targets_N[columns.own_n],
        model_kwargs={"position_ids": columns.cut(tile.model_kwargs["position_ids"]), TREE: tree},
        columns=columns,
        kept=tile.kept and tile.kept.take(columns.own_n.numpy()),
        routes=routes,
    )


def _grow(
    rows: Sequence[TokenRow], commons: Sequence[int], max_tokens: int, most_shared: int
) -> list[list[TokenRow]]:
    """Rows in their order, in trees of at most `max_tokens` different tokens, or of `most_shared` where the
    next row has most of its tokens in the tree already. `commons` are their `common_lengths`."""
    trees: list[list[TokenRow]] = []
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


def _fill(rows: Sequence[TokenRow], width: int) -> list[list[TokenRow]]:
    """First-fit: rows end to end in lines of at most `width` tokens."""
    lines: list[list[TokenRow]] = []
    room: list[int] = []
    for row in rows:
        index = next((i for i, free in enumerate(room) if len(row) <= free), len(lines))
        if index == len(lines):
            lines.append([])
            room.append(width)
        lines[index].append(row)
        room[index] -= len(row)
    return lines


def _rectangles(rows: Sequence[TokenRow], max_tokens: int) -> list[list[TokenRow]]:
    """Group rows, longest first, so that count times width stays within `max_tokens`."""
    groups: list[list[TokenRow]] = []
    for row in rows:
        if not groups or (len(groups[-1]) + 1) * len(groups[-1][0]) > max_tokens:
            groups.append([])
        groups[-1].append(row)
    return groups


def _varlen_tile(rows: Sequence[TokenRow]) -> Tile:
    """All sequences in one line; flash attention takes the boundaries as given."""
    lengths = [len(row) for row in rows]
    # The kernels take no int64 here.
    boundaries = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    kwargs = {
        "position_ids": torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None],
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    return _rectangle([rows], kwargs)


def _tree_tile(rows: Sequence[TokenRow]) -> Tile:
    """All rows as the branches of one tree."""
    trie = Trie()
    commons = common_lengths([row.branch for row in rows])
    places = [trie.add(len(row), common) for row, common in zip(rows, commons, strict=True)]
    ids_T = np.zeros(trie.size, dtype=np.int64)
    for places_of_row, row in zip(places, rows, strict=True):
        ids_T[places_of_row] = row.ids
    sources = [of_row[row.sources] for of_row, row in zip(places, rows, strict=True)]
    tree = Tree(trie)
    return Tile(
        rows=tuple(rows),
        ids_BT=torch.from_numpy(ids_T)[None],
        sources_N=torch.from_numpy(np.concatenate(sources)),
        targets_N=_targets(rows),
        model_kwargs={"position_ids": torch.from_numpy(tree.positions_T)[None], TREE: tree},
        kept=_kept(rows),
        routes=_routes(rows, places, trie.size),
    )


def _rectangle(lines: Sequence[Sequence[TokenRow]], model_kwargs: dict[str, Any] | None = None) -> Tile:
    """Write lines of rows into a rectangle, padded with token 0, and note where the scored tokens are."""
    width = max(sum(map(len, line)) for line in lines)
    ids_BT = np.zeros((len(lines), width), dtype=np.int64)
    sources: list[Int32] = []
    places: list[Indices] = []
    for b, line in enumerate(lines):
        start = 0
        for row in line:
            ids_BT[b, start : start + len(row)] = row.ids
            places.append(b * width + start + np.arange(len(row)))
            sources.append(row.sources + (b * width + start))
            start += len(row)
    rows = tuple(row for line in lines for row in line)
    return Tile(
        rows=rows,
        ids_BT=torch.from_numpy(ids_BT),
        sources_N=torch.from_numpy(np.concatenate(sources).astype(np.int64)),
        targets_N=_targets(rows),
        model_kwargs=model_kwargs or {},
        kept=_kept(rows),
        routes=_routes(rows, places, ids_BT.size),
    )


def _routes(rows: Sequence[TokenRow], places: Sequence[Indices], size: int) -> Tensor | None:
    """The rows' routes at the places of their tokens in a tile of so many positions."""
    routed = [(row, row.routes.experts, own) for row, own in zip(rows, places, strict=True) if row.routes]
    if not routed:
        return None
    routes = np.full((size, *routed[0][1].shape[1:]), -1, dtype=np.int16)
    for row, experts, own in routed:
        routes[own] = experts[: len(row)]
    return torch.from_numpy(routes)


def _targets(rows: Sequence[TokenRow]) -> Tensor:
    return torch.from_numpy(np.concatenate([row.targets for row in rows]).astype(np.int64))


def _kept(rows: Sequence[TokenRow]) -> Rows | None:
    if all(row.kept is None for row in rows):
        return None
    return Rows.joined([Rows.nothing(len(row.targets)) if row.kept is None else row.kept for row in rows])
