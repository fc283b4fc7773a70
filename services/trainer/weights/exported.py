"""Where the elements of a published tensor lie in the model's own tensors.

Export renames tensors, and cuts or fuses some (packed experts become a tensor for each expert). Most
published tensors are slices, consecutive elements of one tensor of the model: each rank knows which of them
lie in its shard. The rest are made whole: gathered, converted, and kept by rank 0.

A probe shows whether a conversion that copies makes slices: tensors of the numbers 0, 1, 2, ... are
converted, `PROBED` columns wide. A result whose numbers are consecutive, and which is as wide, is a slice.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tidemill.common.weights.bits import TORCH_NAMES, TensorInfo

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()
}
"""torch's dtypes by safetensors' names."""
DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Slice:
    """A published tensor: the elements of the model's tensor `source` from flat position `first` on.

    Example: the second of two experts [3, 8] that the model has as one tensor [2, 3, 8]: `first` 24.
    """

    info: TensorInfo
    source: str
    first: int

    @property
    def end(self) -> int:
        return self.first + self.info.num_elements


@dataclass(frozen=True, slots=True)
class ExportPlan:
    """All published tensors: slices by source, and those that only a conversion of whole tensors gives."""

    slices: tuple[Slice, ...]
    converted: tuple[TensorInfo, ...]
    sources_of_converted: frozenset[str]

    @property
    def infos(self) -> list[TensorInfo]:
        return sorted([*(piece.info for piece in self.slices), *self.converted], key=lambda info: info.name)


PROBED = 4
"""Columns of a probe: enough to show a conversion that moves elements within rows."""


def plan_export(model: PreTrainedModel, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> ExportPlan:
    """How `tensors`, by the names of `model_tensors`, are published in `dtype`; only shapes are looked at."""
    shapes = {
        name: torch.empty(tensor.shape, dtype=exported_dtype(tensor, dtype), device="meta")
        for name, tensor in tensors.items()
    }
    # By storage: what an export renames, or cuts out as a view, still lies in its source's.
    owners = {tensor.untyped_storage()._cdata: name for name, tensor in shapes.items()}
    slices: list[Slice] = []
    converted: list[TensorInfo] = []
    for name, tensor in revert_weight_conversion(model, dict(shapes)).items():
        info = TensorInfo(name, DTYPES[tensor.dtype], tuple(tensor.shape))
        source = owners.get(tensor.untyped_storage()._cdata)
        if source is not None and tensor.is_contiguous():
            slices.append(Slice(info, source, int(tensor.storage_offset())))
        else:
            converted.append(info)
    if converted:
        slices += _probed(model, _uncovered(shapes, slices), converted)
    sliced = {piece.info.name for piece in slices}
    not_sliced = tuple(info for info in converted if info.name not in sliced)
    # What a conversion reads together is not known: it gets all tensors that slices do not cover.
    sources = frozenset(_uncovered(shapes, slices)) if not_sliced else frozenset[str]()
    return ExportPlan(tuple(slices), not_sliced, sources)


def _uncovered(tensors: dict[str, Tensor], slices: list[Slice]) -> dict[str, Tensor]:
    """The tensors that slices do not cover completely."""
    counts: Counter[str] = Counter()
    for piece in slices:
        counts[piece.source] += piece.info.num_elements
    return {name: tensor for name, tensor in tensors.items() if counts[name] < tensor.numel()}


def _probed(model: PreTrainedModel, sources: dict[str, Tensor], infos: list[TensorInfo]) -> list[Slice]:
    """The tensors that are slices although their conversion copies them.

    Example: two experts [3, 8] of one tensor [2, 3, 8]. The probe of that is [2, 3, 4], the numbers 0 to 23.
    The second expert comes out as 12 to 23, four columns wide: a slice, which begins at row 12 // 4 = 3, that
    is at element 3 * 8 = 24.
    """
    probes = {}
    firsts = {}
    end = 0
    for name, tensor in sources.items():
        row = tensor.shape[-1] if tensor.ndim else 1
        width = min(PROBED, row)
        shape = (*tensor.shape[:-1], width) if tensor.ndim else ()
        count = tensor.numel() // row * width
        probes[name] = torch.arange(end, end + count).reshape(shape)
        firsts[name] = end
        end = end + count
    try:
        out = revert_weight_conversion(model, dict(probes))
    except (RuntimeError, ValueError):  # the conversion needs the real shapes
        return []
    names = list(firsts)
    starts = list(firsts.values())
    slices = []
    for info in infos:
        probe = out.get(info.name)
        if probe is None or not probe.numel():
            continue
        flat = probe.reshape(-1)
        # From the first number follow the source, and its row at which the slice begins.
        number = int(flat[0])
        source = names[bisect_right(starts, number) - 1]
        width = probes[source].shape[-1]
        is_run = bool((flat == torch.arange(number, number + len(flat))).all())
        if is_run and tuple(probe.shape) == (*info.shape[:-1], width):
            row = sources[source].shape[-1]
            slices.append(Slice(info, source, (number - firsts[source]) // width * row))
    return slices


def exported_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Floating point tensors are published in `dtype`, others as they are."""
    return dtype if tensor.is_floating_point() else tensor.dtype
