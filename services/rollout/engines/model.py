"""A model's tokenizer, end tokens and limits, and later its weights.

Whatever makes a model folder unusable is reported here, in plain words. Reading it imports no torch, because
an engine sets OpenMP's variables before that, and uses no network, except for a hub name.
"""

import contextlib
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from tidemill.common.config.run import ModelConfig, is_path
from tidemill.common.errors import ConfigError, EngineError, WeightsError
from tidemill.common.process.programs import importing
from tidemill.common.run.model_config import exact_attention, freeze_rope, with_overrides
from tidemill.common.run.routers import is_mixture
from tidemill.common.run.special_tokens import Reading, TokenReader, end_ids_of, reader_of
from tidemill.common.weights.bits import TensorInfo
from tidemill.services.rollout.engines.engine import Engine, GenerationRequest, check_length

if TYPE_CHECKING:
    from torch import Tensor

    from tidemill.services.rollout.engines.held_weights import HeldWeights


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model that can be loaded: its tokenizer, the ids that end a completion, and its limits."""

    tokenizer: Any
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int
    reader: TokenReader
    """Makes text of what the model wrote."""
    is_mixture: bool = False
    """Whether it is a mixture of experts."""
    model_type: str = ""

    def check(self, request: GenerationRequest) -> None:
        """Refuse a request that no engine could serve, before it reaches one.

        Raises:
            ValueError: the prompt is empty, holds ids outside the vocabulary, or leaves no room.
        """
        check_length(request, self.max_model_len)
        lowest = min(request.prompt_ids)
        highest = max(request.prompt_ids)
        if lowest < 0 or highest >= self.vocab_size:  # the model has no embedding: it would crash
            raise ValueError(
                f"token ids must be between 0 and {self.vocab_size - 1}, got {lowest} to {highest}; "
                "was the prompt tokenized with this model's tokenizer?"
            )


class ModelEngine(Engine):
    """An engine that computes with the model of `model.path`."""

    version = -1
    num_running = 0
    _folder: ModelFolder | None = None

    @property
    def folder(self) -> ModelFolder:
        """Tokenizer and limits, once it is started."""
        if self._folder is None:
            raise EngineError(f"{type(self).__name__} was never started")
        return self._folder

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.folder.reader.text_of(token_ids)

    def read(
        self, token_ids: Sequence[int], mask: Sequence[bool] | None = None, prompt_ids: Sequence[int] = ()
    ) -> Reading:
        return self.folder.reader.read(token_ids, mask, prompt_ids)


def open_model(model: ModelConfig) -> ModelFolder:
    """Read tokenizer and configuration of `model.path`, without its weights.

    Raises:
        ConfigError: no such folder or hub model, no tokenizer, or a context shorter than the run's.
    """
    hf_config, is_local = _read_config(model)
    with importing():
        from transformers import AutoTokenizer, GenerationConfig
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, local_files_only=is_local)
    except Exception as error:  # the tokenizer libraries raise anything, down to bare Exception
        reason = "it has no usable tokenizer, save one with tokenizer.save_pretrained"
        raise ConfigError(_unusable(model.path, reason, error)) from None
    text_config = hf_config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None)
    if context is not None and model.max_model_len > context:
        raise ConfigError(
            f"model.max_model_len is {model.max_model_len}, but {model.path} has a context of {context} "
            "tokens; lower model.max_model_len"
        )
    generated = None
    with contextlib.suppress(OSError):  # many models have no generation config
        generated = GenerationConfig.from_pretrained(model.path).eos_token_id
    eos_ids = end_ids_of(tokenizer, generated, getattr(text_config, "eos_token_id", None))
    if not eos_ids:
        raise ConfigError(
            f"{model.path} names no end-of-sequence token, so completions could never stop; "
            "set eos_token_id in its generation_config.json"
        )
    return ModelFolder(
        tokenizer,
        eos_ids,
        int(text_config.vocab_size),
        model.max_model_len,
        reader_of(model, tokenizer, eos_ids),
        is_mixture(hf_config),
        str(hf_config.model_type),
    )


def _read_config(model: ModelConfig) -> tuple[Any, bool]:
    """The configuration that transformers reads, as this run has it, and whether it is read from a folder."""
    is_local = _is_local(model.path)
    if is_local:
        # Set before the hub library is imported: reading a folder must never wait for a network.
        offline = os.environ.setdefault("HF_HUB_OFFLINE", "1")
        hub = sys.modules.get("huggingface_hub.constants")
        if hub:  # a worker that was forked has it already
            vars(hub)["HF_HUB_OFFLINE"] = offline != "0"
    from transformers import AutoConfig

    try:
        hf_config = AutoConfig.from_pretrained(model.path, local_files_only=is_local)
        return with_overrides(hf_config, model, local_files_only=is_local), is_local
    except (OSError, ValueError) as error:
        raise ConfigError(_unusable(model.path, "its configuration cannot be read", error)) from None


def _is_local(path: str) -> bool:
    """Whether `path` is a folder on disk; a hub name has at most one slash and no leading dot."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"model.path {path} has no config.json; give the folder of a Hugging Face model"
            )
        return True
    if is_path(path):
        raise ConfigError(f"model.path {path} is not a folder; give the folder of a Hugging Face model")
    return False


def _unusable(path: str, reason: str, error: Exception) -> str:
    lines = str(error).strip().splitlines()
    detail = f" ({lines[0][:200]})" if lines else ""
    return f"model.path {path} cannot be used: {reason}{detail}. Give the folder of a Hugging Face model"


def load_model(model: ModelConfig, sees: bool = False) -> Any:
    """Load `model.path` for inference, on the first GPU, else the CPU; with what reads pictures if it `sees`.

    Raises:
        ConfigError: the folder does not hold all of the model's weights.
    """
    hf_config, is_local = _read_config(model)
    with importing():
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
        from transformers.utils import logging
    logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        hf_config = freeze_rope(hf_config, model.max_model_len)
        kind: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        loaded: Any = kind.from_pretrained(
            model.path,
            config=hf_config,
            dtype=getattr(torch, model.dtype),
            local_files_only=is_local,
            output_loading_info=True,
            attn_implementation=exact_attention(hf_config),
        )
        result, info = loaded
        result = result.to(device).eval().requires_grad_(False)
    except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        raise ConfigError(f"model.path {model.path} cannot be loaded on device {device}: {error}") from None
    absent = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if absent:
        # Transformers fills these with random numbers and a warning.
        raise ConfigError(
            f"model.path {model.path} lacks {len(absent)} of the model's weights: {', '.join(absent[:3])}; "
            "its config.json and its weight files do not belong together"
        )
    return result


def match_weights(model: Any, tensors: "dict[str, Tensor]") -> "list[tuple[Tensor, Tensor]]":
    """Pair each tensor of `model` with its new value.

    Raises:
        WeightsError: a parameter has no value or one of another shape, or a value has no place.
    """
    state = model.state_dict()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if tensors.keys() - state.keys():
        names = names_of_files(model)
        tensors = {names.get(name, name): tensor for name, tensor in tensors.items()}
    if tensors.keys() - state.keys():
        tensors = _rename(model, tensors)
    missing = sorted(parameters.keys() - tensors.keys())
    if missing:
        raise WeightsError(
            f"the weight files lack {len(missing)} of the model's parameters: {', '.join(missing[:3])}; "
            "were they written from another model?"
        )
    # Tied parameters appear once in `parameters`; the state adds the buffers that files may hold.
    targets = parameters | {name: state[name] for name in tensors if name not in parameters}
    for name, target in targets.items():
        if target.shape != tensors[name].shape:
            raise WeightsError(
                f"{name} has shape {tuple(tensors[name].shape)} in the weight files, "
                f"but {tuple(target.shape)} in the model"
            )
    return [(target, tensors[name]) for name, target in targets.items()]


def names_of_files(model: Any) -> dict[str, str]:
    """Names of the model's tensors in published files, where these differ: published -> the model's own.

    Only of tensors that are published as they are; those that a conversion cuts or joins are left out.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in model.state_dict().items()
    }
    # By storage: a tensor that is only renamed still lies in its source's.
    sources = {tensor.untyped_storage()._cdata: name for name, tensor in shapes.items()}
    names = {}
    for published, tensor in revert_weight_conversion(model, dict(shapes)).items():
        source = sources.get(tensor.untyped_storage()._cdata)
        if source is not None and published != source and tensor.shape == shapes[source].shape:
            names[published] = source
    return names


def _rename(model: Any, tensors: "dict[str, Tensor]") -> "dict[str, Tensor]":
    """Values under the names of `model`, from files in its published layout, which may differ.

    Transformers joins some published weights into one parameter, a layer's experts for instance. It
    does so only while loading, so the values are loaded into a second model.
    """
    options = {"config": model.config, "dtype": model.dtype, "output_loading_info": True}
    loaded, info = type(model).from_pretrained(None, state_dict=dict(tensors), **options)
    unknown = sorted(info["unexpected_keys"])
    missing = sorted(info["missing_keys"])
    if unknown or missing:
        raise WeightsError(
            f"the weight files do not fit the model: {len(unknown)} names unknown {unknown[:3]}, "
            f"{len(missing)} missing {missing[:3]}; were they written from another model?"
        )
    return {name: parameter.detach() for name, parameter in loaded.named_parameters()}


def copy_weights(pairs: "Sequence[tuple[Tensor, Tensor]]") -> None:
    """Write the new values into the model, in its own precision and on its device, and read them back.

    Raises:
        EngineError: the model does not hold them.
    """
    import torch

    with torch.inference_mode():
        for parameter, value in pairs:
            parameter.copy_(value)
            # A NaN equals nothing: weights that have some were still written.
            if not torch.equal(parameter, value.to(parameter)) and not value.isnan().any():
                raise EngineError("values were not there when they were read back; restart this worker")


def pieces_of(model: Any, infos: Iterable[TensorInfo]) -> "HeldWeights":
    """Where the tensors of a checkpoint lie in the model.

    Raises:
        ValueError: one has no parameter of its own, or one of less precision.
    """
    from tidemill.services.rollout.engines.held_weights import HeldWeights, Key, Piece

    state = model.state_dict()
    infos = list(infos)
    names = {}
    if any(info.name not in state for info in infos):
        names = names_of_files(model)
    pieces = []
    for info in infos:
        name = names.get(info.name, info.name)
        if name not in state or tuple(state[name].shape) != info.shape:
            raise ValueError(f"{info.name} has no parameter of that name and shape")
        tensor = state[name].detach()
        strides = tuple(math.prod(info.shape[axis + 1 :]) for axis in range(len(info.shape)))
        pieces.append(Piece(Key(info.name, 0, info.shape, strides), info, tensor))
    held = HeldWeights(pieces)
    reason = held.reason_not_to_patch()
    if reason:
        raise ValueError(reason)
    return held
