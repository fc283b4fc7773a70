"""A tile: one forward pass over rows of token ids, and the tensors that it is made of.

Which rows share a tile is planned first, by their lengths alone (`packing.py`); its tensors are made when its
pass begins.

Shape legend: B rows, T columns, N scored tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.common.wire.arrays import Int32
from tidemill.common.wire.choices import Rows
from tidemill.common.wire.images import Image
from tidemill.services.trainer.groups.bins import Layout
from tidemill.services.trainer.groups.trie import (
    Indices,
    Node,
    Trie,
    common_lengths,
    with_pictures,
    with_routes,
)
from tidemill.services.trainer.policy.trees import TREE, Tree

if TYPE_CHECKING:
    from tidemill.services.trainer.algorithm.losses.routing import LayerRouting
    from tidemill.services.trainer.groups.choices import Routes
    from tidemill.services.trainer.policy.columns import Columns

NOT_MADE = torch.empty(0, dtype=torch.long)
"""In place of tensors of a tile that is only planned."""


@dataclass(slots=True, eq=False)
class Row:
    """A row of a tile: what has to pass through the model to score tokens of one sequence, which is a whole
    sample, or one segment of it.

    Of a sample with the prompt [1 2] and the completion [4 5 6], where 5 is not scored:

        ids      1 2 4 5      (6 predicts nothing)
        sources  1 3          places in `ids` whose hidden states predict the targets
        targets  4 6
        places   0 2          places of the targets among the sample's completion tokens
    """

    sample: int
    """Which of the samples of a micro-batch it belongs to."""
    ids: Int32
    """[L]."""
    sources: Indices
    """[N], ascending."""
    targets: Int32
    """[N]."""
    places: Indices
    """[N]."""
    kept: Rows | None = None
    """[N], the ids that each target was sampled from; `Rows` are no rows of a tile (`wire/choices.py`)."""
    routes: "Routes | None" = None
    """Routes of at least the row's tokens."""
    images: tuple[Image, ...] = ()
    """Pictures that some of its tokens stand for."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def branch(self) -> Int32:
        """The sequence that a trie compares. Shape [L], or [L, 3] with routes."""
        if not self.images and self.routes is None:
            return self.ids
        sequence = with_pictures(self.ids, self.images)
        return with_routes(sequence, None if self.routes is None else self.routes.keys)


class ComputedInputs(Protocol):
    """Inputs of a pass that each model computes with its own weights."""

    def of_model(self, model: PreTrainedModel, device: torch.device) -> dict[str, Any]:
        """More arguments for the model, with gradients where its weights are trained."""

    def cut(self, columns: "Columns") -> "ComputedInputs":
        """The inputs of this rank's columns alone."""


@dataclass(slots=True, eq=False)
class Tile:
    """One forward pass. Its layout and rows are planned, `lay_out` gives it tensors, and `TokenScorer.score`
    adds the scores. Each makes another one: none is changed. Not frozen, which would take twice as long.

    The rows [1 2 4 5] with targets 4 and 6, and [1 2 7] with targets 7 and 3, as `padded`:

        ids_BT     1 2 4 5     sources_N  1 3 5 6    (places in the flattened [B * T])
                   1 2 7 0     targets_N  4 6 7 3

    With `columns` it is a rank's part of a tile: ids, sources and targets are those of its columns, rows
    those of all.
    """

    layout: Layout
    rows: Sequence[Row]
    """Those that the N scored tokens come from, in their order."""
    ids_BT: Tensor = NOT_MADE
    """[B, T], int64."""
    sources_N: Tensor = NOT_MADE
    """[N], int64: flattened positions whose hidden state predicts `targets_N`."""
    targets_N: Tensor = NOT_MADE
    """[N], int64."""
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    computed: ComputedInputs | None = None
    positions_of_rows: Sequence[Indices] = ()
    """For each row, the flattened positions of its tokens, [L]; rows of a tree share some."""
    columns: "Columns | None" = None
    kept: Rows | None = None
    """[N], the ids that each scored token was sampled from; a position may predict several tokens, each with
    ids of its own."""
    banned_ids: Tensor | None = None
    """[ids], int64: those that the engine never samples, and that are left out of all distributions."""
    routes: Tensor | None = None
    """[B * T, layers, experts of a token], int16: what the engine chose; -1 at padding."""
    logprobs_N: Tensor = NOT_MADE
    """[N], float32 or wider, of all ranks that share the tile, as are the other scores."""
    entropies_N: Tensor = NOT_MADE
    """[N], of the distribution that each token was sampled from."""
    log_mass_N: Tensor = NOT_MADE
    """[N], logarithm of the probability of the ids that sampling kept."""
    hidden_NH: Tensor | None = None
    """[N, H], the last hidden states that predict this rank's tokens, where they were asked for."""
    routing: "tuple[LayerRouting, ...]" = ()
    """The routers' outputs at the positions that predict the tokens, where a gradient is wanted."""
    changed_N: Tensor | None = None
    """[N], share of layers whose router would have chosen other experts than it was given."""

    @property
    def samples(self) -> list[int]:
        """Numbers of the samples, in the order of their scored tokens."""
        return [row.sample for row in self.rows]

    @property
    def num_scored(self) -> int:
        """N, of all ranks that share it."""
        return sum(len(row.targets) for row in self.rows)


NO_ROW = Row(
    sample=0,
    ids=np.zeros(1, dtype=np.int32),
    sources=np.zeros(1, dtype=np.int64),
    targets=np.zeros(1, dtype=np.int32),
    places=np.zeros(1, dtype=np.int64),
)
"""The row of a rank without rows, in passes that all ranks make."""
NOTHING = Tile(
    layout="padded",
    rows=(),
    ids_BT=torch.ones((1, 1), dtype=torch.long),
    sources_N=torch.zeros(1, dtype=torch.long),
    targets_N=torch.zeros(1, dtype=torch.long),
)
"""A forward pass over one token, of no sample."""


def lay_out(tile: Tile) -> Tile:
    """A planned tile, with its tensors."""
    if tile.layout == "padded":
        return _padded(tile, [[row] for row in tile.rows], {})
    if tile.layout == "varlen":
        return _varlen(tile)
    return _single_branch(tile) if len(tile.rows) == 1 else _tree(tile)


def _varlen(tile: Tile) -> Tile:
    """All sequences in one line; flash attention takes the boundaries as they are."""
    lengths = [len(row) for row in tile.rows]
    # The kernels take no int64 here.
    boundaries = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    kwargs = {
        "position_ids": torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None],
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }
    return _padded(tile, [tile.rows], kwargs)


def _single_branch(tile: Tile) -> Tile:
    """A row alone: a tree of one node, whose tokens are in the order of the row."""
    (row,) = tile.rows
    node = Node(0, 0, len(row), None)
    # In numpy as far as it goes: one of torch's operations takes several times as long.
    positions_T = node.places
    return Tile(
        layout=tile.layout,
        rows=tile.rows,
        ids_BT=torch.from_numpy(row.ids[None].astype(np.int64)),
        sources_N=torch.from_numpy(row.sources),
        targets_N=torch.from_numpy(row.targets.astype(np.int64)),
        model_kwargs={"position_ids": torch.from_numpy(positions_T[None]), TREE: Tree([node])},
        positions_of_rows=[positions_T],
        kept=row.kept,
        routes=None if row.routes is None else _routes(tile.rows, [positions_T], len(row)),
    )


def _tree(tile: Tile) -> Tile:
    """All rows as the branches of one tree."""
    rows = tile.rows
    trie = Trie()
    commons = common_lengths([row.branch for row in rows])
    positions = [trie.add(len(row), common) for row, common in zip(rows, commons, strict=True)]
    ids_T = np.zeros(trie.size, dtype=np.int64)
    sources = []
    for positions_L, row in zip(positions, rows, strict=True):
        ids_T[positions_L] = row.ids
        sources.append(positions_L[row.sources])
    tree = Tree(trie.nodes)
    return Tile(
        layout=tile.layout,
        rows=rows,
        ids_BT=torch.from_numpy(ids_T)[None],
        sources_N=torch.from_numpy(np.concatenate(sources)),
        targets_N=_targets(rows),
        model_kwargs={"position_ids": torch.from_numpy(tree.positions_T)[None], TREE: tree},
        positions_of_rows=positions,
        kept=_kept(rows),
        routes=_routes(rows, positions, trie.size),
    )


def _padded(tile: Tile, lines: Sequence[Sequence[Row]], model_kwargs: dict[str, Any]) -> Tile:
    """Write lines of the tile's rows, in their order, into a rectangle that is padded with token 0, and note
    where the scored tokens are."""
    width = max(sum(map(len, line)) for line in lines)
    ids_BT = np.zeros((len(lines), width), dtype=np.int64)
    sources: list[Indices] = []
    positions: list[Indices] = []
    for b, line in enumerate(lines):
        start = 0
        for row in line:
            ids_BT[b, start : start + len(row)] = row.ids
            first = b * width + start
            positions.append(first + np.arange(len(row)))
            sources.append(first + row.sources)
            start += len(row)
    rows = tile.rows
    return Tile(
        layout=tile.layout,
        rows=rows,
        ids_BT=torch.from_numpy(ids_BT),
        sources_N=torch.from_numpy(np.concatenate(sources)),
        targets_N=_targets(rows),
        model_kwargs=model_kwargs,
        positions_of_rows=positions,
        kept=_kept(rows),
        routes=_routes(rows, positions, ids_BT.size),
    )


def _routes(rows: Sequence[Row], positions_of_rows: Sequence[Indices], size: int) -> Tensor | None:
    """The rows' routes at the positions of their tokens in a tile of `size` positions."""
    routes: NDArray[np.int16] | None = None
    for row, positions_L in zip(rows, positions_of_rows, strict=True):
        if row.routes is None:
            continue
        experts = row.routes.experts
        if routes is None:
            routes = np.full((size, *experts.shape[1:]), -1, dtype=np.int16)
        routes[positions_L] = experts[: len(row)]
    return None if routes is None else torch.from_numpy(routes)


def _targets(rows: Sequence[Row]) -> Tensor:
    return torch.from_numpy(np.concatenate([row.targets for row in rows]).astype(np.int64))


def _kept(rows: Sequence[Row]) -> Rows | None:
    if all(row.kept is None for row in rows):
        return None
    return Rows.joined([Rows.nothing(len(row.targets)) if row.kept is None else row.kept for row in rows])
