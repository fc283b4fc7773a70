"""The weights that a run starts with, of which a rank reads no more than its own shard.

1. The model is made without storage, by transformers. In place of the files' tensors it gets stand-ins
   (`TensorInFile`), which note whether they are read.
2. `exported.py` plans how the model would be saved: which published tensor is made of which elements of the
   model's tensors. The plan is used the other way round: it says from which slice of which file's tensor
   the elements of a shard come.
3. Each rank reads these slices. Beside its shards it holds `CHUNK` elements.

Guarantee: the weights are those of `from_pretrained`, bit for bit. Where transformers reads other tensors
than the plan has, UnclearError is raised.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from tidemill.common.errors import WeightsError
from tidemill.common.weights.bits import TensorInfo, find_tensors
from tidemill.services.trainer.weights.exported import TORCH_DTYPES, Slice, plan_export
from tidemill.services.trainer.weights.shadow import held_range
from tidemill.services.trainer.weights.store import digest_in_order, model_tensors

CHUNK = 1 << 20
"""Elements read at once."""


class UnclearError(Exception):
    """It is not known which elements of the files are which elements of the model; says why."""


@dataclass(slots=True)
class TensorInFile:
    """A tensor of a file, without its data, for transformers to load."""

    path: Path
    info: TensorInfo
    begin: int
    """Byte of the file at which its values begin."""
    is_read: bool = False

    def __getitem__(self, _: Any) -> "TensorInFile":
        """Itself: transformers takes `tensor[...]` to read a tensor of a file."""
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor in a model without storage: on the meta device."""
        self.is_read = True
        return torch.empty(self.info.shape, dtype=dtype, device="meta")


class PretrainedWeights:
    """Where each element of a model's tensors stands in its files."""

    def __init__(self, files: Mapping[str, TensorInFile], slices: Mapping[str, list[Slice]]) -> None:
        self._files = files
        self._slices = slices
        self._opened: dict[Path, FileIO] = {}

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Read what this process holds of each tensor: all of it, or rows where ranks share it."""
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            low, high = held_range(tensor)
            for start, values in self._pieces(name, low, high):
                begin = start - low
                local.view(-1)[begin : begin + len(values)].copy_(values)

    def digest(self, tensors: Mapping[str, Tensor]) -> str:
        """`digest_parameters` of the whole tensors with the files' values, in the dtypes of `tensors`."""
        return digest_in_order(
            values.to(tensors[name].dtype)
            for name in sorted(tensors)
            for _, values in self._pieces(name, 0, tensors[name].numel())
        )

    def _pieces(self, name: str, low: int, high: int) -> Iterator[tuple[int, Tensor]]:
        """The elements [low, high) of a tensor of the model, some at a time and in their order: the flat
        position of the first of them, and their values."""
        for piece in self._slices[name]:
            begin = max(low, piece.first)
            end = min(high, piece.end)
            if begin >= end:
                continue
            file = self._files[piece.info.name]
            if file.path not in self._opened:
                # Not mapped: pages of a mapping would count as this process's memory. Nor by slices of
                # safetensors: where a file is not mapped, each slice reads the whole tensor.
                self._opened[file.path] = FileIO(file.path)
            for start in range(begin, end, CHUNK):
                stop = min(start + CHUNK, end)
                yield start, _read(self._opened[file.path], file, start - piece.first, stop - piece.first)


def _read(opened: FileIO, file: TensorInFile, start: int, stop: int) -> Tensor:
    """Flat elements [start, stop) of a tensor of a file."""
    width = file.info.bits_dtype.itemsize
    data = bytearray((stop - start) * width)
    opened.seek(file.begin + start * width)
    if opened.readinto(data) != len(data):
        raise WeightsError(f"{file.path} was cut short while it was read.")
    return torch.frombuffer(data, dtype=TORCH_DTYPES[file.info.dtype])


def open_pretrained(
    path: str, config: PreTrainedConfig, auto_class: Any, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any], PretrainedWeights]:
    """The model without its weights, what transformers says of loading it, and where its weights are.
    Buffers that are not in the files have their values. `auto_class` makes models of such a configuration.

    Raises:
        UnclearError: it is not known where the files have the weights.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise UnclearError("its weights are quantised")
    files = _find_tensors(path, config)
    # Made for its class alone: nothing is allocated.
    with torch.device("meta"):
        model_class: Any = type(auto_class.from_config(config))
    # A config may have several parts, such as text and vision: some classes take the text's part alone.
    own_config = config if isinstance(config, model_class.config_class) else config.get_text_config()
    try:
        model, info = model_class.from_pretrained(
            None, config=own_config, state_dict=dict(files), output_loading_info=True, **options
        )
    # Code of a model that reads values as it is made, which are not there yet (torch raises a RuntimeError),
    # or that was written for another release of transformers.
    except (AttributeError, TypeError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UnclearError(f"{model_class.__name__} cannot be made without weights: {reason}") from error
    model.config.name_or_path = path
    return model, info, PretrainedWeights(files, _locate(model, files))


def _find_tensors(path: str, config: PreTrainedConfig) -> dict[str, TensorInFile]:
    """The tensors of the safetensors files that transformers would read, by name."""

    def find(name: str) -> str | None:
        file: str | None = cached_file(
            path,
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        return file

    if getattr(config, "transformers_weights", None) or find("adapter_config.json"):
        raise UnclearError("its config names other files of weights")
    whole = find(SAFE_WEIGHTS_NAME)
    if whole:
        paths = [whole]
    elif index := find(SAFE_WEIGHTS_INDEX_NAME):
        paths = get_checkpoint_shard_files(path, index)[0]
    else:
        raise UnclearError(f"there is neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}")
    try:
        return {
            info.name: TensorInFile(Path(path), info, begin)
            for path in paths
            for info, begin in find_tensors(Path(path))
        }
    except WeightsError as error:
        raise UnclearError(str(error)) from None


def _locate(model: PreTrainedModel, files: Mapping[str, TensorInFile]) -> dict[str, list[Slice]]:
    """Where the files have the elements of each tensor."""
    for tied, weight in model.all_tied_weights_keys.items():
        if model.get_parameter_or_buffer(tied) is not model.get_parameter_or_buffer(weight):
            raise UnclearError(f"the files have {tied} and {weight}, which are one tensor if they are alike")
    tensors = model_tensors(model)
    plan = plan_export(model, tensors, torch.float32)
    if plan.converted:
        raise UnclearError(f"{plan.converted[0].name} is not a part of one tensor of the model")
    published = {piece.info.name: piece.info.shape for piece in plan.slices}
    read = {name: file.info.shape for name, file in files.items() if file.is_read}
    # Names of tensors that only one of the two has, or that have another shape in each.
    unlike = sorted({name for name, _ in published.items() ^ read.items()})
    if unlike:
        raise UnclearError(f"transformers reads {unlike[0]}, and the model is saved with other tensors")
    slices: dict[str, list[Slice]] = defaultdict(list)
    for piece in sorted(plan.slices, key=lambda piece: piece.first):
        slices[piece.source].append(piece)
    for name, tensor in tensors.items():
        if sum(piece.info.num_elements for piece in slices[name]) != tensor.numel():
            raise UnclearError(f"the files have not every element of {name}")
    return slices


def give_storage(root: nn.Module, device: torch.device) -> None:
    """Allocate the weights on the device: this rank's rows of those that are sharded, all of the others.
    Tied weights stay tied, buffers with values keep them."""
    uses_of_weights = defaultdict(list)
    for module in root.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                uses_of_weights[id(weight)].append((module, name))
    root._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    # `_apply` makes a parameter for each module: what was tied has come apart.
    for uses in uses_of_weights.values():
        weights = [module._parameters[name] for module, name in uses]
        for module, name in uses:
            module._parameters[name] = weights[0]
