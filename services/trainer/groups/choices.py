"""What the engine chose beside tokens (`wire/choices.py`), as samples have it: routes and sampling masks."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tidemill.common.wire.arrays import Int32
from tidemill.common.wire.choices import KEPT, NUM_ROWS, ROUTES
from tidemill.common.wire.messages import Trajectory
from tidemill.services.trainer.groups.sample import Sample, sampled_mask


class Routes(NamedTuple):
    """Which experts the engine chose for each token of a segment but the last, which it never computed.

    Example: a segment of three tokens, one layer, two experts a token: `experts` [[[0, 5]], [[2, 5]]], and
    `keys` has two rows, which differ.
    """

    experts: NDArray[np.unsignedinteger]
    """[tokens - 1, layers, experts of a token]."""
    keys: Int32
    """[tokens - 1, 2]: a 64-bit hash of each token's experts, as two numbers."""


def make_routes(experts: NDArray[np.unsignedinteger]) -> Routes:
    """Hash by multilinear hashing over 64-bit words, whose multipliers are hashes of their places."""
    flat = np.ascontiguousarray(experts).reshape(len(experts), -1).view(np.uint8)
    num_words = math.ceil(flat.shape[1] / 8)
    padded = np.zeros((len(flat), 8 * num_words), dtype=np.uint8)
    padded[:, : flat.shape[1]] = flat
    odd = np.array([xxhash.xxh3_64_intdigest(b"%d" % word) | 1 for word in range(num_words)], dtype=np.uint64)
    hashes = (padded.view(np.uint64) * odd).sum(1, dtype=np.uint64)
    return Routes(experts, hashes.view(np.int32).reshape(-1, 2))


def routes_of(trajectory: Trajectory) -> Iterator[Routes]:
    rows = trajectory.choices.rows.get(ROUTES) if trajectory.choices else None
    if rows is None:
        return
    start = 0
    for segment in trajectory.segments:
        end = start + NUM_ROWS[ROUTES](segment)
        yield make_routes(rows.values[start:end])
        start = end


def missing_mask(trajectory: Trajectory) -> str:
    """Which sampled token is not in its sampling mask, as a sentence; empty where all are."""
    kept = trajectory.choices.rows.get(KEPT) if trajectory.choices else None
    if kept is None or kept.offsets is None:
        return "it has no sampling masks, and its tokens were sampled from some ids only"
    completion_ids = np.concatenate([segment.completion_ids for segment in trajectory.segments])
    # The token that each kept id belongs to, and whether the id is the one that was sampled there.
    token_of_id = np.repeat(np.arange(len(kept)), np.diff(kept.offsets))
    is_sampled_id = kept.values == completion_ids[token_of_id]
    is_missing = sampled_mask(trajectory).copy()
    is_missing[token_of_id[is_sampled_id]] = False
    return f"token {np.argmax(is_missing)} is not in its sampling mask" if is_missing.any() else ""


def without_choices(sample: Sample) -> Sample:
    """The tokens without recorded choices, for a model that makes its own: a reference."""
    if sample.kept is None and not sample.routes:
        return sample
    columns = {"rollout_logprobs": sample.rollout_logprobs}
    images = sample.images
    return Sample(sample.key, sample.segments, sample.completion_ids, sample.mask, columns, images=images)
