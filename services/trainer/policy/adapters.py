"""LoRA adapters in the policy's model (arXiv 2106.09685), with PEFT's layers.

Guarantees: nothing but adapters is trained, in float32; the base stays what it was loaded as, so the
reference model of KL penalties is the same model with its adapters off; what engines get is the base with the
adapters added to its weights, computed in float32 and rounded once. The first adapters depend on the run's
seed alone and change nothing: a run that is started again without a checkpoint starts from the same bytes.
Where ranks share the model, base and adapters are split by rows; what is exported is that of one rank, bit
for bit.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tidemill.common.config.trainer import LoraConfig
from tidemill.common.errors import ConfigError
from tidemill.common.run.routers import modules_of_routers
from tidemill.services.trainer.groups.columns import SampleColumns
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.forward import output_head
from tidemill.services.trainer.policy.layers import tower_of
from tidemill.services.trainer.policy.options import OptionSettings, PolicyCore, PolicyOption
from tidemill.services.trainer.policy.reference import reference_columns
from tidemill.services.trainer.policy.state import PolicyState
from tidemill.services.trainer.weights.shadow import held_range
from tidemill.services.trainer.weights.store import digest_parameters, model_tensors, whole_tensor

log = structlog.get_logger(__name__)

ADAPTER_FOLDER = "adapter"
"""Beside a version's merged weights: its adapters alone, in PEFT's format."""

_NAME = "default"
"""PEFT's name of the adapter, where a model could have several."""


class Adapters(PolicyOption):
    """The adapters of one model, which are trained in place of its weights."""

    freezes_model = True

    def __init__(self, settings: OptionSettings) -> None:
        lora = settings.trainer.lora
        assert lora is not None, "the config asks for them"
        self._config: LoraConfig = lora
        self._settings = settings

    def change_model(self, model: PreTrainedModel) -> None:
        """Put the adapters into the model. Raises ConfigError: its layers take none."""
        self._model = model
        config = self._config
        targets = find_targets(model, config)
        base_digest = self._settings.base_digest or digest_parameters(model_tensors(model).items())
        self._peft_config = _inject(model, config, targets, self._settings.seed)
        self._layers = {name: module for name, module in model.named_modules() if _is_adapted(module)}
        lost = lost_in_peft(model, self._peft_config, self._layers)
        if lost:
            log.warning(
                "PEFT does not load the adapters of some layers of this model: use a version's merged "
                "weights, or leave these layers out of trainer.lora.target_modules",
                model=str(model.config.model_type),
                layers=f"{len(lost)} of {len(self._layers)}: {', '.join(lost[:2])}",
            )
        scale = config.alpha / (math.sqrt(config.rank) if config.rank_stabilized else config.rank)
        self.identity = f"{base_digest} with adapters of rank {config.rank} times {scale:g}"
        """The base and scale that the adapters belong to; those of a checkpoint fit no other."""
        self._halve_base(self._settings.dtype)

    def _halve_base(self, compute_dtype: torch.dtype) -> None:
        """Keep frozen matrices in the dtype that autocast would bring them to in every forward pass. The
        result is the same, with half the memory. An output head that is also the embedding stays."""
        if compute_dtype != torch.bfloat16:
            return
        embedding = self._model.get_input_embeddings().weight
        linears = [module for module in self._model.modules() if isinstance(module, nn.Linear)]
        for weight in [linear.weight for linear in linears if linear.weight is not embedding]:
            if not weight.requires_grad:
                weight.data = weight.data.to(compute_dtype)

    def precompute(self, parts: Sequence[Sequence[Sample]], policy: PolicyCore) -> list[SampleColumns]:
        """The reference of KL penalties is the model with its adapters off."""
        if not self._settings.trainer.algorithm.needs_reference:
            return []
        with self.off():
            return reference_columns(parts, policy, policy.scorer)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within the block the model is its base."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def state(self) -> PolicyState:
        return PolicyState({}, {"base": self.identity})

    def check_state(self, values: Mapping[str, Any]) -> None:
        base = values.get("base")
        if base != self.identity:
            raise ConfigError(
                f"the checkpoint's adapters belong to the model {base}, and this is {self.identity}; resume "
                "with the model.path and trainer.lora the run was started with"
            )

    def marks(self) -> dict[str, Tensor]:
        """The identity as bytes."""
        return {"base": torch.frombuffer(bytearray(self.identity.encode()), dtype=torch.uint8)}

    def base_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        base = {}
        for name, tensor in tensors.items():
            if not _is_adapter_weight(name):
                base[name.replace(".base_layer.", ".")] = tensor
        return base

    @torch.no_grad()
    def published(self, tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """The weights of an ordinary model that computes the same."""
        merged = self.base_of(tensors)
        for path, layer in self._layers.items():
            merged[f"{path}.weight"] = _add(_delta(layer), merged[f"{path}.weight"], dtype)
        return merged

    def save_beside(self, folder: Path, writes: bool = True) -> None:
        """Write the adapters alone, as a folder that `PeftModel.from_pretrained` and engines load beside the
        base."""
        tensors = {
            f"base_model.model.{name.replace(f'.{_NAME}.', '.')}": whole_tensor(
                parameter.detach()
            ).contiguous()
            for name, parameter in self._model.named_parameters()
            if _is_adapter_weight(name)
        }
        if not writes:
            return
        adapter_folder = folder / ADAPTER_FOLDER
        adapter_folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, adapter_folder / "adapter_model.safetensors", metadata={"format": "pt"})
        _as_loaded(self._peft_config, self._model, self._layers).save_pretrained(str(adapter_folder))


def _delta(layer: Any) -> Tensor:
    """What an adapter adds to its layer's weight, in full: as PEFT computes it, so that it does not depend on
    the number of ranks."""
    up = layer.lora_B[_NAME].weight
    down = layer.lora_A[_NAME].weight
    if isinstance(up, DTensor):
        up = up.full_tensor()
        down = down.full_tensor()
    product = up @ down
    delta: Tensor = (product.T if layer.fan_in_fan_out else product) * layer.scaling[_NAME]
    return delta


def _add(delta: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of weight and delta, split as the weight is."""
    if not isinstance(weight, DTensor):
        # Added in float32 and rounded once: the base may be in bfloat16.
        return (weight.to(delta.dtype) + delta).to(dtype)
    low, high = held_range(weight)
    local = weight.to_local()
    rows_of_delta = delta.reshape(-1)[low:high].view_as(local)
    return DTensor.from_local(
        (local.to(delta.dtype) + rows_of_delta).to(dtype),
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def _is_adapted(module: nn.Module) -> bool:
    from peft.tuners.lora import LoraLayer

    return isinstance(module, LoraLayer)


def _is_adapter_weight(name: str) -> bool:
    return f".lora_A.{_NAME}." in name or f".lora_B.{_NAME}." in name


def find_targets(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Names of the layers that get an adapter, in full: a model's other parts may have layers of the same
    names that take none. Raises ConfigError: a name fits no linear layer, or the layer shares its weights
    with the embedding."""
    head = output_head(model)
    # None on a router or in one: routers are left as they were.
    routing = modules_of_routers(model)
    # Nor on a tower or its projector, whose layers may have the same names: engines leave them out.
    of_tower = {id(module) for section in tower_of(model) for module in section.modules()}
    linears = {
        name: module
        for name, module in model.named_modules()
        if id(module) not in routing | of_tower and _takes_adapter(module)
    }
    if config.target_modules == "all-linear":
        return [name for name, module in linears.items() if module is not head]
    targets = []
    for target in config.target_modules:
        names = [name for name in linears if f".{name}".endswith(f".{target}")]
        if not names:
            in_tower = [
                name
                for name, module in model.named_modules()
                if id(module) in of_tower and f".{name}".endswith(f".{target}")
            ]
            if in_tower:
                raise ConfigError(
                    f"trainer.lora.target_modules: {target} is in the tower of pictures alone "
                    f"({in_tower[0]}), of which engines take no adapters; leave it out"
                )
            last_parts = sorted({name.rpartition(".")[2] for name in linears})
            raise ConfigError(
                f"trainer.lora.target_modules: the model has no linear layer {target!r}; it has "
                f"{', '.join(last_parts)}, or take all-linear"
            )
        if any(linears[name].weight is model.get_input_embeddings().weight for name in names):
            raise ConfigError(
                f"trainer.lora.target_modules: {target} shares its weights with the embedding, which an "
                "adapter on one of the two would tear apart; leave it out"
            )
        targets += names
    return targets


@torch.no_grad()
def _takes_adapter(module: nn.Module) -> bool:
    """Whether it is a linear layer from vectors to vectors. Some classes of their own are none: the grouped
    layers of DeepSeek-V4 multiply each vector with a part of their matrix."""
    if not isinstance(module, nn.Linear) or type(module) is nn.Linear:
        return isinstance(module, nn.Linear | Conv1D)
    try:
        output = module(module.weight.new_zeros(3, module.in_features))
    except RuntimeError:
        return False
    return isinstance(output, Tensor) and output.shape == (3, module.out_features)


def _inject(model: PreTrainedModel, config: LoraConfig, targets: list[str], seed: int) -> Any:
    """Put PEFT's layers around the targets and freeze everything else; returns PEFT's own config."""
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "trainer.lora needs the package peft, which is not installed: pip install 'tidemill[lora]'"
        ) from None
    peft_config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.config.name_or_path,
        r=config.rank,
        lora_alpha=config.alpha,
        use_rslora=config.rank_stabilized,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    forked = torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else [])
    with forked, _with_placeholders(model), _with_names_as_given():
        # In a fork of the generator: the run's own random numbers are the same with adapters and without.
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(peft_config, model, adapter_name=_NAME)
        except ValueError as error:  # of layers whose kernels would pass by an adapter
            raise ConfigError(f"trainer.lora.target_modules: {error}") from None
    for name, layer in model.named_modules():
        if _is_adapted(layer) and not isinstance(layer.get_base_layer(), nn.Linear | Conv1D):
            raise ConfigError(f"trainer.lora: this release of peft adapts {name}; install the locked one")
    return peft_config


def _as_loaded(config: Any, model: PreTrainedModel, layers: Iterable[str]) -> Any:
    """The config with which PEFT adapts these layers. Those whose names it would take for older ones of
    experts (see below) are given by their weights: these names it leaves alone."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    def is_taken(target: str) -> bool:
        config_of_target = replace(config, target_modules={target})
        try:
            convert_peft_config_for_transformers(config_of_target, model, None)
        except ValueError:  # it wants all parts of what it takes them for
            return True
        return target not in config_of_target.target_modules

    mistaken = {target for target in config.target_modules if is_taken(target)}
    endings = tuple(f".{target}" for target in mistaken)
    weights = [f"{name}.weight" for name in layers if f".{name}".endswith(endings)]
    return replace(config, target_modules=config.target_modules - mistaken, target_parameters=weights or None)


def lost_in_peft(model: PreTrainedModel, config: Any, layers: Iterable[str]) -> list[str]:
    """Layers whose adapters PEFT gives another name when it loads them, so that they stay zero: it applies
    what transformers renames in the weights of the model's first files."""
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    nothing = torch.zeros(config.r, config.r)
    name_of = {f"base_model.model.{name}.lora_A.weight": name for name in layers}
    try:
        loaded = convert_peft_adapter_state_dict_for_transformers(
            model, config, dict.fromkeys(name_of, nothing)
        )
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError):
        return []  # of another release: only a warning depends on it
    return [layer for name, layer in name_of.items() if name not in loaded]


@contextmanager
def _with_names_as_given() -> Iterator[None]:
    """PEFT takes names of linear layers, as of shared experts, for those that experts had in older releases
    of transformers: it would adapt the tensors of all experts in their place."""
    from peft.utils import transformers_weight_conversion as conversion

    convert = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = convert


@contextmanager
def _with_placeholders(model: PreTrainedModel) -> Iterator[None]:
    """Within the block, a number expanded to its shape replaces each weight on the meta device: PEFT puts
    adapters on the device of their layer, and on the meta device they would lose their values."""
    empty = [
        (module, name, weight)
        for module in model.modules()
        for name, weight in module._parameters.items()
        if weight is not None and weight.is_meta
    ]
    for module, name, weight in empty:
        number = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        module._parameters[name] = nn.Parameter(number, requires_grad=False)
    try:
        yield
    finally:
        for module, name, weight in empty:
            weight.requires_grad = False
            module._parameters[name] = weight
