"""The ids that sampling kept for each token (`wire/choices.py`), and their logits: for runs with sampling
masks.

Shape legend: C tokens of a chunk, V vocabulary, R tokens of a part of it, K kept ids.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.common.wire.choices import Rows

PADDED_ELEMENTS = 1 << 22
PADDED_SHARE = 16
"""Kept ids of a chunk are padded to its widest row while that makes no more elements than the first, or than
one in so many of its logits. A single wide row would make as many as there are logits."""


class KeptLogits(NamedTuple):
    """The kept ids of R tokens of a chunk, and their logits or logprobs; K is the most that a token has.

    Replays top-p, top-k and min-p as the engine applied them: a target's logprob is x[target] -
    logsumexp(x[ids]), with x the logits or the logprobs.
    """

    rows: NDArray[np.int64] | None
    """Which tokens of the chunk, [R]; None: all, in order."""
    ids_RK: Tensor
    values_RK: Tensor
    """-inf behind a token's last id. A token without kept ids has a single 0, so its logsumexp is 0."""

    @classmethod
    def of(cls, values_CV: Tensor, kept: Rows) -> Iterator["KeptLogits"]:
        """All tokens of a chunk at once, or some at a time, so that padding to the widest row stays small."""
        counts = count_kept(kept)
        most = max(PADDED_ELEMENTS, values_CV.numel() // PADDED_SHARE)
        if len(counts) * counts.max(initial=1) <= most:
            yield cls._of_rows(values_CV, kept, None)
            return
        for rows in split_by_width(counts, most):
            yield cls._of_rows(values_CV, kept, rows)

    @classmethod
    def _of_rows(cls, values_CV: Tensor, kept: Rows, rows: NDArray[np.int64] | None) -> "KeptLogits":
        kept = kept if rows is None else kept.take(rows)
        counts = count_kept(kept)
        is_id = np.arange(counts.max(initial=1)) < counts[:, None]
        ids = np.zeros(is_id.shape, dtype=np.int64)
        ids[is_id] = kept.values  # row by row, in their order
        device = values_CV.device
        ids_RK = torch.from_numpy(ids).to(device)
        is_id_RK = torch.from_numpy(is_id).to(device)
        if rows is None:
            gathered_RK = values_CV.gather(-1, ids_RK)
        else:
            gathered_RK = values_CV.flatten().take(_flat_places(rows, ids_RK, values_CV.shape[1]))
        values_RK = gathered_RK.masked_fill(~is_id_RK, -torch.inf)
        first_R = values_RK[:, 0].masked_fill(~is_id_RK[:, 0], 0.0)
        return cls(rows, ids_RK, torch.cat([first_R[:, None], values_RK[:, 1:]], dim=-1))

    def add_to(self, totals_CV: Tensor, added_RK: Tensor) -> None:
        """Add a number for each kept id, in place."""
        if self.rows is None:
            totals_CV.scatter_add_(1, self.ids_RK, added_RK)
        else:
            places_RK = _flat_places(self.rows, self.ids_RK, totals_CV.shape[1])
            totals_CV.view(-1).scatter_add_(0, places_RK.flatten(), added_RK.flatten())

    def of_rows(self, values_C: Tensor) -> Tensor:
        """Numbers of the chunk's tokens, of these. Shape [R]."""
        return values_C if self.rows is None else values_C[torch.from_numpy(self.rows).to(values_C.device)]


def count_kept(kept: Rows) -> NDArray[np.int64]:
    """How many ids each token has. Shape [C]."""
    assert kept.offsets is not None, "rows of kept ids have different lengths"
    return np.diff(kept.offsets).astype(np.int64)


def split_by_width(counts: NDArray[np.int64], most: int) -> Iterator[NDArray[np.int64]]:
    """Rows of these lengths in parts, the widest first, each of them padded to its widest row: at most half
    of it is padding, and it has at most `most` elements, or is a single row. Lengths 2, 9, 3: row 1, then
    rows 2 and 0."""
    order = np.argsort(-counts, kind="stable")
    widths = counts[order].clip(min=1)
    start = 0
    while start < len(order):
        width = int(widths[start])
        # Widths fall: how many rows come before the first of less than half.
        num_half = int(np.searchsorted(-widths, -width / 2, side="right"))
        end = min(start + max(1, most // width), num_half)
        yield order[start:end]
        start = end


def _flat_places(rows: NDArray[np.int64], ids_RK: Tensor, vocabulary: int) -> Tensor:
    """Where the ids of these rows are in a flat [C * V]. Shape [R, K]."""
    return ids_RK + torch.from_numpy(rows * vocabulary).to(ids_RK.device)[:, None]


def kept_log_mass(logprobs_CV: Tensor, kept: Rows) -> Tensor:
    """The logarithm of the kept ids' probability; 0 for a token without any. Shape [C]."""
    rows: list[NDArray[np.int64]] = []
    masses: list[Tensor] = []
    for rows_of_kept in KeptLogits.of(logprobs_CV, kept):
        masses.append(rows_of_kept.values_RK.logsumexp(-1))
        if rows_of_kept.rows is None:
            return masses[0]
        rows.append(rows_of_kept.rows)
    in_order_C = torch.from_numpy(np.argsort(np.concatenate(rows))).to(logprobs_CV.device)
    return torch.cat(masses)[in_order_C]
