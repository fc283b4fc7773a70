"""Common beginnings of sequences: a trie of token ids, grown sequence by sequence.

Each node is a run of tokens that is there once. The tokens of all nodes form one row: that of a forward pass
(`policy/packing.py`), or one that is only counted, where bins are formed. A sequence is its ids [T], or ids
with other numbers that have to be equal too [T, n] (`with_routes`).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidemill.common.wire.arrays import Int32

SHORTEST = 8
"""Fewest tokens that are split off as a shared node: fewer cost attention more than other layers save."""
SCORES_OF_A_TOKEN = 1000
"""Attention scores that take about as long as one token in all other layers, where these are small."""
MOST_KEYS = 4
"""Most tokens of a tree's rows, as a multiple of its limit of different ones: layers copy their keys."""
ENOUGH_IN_COMMON = 0.1
"""Share of common tokens from which it pays to compute them once."""

Indices = NDArray[np.int64]


@dataclass(slots=True)
class Node:
    """A run of tokens, from position `start` to before `end` of each sequence that has it."""

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
    return ids.astype(">u4").tobytes()


def with_routes(ids: Int32, keys: Int32 | None) -> Int32:
    """A sequence [T, 3] whose tokens are equal only where their routes are too; the ids without `keys`. The
    last token has no route."""
    if keys is None:
        return ids
    padded = np.zeros((len(ids), 2), dtype=np.int32)
    padded[: len(keys)] = keys[: len(ids)]
    return np.column_stack([ids, padded])


class Trie:
    """Sequences, best added in the order of `in_order`: each shares its beginning with the one before."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.size = 0
        """Number of tokens in all nodes."""
        self._path: list[Node] = []
        self._ids: Int32 = np.zeros(0, dtype=np.int32)

    def shared(self, ids: Int32) -> int:
        """How many of its first tokens a sequence would share."""
        common = num_common(self._ids, ids)
        node = next((node for node in self._path if node.start < common <= node.end), None)
        if node is None:
            return 0
        return common if common == node.end or common - node.start >= SHORTEST else node.start

    def add(self, ids: Int32) -> Indices:
        """Add a sequence; returns the places of its tokens in the row of all nodes. Shape [T]."""
        common = self.shared(ids)
        path = [node for node in self._path if node.start < common]
        if path and path[-1].end > common:
            lower = path[-1]
            upper = Node(lower.offset, lower.start, common, lower.above)
            lower.offset, lower.start, lower.above = lower.offset + common - lower.start, common, upper
            self.nodes.append(upper)
            path[-1] = upper
        if common < len(ids):
            path.append(Node(self.size, common, len(ids), path[-1] if path else None))
            self.nodes.append(path[-1])
            self.size += len(ids) - common
        self._path, self._ids = path, ids
        return np.concatenate([node.places for node in path])


def num_common(left: Int32, right: Int32) -> int:
    """How many tokens two sequences begin with alike."""
    shorter = min(len(left), len(right)) if left.ndim == right.ndim else 0
    if not shorter:
        return 0
    differs = np.flatnonzero((left[:shorter] != right[:shorter]).reshape(shorter, -1).any(-1))
    return int(differs[0]) if len(differs) else shorter


def share_in_common(sequences: Iterable[Int32]) -> float:
    """Share of the tokens that a trie saves, for sequences in the order of `in_order`. Lower, also below 0,
    where attention would compute more scores than with a row for each sequence."""
    trie, total, alone = Trie(), 0, 0.0
    for ids in sequences:
        trie.add(ids)
        total += len(ids)
        alone += len(ids) ** 2 / 2  # causal: half of the square
    together = sum(
        (node.end - node.start) * (node.end if node.above else node.end / 2) for node in trie.nodes
    )
    return 1.0 - (trie.size + max(0.0, together - alone) / SCORES_OF_A_TOKEN) / max(1, total)


def num_different(sequences: Iterable[Int32]) -> int:
    """Tokens that are left where common beginnings count once; sequences in the order of `in_order`."""
    trie = Trie()
    for ids in sequences:
        trie.add(ids)
    return trie.size
