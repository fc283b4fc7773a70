"""The loss's inputs of one forward pass, put together from samples and what the model made of them."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.trainer.forward import TileScores
from services.trainer.losses.normalisation import Normalisation, token_weight
from services.trainer.losses.tokens import Tokens
from services.trainer.packing import Tile
from services.trainer.samples import Sample

_OPTIONAL = {
    "proximal_logprobs": "proximal_logprobs_N",
    "reference_logprobs": "reference_logprobs_N",
    "values": "old_values_N",
    "returns": "returns_N",
}
"""Fields of a sample, and what they are called as a tensor."""


def tile_tokens(
    tile: Tile,
    samples: Sequence[Sample],
    scores: TileScores,
    values_N: Tensor | None,
    normalisation: Normalisation,
) -> Tokens:
    """The trained tokens of a tile; `samples` are those of its micro-batch, which the tile's rows refer to.

    Divisions happen in float64 on the host, products with the loss in the dtype of the logprobs; everything
    crosses to the device in one copy.
    """
    chosen = [samples[i] for i in tile.samples]
    counts = [len(row.targets) for row in tile.rows]
    columns = {
        "rollout_logprobs_N": _joined(chosen, "rollout_logprobs"),
        "advantages_N": np.concatenate(
            [np.broadcast_to(sample.advantage, sample.mask.shape)[sample.mask] for sample in chosen]
        ),
        "weights_N": np.repeat([token_weight(normalisation, count) for count in counts], counts),
    }
    for field, name in _OPTIONAL.items():
        if (values := _joined(chosen, field)) is not None:
            columns[name] = values
    stacked = torch.from_numpy(np.stack([np.asarray(column, np.float64) for column in columns.values()]))
    tensors = stacked.to(scores.logprobs_N.device, scores.logprobs_N.dtype)
    sequence = np.repeat(np.arange(len(chosen)), counts)
    return Tokens(
        logprobs_N=scores.logprobs_N,
        entropies_N=scores.entropies_N,
        values_N=values_N,
        sequence_N=torch.from_numpy(sequence).to(scores.logprobs_N.device),
        num_sequences=len(chosen),
        **dict(zip(columns, tensors, strict=True)),
    )


def _joined(samples: Sequence[Sample], field: str) -> NDArray[np.floating] | None:
    """One field of all samples at their trained tokens. Shape [N]; None where they have none."""
    given = [getattr(sample, field) for sample in samples]
    if all(value is None for value in given):
        return None
    assert not any(value is None for value in given), f"a micro-batch has {field} as a whole or not at all"
    joined: NDArray[np.floating] = np.concatenate(
        [value[s.mask] for value, s in zip(given, samples, strict=True)]
    )
    return joined
