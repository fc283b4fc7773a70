"""Weights as engines load them: safetensors, Hugging Face names, the configured dtype.

Guarantees: a tied weight is written once, under the name its model expects; names and shapes are those of a
published checkpoint (transformers fuses some weights on loading, experts for instance; that is undone).
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

WEIGHTS_FILE = "model.safetensors"


def whole_tensor(tensor: Tensor) -> Tensor:
    """The tensor, or where it is sharded its rows from every rank, on the CPU; all ranks must call this."""
    return tensor.full_tensor().cpu() if isinstance(tensor, DTensor) else tensor


def model_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters, tied ones once, and the buffers that belong to a checkpoint, by name; views."""
    tensors: dict[str, Tensor] = {name: parameter.detach() for name, parameter in model.named_parameters()}
    saved = model.state_dict().keys()
    tensors.update((name, buffer) for name, buffer in model.named_buffers() if name in saved)
    return tensors


def export_tensors(
    model: PreTrainedModel, dtype: torch.dtype, tensors: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Weights under their published names, floating point ones in `dtype`. `tensors`, by the names of
    `model_tensors`, take the place of the model's own."""
    given = model_tensors(model) if tensors is None else tensors
    whole = {name: whole_tensor(tensor) for name, tensor in given.items()}
    for name, tensor in revert_weight_conversion(model, whole).items():
        yield name, tensor.detach().to(dtype) if tensor.is_floating_point() else tensor.detach()


def save_model(
    model: PreTrainedModel, dtype: torch.dtype, folder: Path, tensors: Mapping[str, Tensor] | None = None
) -> list[Path]:
    """Write `model.safetensors` into the folder, nothing else; the same weights give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    exported = {name: tensor.contiguous() for name, tensor in export_tensors(model, dtype, tensors)}
    path = folder / WEIGHTS_FILE
    save_file(exported, path, metadata={"format": "pt"})
    return [path]


PIECE_BYTES = 1 << 26
"""Bytes hashed at once; what a GPU tensor needs of host memory."""


def digest_parameters(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """32 hexadecimal digits for `(name, tensor)` pairs given in any order."""
    hasher = xxhash.xxh3_128()
    for _, tensor in sorted(parameters, key=lambda pair: pair[0]):
        flat = whole_tensor(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
        for piece in flat.split(PIECE_BYTES):
            hasher.update(piece.cpu().numpy())
    return hasher.hexdigest()
