"""Trees: common beginnings of a tile's rows pass through the model once.

Rows that begin alike share a path from the root of a trie of token ids; each node is a run of tokens. A token
attends to the nodes above its own and, in its own, to itself and what is before it: to what it would attend
to in a row of its own, at the same positions. So it has the same hidden state, and the gradients of all rows
meet in it: a norm in float32 rounds their sum, and not each of them.

Kernels see each node as a sequence with more keys than queries, aligned at its end. On GPUs they are those of
`varlen_attn`; elsewhere nodes of like shape are one call of scaled dot product attention.

Shape legend: T tokens of a tile, n runs of a bucket, Q and K their queries and keys, H heads, D size of one.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tidemill.services.trainer.groups.trie import Indices, Node
from tidemill.services.trainer.policy.precision import autocast_dtype

if TYPE_CHECKING:
    from tidemill.services.trainer.policy.columns import Columns

TREE = "tree"
"""The name under which attention gets a tile's `Tree`."""
CHANGES_OF_SCORES = ("softcap", "s_aux", "position_bias")
"""Arguments of attention that our kernels do not support."""
SLACK = 1 << 14
"""Unneeded scores that a bucket may have beyond half of those it needs: about as costly as one more call."""
MOST_SCORES = 1 << 22
"""A node with a sliding window and more scores than these is computed in runs, each with the keys that it
sees: the mask of all its keys would take 5 GB for 32,768 tokens in float32."""
LEAST_RUN = 256
"""Queries of such a run, or as many as the window has tokens."""


def no_mask(device: torch.device) -> Tensor:
    """The mask that a model gets with a tree. It has four dimensions, so that transformers takes it as it is
    and makes none; it is empty, so that a model which reads it fails."""
    return torch.ones((1, 1, 0, 0), dtype=torch.bool, device=device)


def rows_at(tensor: Tensor, places: Tensor) -> Tensor:
    """`tensor[places]`, also where places occur more than once; its gradient has the same bits each time."""
    if tensor.device.type != "cpu":
        return tensor[places]  # sorts the places and sums in their order; `index_select` adds atomically here
    # On a CPU it is the other way round: threads add the gradient of indexing in the order of their arrival.
    rows: Tensor = tensor.index_select(0, places.flatten()).unflatten(0, places.shape)
    return rows


class Boundaries(NamedTuple):
    """Arguments of `varlen_attn`. `keys` are the places of all keys; None: the tile's tokens, in order."""

    keys: Tensor | None
    queries_at: Tensor
    keys_at: Tensor
    most_queries: int
    most_keys: int


class Bucket(NamedTuple):
    """Runs of like shape; places in the tile, and which key each query sees."""

    queries_nQ: Tensor
    keys_nK: Tensor
    mask: Tensor | None
    """Added to scores, [n or 1, 1, Q, K]. None: each query sees the keys up to its own number."""


class Run(NamedTuple):
    """Some consecutive queries of a node, or all, and the keys that they may see."""

    queries: Indices
    keys: Indices
    start: int
    """Which of the keys is that of the first query; the last query's is the last."""

    @property
    def end(self) -> int:
        return len(self.keys)


class Tree:
    """A tile's nodes, as attention needs them."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = sorted(nodes, key=lambda node: node.offset)
        self._made: dict[Any, Any] = {}
        self.windows: set[int | None] = set()
        """Sliding windows that layers have asked for."""
        self.columns: Columns | None = None
        """Set where this rank has only some columns of the tile."""

    @cached_property
    def _paths(self) -> list[Indices]:
        """For each node, the places of its tokens and of those above it."""
        paths: dict[int, Indices] = {}
        for node in sorted(self._nodes, key=lambda node: node.start):  # parents first
            above = [] if node.above is None else [paths[id(node.above)]]
            paths[id(node)] = np.concatenate([*above, node.places])
        return [paths[id(node)] for node in self._nodes]

    @property
    def positions_T(self) -> Indices:
        return np.concatenate([np.arange(node.start, node.end) for node in self._nodes])

    def boundaries(self, device: torch.device) -> Boundaries:
        """Made once: all layers ask for the same."""
        boundaries: Boundaries = self._made.get(device) or self._made.setdefault(
            device, self._boundaries(device)
        )
        return boundaries

    def buckets(
        self, device: torch.device, window: int | None, dtype: torch.dtype
    ) -> tuple[list[Bucket], Tensor]:
        """Buckets, and for each token of the tile its place among their padded outputs. Shape [T]."""
        self.windows.add(window)
        key = (device, window, dtype)
        buckets: tuple[list[Bucket], Tensor]
        buckets = self._made.get(key) or self._made.setdefault(key, self._buckets(*key))
        return buckets

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiler would do its work again for each tree
    def spread(
        self, key: Tensor, value: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
        """The arguments of `varlen_attn` after the queries. Shapes: key and value [T, heads, D]."""
        self.windows.add(window)
        places, *boundaries = self.boundaries(key.device)
        if places is not None:
            key = rows_at(key, places)
            value = rows_at(value, places)
        return key, value, *boundaries  # type: ignore[return-value]

    def _boundaries(self, device: torch.device) -> Boundaries:
        queries = [node.end - node.start for node in self._nodes]
        keys = [node.end for node in self._nodes]

        def at(lengths: Sequence[int]) -> Tensor:
            # The kernels take no int64 here.
            return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)

        is_flat = all(node.above is None for node in self._nodes)
        places = None if is_flat else torch.from_numpy(np.concatenate(self._paths)).to(device)
        return Boundaries(places, at(queries), at(keys), max(queries), max(keys))

    def _buckets(
        self, device: torch.device, window: int | None, dtype: torch.dtype
    ) -> tuple[list[Bucket], Tensor]:
        runs_of_node = [
            _runs_of(node, path, window) for node, path in zip(self._nodes, self._paths, strict=True)
        ]
        roots = [runs for node, runs in zip(self._nodes, runs_of_node, strict=True) if node.above is None]
        others = [
            runs for node, runs in zip(self._nodes, runs_of_node, strict=True) if node.above is not None
        ]
        groups = [*_alike(list(chain(*roots))), *_alike(list(chain(*others)))]
        buckets: list[Bucket] = []
        filled = 0
        back_T = np.zeros(sum(node.end - node.start for node in self._nodes), dtype=np.int64)
        for runs in groups:
            widest = max(len(run.queries) for run in runs)
            longest = max(run.end for run in runs)
            queries_nQ = np.zeros((len(runs), widest), dtype=np.int64)
            keys_nK = np.zeros((len(runs), longest), dtype=np.int64)
            for row, run in enumerate(runs):
                queries_nQ[row, : len(run.queries)] = run.queries
                keys_nK[row, : run.end] = run.keys
                back_T[run.queries] = filled + row * widest + np.arange(len(run.queries))
            filled += queries_nQ.size
            mask = None
            if any(run.start for run in runs) or (window is not None and window < longest):
                seen = torch.from_numpy(_mask(runs, widest, longest, window)).to(device)
                # Once for all layers: attention would make, and keep, one of its own in each.
                mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)
            queries = torch.from_numpy(queries_nQ).to(device)
            keys = torch.from_numpy(keys_nK).to(device)
            buckets.append(Bucket(queries, keys, mask))
        return buckets, torch.from_numpy(back_T).to(device)


def _runs_of(node: Node, path: Indices, window: int | None) -> list[Run]:
    """The node as one run; with a sliding window and many scores as several, whose keys begin at the first
    that their first query sees. 5 tokens, a window of 2 and runs of 2: keys 0 to 1, 1 to 3, 3 to 4."""
    num_queries = node.end - node.start
    if window is None or window >= node.end or num_queries * node.end <= MOST_SCORES:
        return [Run(node.places, path, node.start)]
    size = max(window, LEAST_RUN)
    runs: list[Run] = []
    for first in range(0, num_queries, size):
        queries = node.places[first : first + size]
        first_position = node.start + first
        first_key = max(0, first_position - window + 1)
        runs.append(Run(queries, path[first_key : first_position + len(queries)], first_position - first_key))
    return runs


def _alike(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups of runs of so similar shapes that one call for a group computes few unneeded scores."""
    groups: list[list[Run]] = []
    widest = 0
    longest = 0
    needed = 0
    for run in sorted(runs, key=lambda run: (-run.end, run.start)):
        keys = run.end
        queries = len(run.queries)
        computed = (len(groups[-1]) + 1) * max(widest, queries) * max(longest, keys) if groups else 0
        if not groups or computed > 1.5 * (needed + queries * keys) + SLACK:
            groups.append([])
            widest = 0
            longest = 0
            needed = 0
        groups[-1].append(run)
        widest = max(widest, queries)
        longest = max(longest, keys)
        needed += queries * keys
    return groups


def _mask(runs: Sequence[Run], widest: int, longest: int, window: int | None) -> NDArray[np.bool_]:
    """Which of a run's keys each of its queries sees. Shape [n, 1, Q, K], or [1, 1, Q, K] for all."""
    if window is None and len({run.start for run in runs}) == 1:
        runs = [max(runs, key=lambda run: run.end)]
    starts = np.array([run.start for run in runs])[:, None]
    ends = np.array([run.end for run in runs])[:, None]
    # Padding repeats the last token: a query that sees nothing gives NaN.
    places_nQ = np.minimum(starts + np.arange(widest), ends - 1)[:, None, :, None]
    keys_K = np.arange(longest)
    mask: NDArray[np.bool_] = keys_K <= places_nQ
    return mask if window is None else mask & (keys_K > places_nQ - window)


def attend_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Transformers' scaled dot product attention, and that of trees. Shapes: query [1, heads, T, D], key
    [1, key heads, T, D], value [1, key heads, T, E]; returns [1, T, heads, E]; W columns in place of T where
    the tree has `columns`. Raises ValueError: scores are changed in a way that it does not know."""
    tree: Tree | None = kwargs.pop(TREE, None)
    if tree is None:
        attended_plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return attended_plain
    has_mask = attention_mask is not None and attention_mask.numel() > 0
    if has_mask or any(kwargs.get(name) is not None for name in CHANGES_OF_SCORES):
        raise ValueError("attention along a tree takes no mask, no cap of scores, no sinks and no bias")
    if tree.columns is not None:
        query, key, value = map(tree.columns.to_heads, (query, key, value))
    attended = _attend_buckets(tree, query, key, value, kwargs.get("scaling"), kwargs.get("sliding_window"))
    return (attended if tree.columns is None else tree.columns.to_columns(attended)), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # shapes differ from tile to tile
def _attend_buckets(
    tree: Tree, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    buckets, back_T = tree.buckets(query.device, window, autocast_dtype(query) or query.dtype)
    query_THD = query[0].transpose(0, 1)
    key_THD = key[0].transpose(0, 1)
    value_THD = value[0].transpose(0, 1)
    groups = query.shape[1] // key.shape[1]
    is_grouped = query.device.type == "cpu"
    if not is_grouped:  # a kernel of GPUs that takes a mask takes no groups
        key_THD = key_THD.repeat_interleave(groups, 1)
        value_THD = value_THD.repeat_interleave(groups, 1)
    outputs = []
    for queries_nQ, keys_nK, mask in buckets:
        attended = F.scaled_dot_product_attention(
            rows_at(query_THD, queries_nQ).transpose(1, 2),
            rows_at(key_THD, keys_nK).transpose(1, 2),
            rows_at(value_THD, keys_nK).transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=is_grouped and groups > 1,
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return rows_at(torch.cat(outputs), back_T)[None]


# Under sdpa's name: models that do not support it keep their own attention.
AttentionInterface.register("sdpa", attend_sdpa)
