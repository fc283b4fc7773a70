"""Common beginnings of sequences: a trie of token ids, grown sequence by sequence.

Each node is a run of tokens that is there once. The tokens of all nodes form one row: that of a forward pass
(`Trie`, `policy/packing.py`), or one that is only counted, where bins are formed (`NodeCount`). A sequence is
its ids [T], or ids with other numbers that have to be equal too [T, n] (`with_routes`).
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tidemill.common.wire.arrays import Int32
from tidemill.common.wire.images import Image

SHORTEST = 8
"""Fewest tokens that are split off as a shared node: fewer cost attention more than other layers save."""
SCORES_OF_A_TOKEN = 1000
"""Attention scores that take about as long as one token in all other layers, where these are small."""
MOST_KEYS = 4
"""Most tokens of a tree's rows, as a multiple of its limit of different ones: layers copy their keys."""
ENOUGH_IN_COMMON = 0.1
"""Share of common tokens from which it pays to compute them once."""

BIG_ENDIAN = np.dtype(">u4")
"""Ids as bytes have the order of the ids in this."""

Indices = NDArray[np.int64]


@dataclass(slots=True)
class Node:
    """A run of tokens, from position `start` to before `end` of each sequence that has it.

    Example: sequences of 12 and of 15 tokens with 10 in common have three nodes: of tokens 0 to 9 at `offset`
    0, and below it two from `start` 10, to `end` 12 at `offset` 10 and to `end` 15 at `offset` 12.
    """

    offset: int
    """Place of its first token in the row of all nodes."""
    start: int
    end: int
    above: "Node | None"

    @property
    def places(self) -> Indices:
        """Places of its tokens in the row of all nodes."""
        return np.arange(self.offset, self.offset + self.end - self.start)


def in_order(ids: Int32) -> bytes:
    """A key that sorts sequences so that those which begin alike are neighbours, the shorter one first."""
    return ids.astype(BIG_ENDIAN).tobytes()


def with_routes(ids: Int32, keys: Int32 | None) -> Int32:
    """A sequence [T, 3] whose tokens are equal only where their routes are too; the ids without `keys`. The
    last token has no route."""
    if keys is None:
        return ids
    padded = np.zeros((len(ids), 2), dtype=np.int32)
    padded[: len(keys)] = keys[: len(ids)]
    return np.column_stack([ids, padded])


def with_pictures(ids: Int32, images: Sequence[Image]) -> Int32:
    """A sequence [T] whose tokens of pictures are equal only where the pictures are too: parts of the
    picture's digest take the place of the ids, as numbers below 0.

    Positions of what follows a picture depend on it, too: they are equal where all before is equal.
    """
    if not images:
        return ids
    marked = ids.copy()
    for image in images:
        words = np.frombuffer(bytes.fromhex(image.digest), dtype=np.int32)
        marked[image.first : image.end] = np.resize(words | np.int32(-(2**31)), image.num_tokens)
    return marked


def num_shared(ends: Sequence[int], common: int) -> int:
    """How many tokens a sequence shares that begins with `common` tokens of the last one, whose nodes end at
    `ends`.

    Nodes that end at 20 and 50: of 50 common tokens all are shared, of 30 too, which splits the lower node;
    of 24 only 20, for a node of 4 tokens is not worth it.
    """
    if not common:
        return 0
    number = bisect_left(ends, common)
    start = ends[number - 1] if number else 0
    return common if common == ends[number] or common - start >= SHORTEST else start


class NodeCount:
    """The nodes of a trie by their lengths alone. Sequences are added in the order of `in_order`, each with
    the number of tokens that it has in common with the one before: `common_lengths`."""

    def __init__(self) -> None:
        self.size = 0
        """Number of tokens in all nodes."""
        self.num_scores = 0.0
        """Pairs of a token and one that it attends to, about."""
        self._ends: list[int] = []
        """Where the nodes of the last sequence end, each where the next one starts."""

    def shared(self, common: int) -> int:
        """How many of its first tokens a sequence would share."""
        return num_shared(self._ends, common) if self._ends else 0

    def add(self, length: int, common: int) -> int:
        """Add a sequence; returns how many of its first tokens it shares."""
        ends = self._ends
        shared = self.shared(common)
        # How many nodes of the last sequence this one shares; it may share only a part of the last of these,
        # which is split then.
        kept = bisect_left(ends, shared) + 1 if shared else 0
        if kept and ends[kept - 1] > shared:
            start = ends[kept - 2] if kept > 1 else 0
            end = ends[kept - 1]
            self.num_scores += _scores(start, shared) + _scores(shared, end) - _scores(start, end)
            ends[kept - 1] = shared
        del ends[kept:]
        if shared < length:
            ends.append(length)
            self.size += length - shared
            self.num_scores += _scores(shared, length)
        return shared


def _scores(start: int, end: int) -> float:
    """Scores of a node's tokens: with all above it, and without any with half of its square, for it is
    causal."""
    return (end - start) * (end if start else end / 2)


class Trie:
    """Sequences, best added in the order of `in_order`: each shares its beginning with the one before."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.size = 0
        """Number of tokens in all nodes."""
        self._path: list[Node] = []

    def add(self, length: int, common: int) -> Indices:
        """Add a sequence that has `common` tokens in common with the one before; returns the places of its
        tokens in the row of all nodes. Shape [length]."""
        path = self._path
        shared = num_shared([node.end for node in path], common) if path else 0
        path = [node for node in path if node.start < shared]
        if path and path[-1].end > shared:
            lower = path[-1]
            upper = Node(lower.offset, lower.start, shared, lower.above)
            lower.offset += shared - lower.start
            lower.start = shared
            lower.above = upper
            self.nodes.append(upper)
            path[-1] = upper
        if shared < length:
            node = Node(self.size, shared, length, path[-1] if path else None)
            path.append(node)
            self.nodes.append(node)
            self.size += length - shared
        self._path = path
        return path[0].places if len(path) == 1 else np.concatenate([node.places for node in path])


def common_lengths(sequences: Sequence[Int32]) -> list[int]:
    """For each sequence, how many tokens it begins with as the one before it does; 0 for the first.

    [1 2 3], [1 2 4 5], [1 2 4 5]: 0, 2, 4.
    """
    if not sequences:
        return []
    if any(ids.ndim != 1 for ids in sequences):
        return [0, *(num_common(before, ids) for before, ids in pairwise(sequences))]
    lengths = [0]
    for first in range(1, len(sequences), CHUNK_ROWS):
        lengths += _common_to_neighbours(sequences[first - 1 : first + CHUNK_ROWS])
    return lengths


CHUNK_ROWS = 64
"""Sequences that are compared in one operation: enough for its cost not to count, and few for memory."""


def _common_to_neighbours(sequences: Sequence[Int32]) -> list[int]:
    """How many tokens each sequence but the first has in common with the one before; all are ids alone."""
    shorter: list[int] = []
    before: list[Int32] = []
    after: list[Int32] = []
    for ids_before, ids in pairwise(sequences):
        count = min(len(ids_before), len(ids))
        shorter.append(count)
        before.append(ids_before[:count])
        after.append(ids[:count])
    if not shorter:
        return []
    (differs,) = (np.concatenate(before) != np.concatenate(after)).nonzero()
    # For each pair, the first place at which it may differ, and the one behind its last.
    ends = np.array(shorter).cumsum()
    starts = ends - shorter
    # A place behind all, for pairs after the last difference.
    differs = np.concatenate([differs, ends[-1:]])
    first_differing = differs[differs.searchsorted(starts)]
    commons: list[int] = (np.minimum(first_differing, ends) - starts).tolist()
    return commons


def num_common(before: Int32, after: Int32) -> int:
    """How many tokens two sequences begin with alike."""
    shorter = min(len(before), len(after)) if before.ndim == after.ndim else 0
    if not shorter:
        return 0
    differs = np.flatnonzero((before[:shorter] != after[:shorter]).reshape(shorter, -1).any(-1))
    return int(differs[0]) if len(differs) else shorter


def share_in_common(lengths: Sequence[int], commons: Sequence[int]) -> float:
    """Share of the tokens that a trie saves, for sequences in the order of `in_order` with these lengths and
    `common_lengths`. Lower, also below 0, where attention would compute more scores than with a row for each
    sequence."""
    count = NodeCount()
    alone = 0.0
    for length, common in zip(lengths, commons, strict=True):
        count.add(length, common)
        alone += length**2 / 2  # causal: half of the square
    additional = max(0.0, count.num_scores - alone)
    return 1.0 - (count.size + additional / SCORES_OF_A_TOKEN) / max(1, sum(lengths))


def num_different(sequences: Sequence[Int32]) -> int:
    """Tokens that are left where common beginnings count once; sequences in the order of `in_order`."""
    count = NodeCount()
    for ids, common in zip(sequences, common_lengths(sequences), strict=True):
        count.add(len(ids), common)
    return count.size
