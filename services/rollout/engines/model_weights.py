"""The weights of a transformers model: loaded at the start, replaced at an update.

The files of a version are read whole and matched against the model before any of it changes: a model
is never half old and half new, and no parameter keeps its old value unnoticed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.attention import exact_attention
from common.config.data import ModelConfig
from common.errors import ConfigError, WeightsError


def load_model(model: ModelConfig, device: str) -> Any:
    """Load `model.path` for inference; `auto` takes the first GPU, else the CPU.

    Raises:
        ConfigError: the device is not there, or the folder does not hold all of the model's weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    is_local = Path(model.path).is_dir()
    try:
        attention = exact_attention(AutoConfig.from_pretrained(model.path, local_files_only=is_local))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model.path,
            dtype=getattr(torch, model.dtype),
            local_files_only=is_local,
            output_loading_info=True,
            attn_implementation=attention,
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


def read_weights(files: Sequence[Path]) -> dict[str, Tensor]:
    """Every tensor of `files`, in memory that no file backs.

    Raises:
        WeightsError: there are no files, or one is missing or torn.
    """
    if not files:
        raise WeightsError("no weight files were given; a version has at least one")
    tensors = {}
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as reader:
                for name in reader.keys():  # noqa: SIM118 -- not a dict, it cannot be iterated
                    tensors[name] = reader.get_tensor(name).clone()
        except (OSError, SafetensorError) as error:
            raise WeightsError(f"cannot read the weights in {file}: {error}") from None
    return tensors


def match_weights(model: Any, tensors: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pair each tensor of `model` with its new value.

    Raises:
        WeightsError: a parameter has no value or one of another shape, or a value has no place.
    """
    state = model.state_dict()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
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


def _rename(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values under the names of `model`, from files in its published layout, which may differ.

    Transformers joins some published weights into one parameter, a layer's experts for instance. It
    does so only while loading, so the values are loaded into a second model.
    """
    options = {"config": model.config, "dtype": model.dtype, "output_loading_info": True}
    loaded, info = type(model).from_pretrained(None, state_dict=dict(tensors), **options)
    unknown, missing = sorted(info["unexpected_keys"]), sorted(info["missing_keys"])
    if unknown or missing:
        raise WeightsError(
            f"the weight files do not fit the model: {len(unknown)} names unknown {unknown[:3]}, "
            f"{len(missing)} missing {missing[:3]}; were they written from another model?"
        )
    return {name: parameter.detach() for name, parameter in loaded.named_parameters()}


@torch.inference_mode()
def copy_weights(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write the new values into the model, in its own precision and on its device."""
    for parameter, value in pairs:
        parameter.copy_(value)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
