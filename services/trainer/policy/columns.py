"""Long sequences over several ranks: each has some of a tile's columns, and attends with some of the heads.

Ulysses (arXiv 2309.14509). The ranks of a context group have equal runs of the tile's columns, with padding
at the end. Around the attention kernel they swap heads for columns, all to all: each computes whole sequences
with its share of the heads. All else of a layer looks at one column at a time. Every rank gets the logprobs
of all scored tokens, with a gradient for those of its own columns: the same loss on each, and parameter
gradients that, summed over the group, are those of one rank.

Shape legend: C ranks of the group, T columns of the tile, W columns of a rank, N scored tokens, n of them in
this rank's columns, H heads, D size of one.
"""

from dataclasses import replace
from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

from tidemill.services.trainer.policy.tile import Tile
from tidemill.services.trainer.policy.trees import TREE, Tree


class ContextGroup:
    """The ranks that share tiles; `rank` is this one's number among `size`."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.group = group
        self.rank = rank
        self.size = size


class Columns:
    """The columns and scored tokens of one tile that each rank has."""

    def __init__(self, context: ContextGroup, num_columns: int, sources_N: Tensor) -> None:
        self._context = context
        self._num_columns = num_columns
        width = -(-num_columns // context.size)
        self._width = width
        self.own_columns = slice(context.rank * width, (context.rank + 1) * width)
        holders_N = sources_N // width
        self._order_N = torch.argsort(holders_N, stable=True)
        """The scored tokens of the first rank, of the second, and so on."""
        self._counts: list[int] = torch.bincount(holders_N, minlength=context.size).tolist()
        self.own_n = self._order_N.split(self._counts)[context.rank]

    def cut(self, rows_RT: Tensor, filler: int = 0) -> Tensor:
        """This rank's columns of [R, T], padded with `filler`. Shape [R, W]; more dimensions may come
        first."""
        padding = self._width * self._context.size - self._num_columns
        return F.pad(rows_RT, [0, padding], value=filler)[..., self.own_columns]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # widths differ from tile to tile
    def to_heads(self, states: Tensor) -> Tensor:
        """All columns of this rank's heads, from this rank's columns of all heads: [1, H, W, D] to [1, H / C,
        T, D]. Heads are repeated where their number is not a multiple of C."""
        size = self._context.size
        states_HWD = states[0].repeat_interleave(size // gcd(states.shape[1], size), 0)
        blocks = states_HWD.unflatten(0, (size, -1)).contiguous()
        # One block of heads for each rank becomes one block of columns from each rank.
        swapped = all_to_all_single_autograd(blocks, None, None, self._context.group)
        return swapped.transpose(0, 1).flatten(1, 2)[:, : self._num_columns][None]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def to_columns(self, attended: Tensor) -> Tensor:
        """The way back: [1, T, H / C, D] to [1, W, H, D]."""
        size = self._context.size
        width = self._width
        padded = F.pad(attended[0], [0, 0, 0, 0, 0, size * width - self._num_columns])
        blocks = padded.unflatten(0, (size, width)).contiguous()
        swapped = all_to_all_single_autograd(blocks, None, None, self._context.group)
        return swapped.transpose(0, 1).flatten(1, 2)[None]

    def joined(self, values_n: Tensor) -> Tensor:
        """Values of all scored tokens, from each rank's: [n, ...] to [N, ...], with gradient for its own."""
        padded = values_n.new_zeros((max(self._counts), *values_n.shape[1:]))
        padded[: len(values_n)] = values_n.detach()
        parts = [torch.empty_like(padded) for _ in self._counts]
        dist.all_gather(parts, padded, group=self._context.group)
        pieces = [padded_n[:count] for padded_n, count in zip(parts, self._counts, strict=True)]
        by_rank_N = torch.cat(pieces)
        values_N = torch.empty_like(by_rank_N)
        values_N[self._order_N] = by_rank_N
        return values_N.index_copy(0, self.own_n.to(values_n.device), values_n)


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
        sources_N=tile.sources_N[columns.own_n] - columns.own_columns.start,
        targets_N=tile.targets_N[columns.own_n],
        model_kwargs={"position_ids": columns.cut(tile.model_kwargs["position_ids"]), TREE: tree},
        computed=tile.computed and tile.computed.cut(columns),
        columns=columns,
        kept=tile.kept and tile.kept.take(columns.own_n.numpy()),
        routes=routes,
    )
