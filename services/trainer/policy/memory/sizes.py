"""Sizes of a model, from its configuration alone: parameters, and what a pass saves for its backward pass.

No weight is made. Parameters are counted on torch's meta device. Saved bytes are counted: one block of each
kind runs, with the real code of the model and fake tensors (shapes without data), and every storage that
autograd keeps is counted once. Two widths tell what grows with the tokens from what does not: the casts of
float32 weights that autocast keeps.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, masking_utils

from tidemill.common.config.trainer import LoraConfig
from tidemill.common.errors import ConfigError
from tidemill.common.run.chat_template import exact_attention
from tidemill.services.trainer.policy.attention import VARLEN, why_no_flash, why_no_varlen
from tidemill.services.trainer.policy.compiling import layers_of
from tidemill.services.trainer.policy.model_loading import recomputable_layers
from tidemill.services.trainer.policy.precision import round_alike
from tidemill.services.trainer.policy.routers import find_routers
from tidemill.services.trainer.weights.exported import plan_export
from tidemill.services.trainer.weights.store import model_tensors

MEASURED_TOKENS = 1024
"""Width of the narrower of two passes, of a kernel whose memory is linear."""
PROBED_GPU = (9, 0)
"""Compute capability for which an attention kernel is chosen, where no GPU is at hand."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Bytes that a forward pass keeps for its backward pass."""

    layers: float
    """Of a token, in all layers."""
    layer: float
    """Of a token, in the layer that keeps the most."""
    inputs: float
    """Of a token: what layers get, all that is kept of them where they are computed again."""
    rest: float
    """Of a token, outside of the layers: embeddings and last norm."""
    copies: int
    """Whatever the number of tokens: weights in the dtype of the products."""

    def of(self, num_tokens: int, recomputed: bool) -> float:
        """Bytes at the beginning of the backward pass, without `copies`; with `recomputed` layers, when the
        first of them has been computed again."""
        layers = self.inputs + self.layer if recomputed else self.layers
        return num_tokens * (layers + self.rest)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Numbers of elements, unless they say bytes."""

    parameters: int
    """All; shared ones once."""
    layer: int
    """Of the largest layer."""
    root: int
    """Outside of the layers: embeddings, last norm, output head."""
    head: int
    """The matrix of the output head."""
    vocabulary: int
    hidden: int
    linears: int
    """Matrices of linear layers that are not the embeddings."""
    adapters_per_rank: int
    """Of LoRA adapters of rank 1."""
    can_recompute: bool
    """Whether transformers marks layers of it for gradient checkpointing."""
    has_capped_logits: bool
    router_logits: int = 0
    """Of a token: experts, summed over layers."""
    is_read_whole: bool = False
    """Whether every rank reads the whole model before it is split."""


def build_on_meta(config: PreTrainedConfig, attention: Any, dtype: torch.dtype) -> PreTrainedModel:
    """The model without storage. Raises ConfigError: transformers makes no causal model of it."""
    options = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                deepcopy(config), dtype=dtype, **options
            )
    except (ValueError, TypeError, AttributeError, KeyError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.path: transformers makes no language model of config.json: {reason}"
        ) from None
    model.eval()
    return model


def attention_on_gpus(config: PreTrainedConfig) -> Any:
    """What `choose_attention` takes on a GPU of today; both kernels save the same."""
    if why_no_flash(config) or why_no_varlen(config, PROBED_GPU):
        return exact_attention(config)
    return VARLEN if config.get_text_config() is config else {"text_config": VARLEN}


def count_sizes(model: PreTrainedModel, lora: LoraConfig | None = None) -> ModelSizes:
    """The sizes of a model, which may be on the meta device."""
    config = model.config.get_text_config()
    blocks = layers_of(model)
    total, inside = _count(model.parameters()), _count(p for block in blocks for p in block.parameters())
    embedding = cast(Tensor, model.get_input_embeddings().weight)
    head = cast(Tensor, getattr(model.get_output_embeddings(), "weight", embedding))
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight is not embedding
    ]
    targets = "all-linear" if lora is None else lora.target_modules
    adapted = [
        module
        for name, module in linears
        if (module.weight is not head if targets == "all-linear" else name.rpartition(".")[2] in targets)
    ]
    return ModelSizes(
        parameters=total,
        layer=max((_count(block.parameters()) for block in blocks), default=0),
        root=total - inside,
        head=head.numel(),
        vocabulary=head.shape[0],
        hidden=head.shape[1],
        linears=sum(module.weight.numel() for _, module in linears),
        adapters_per_rank=sum(sum(module.weight.shape) for module in adapted),
        can_recompute=bool(recomputable_layers(model)),
        has_capped_logits=getattr(config, "final_logit_softcapping", None) is not None,
        router_logits=sum(len(next(router.parameters(), ())) for router in find_routers(model)),
    )


def _count(parameters: Iterator[Tensor] | Any) -> int:
    return sum({id(parameter): parameter.numel() for parameter in parameters}.values())


def measure_saved(model: PreTrainedModel, dtype: torch.dtype, width: int = MEASURED_TOKENS) -> Saved:
    """Run one layer of each kind on fake tensors, with products in `dtype` as `precision.py` has them.

    A kernel that gets boundaries runs rows of `width` and of twice that; every other one has one row and two
    of them, since its memory may grow with the square of `width`. The model is spent afterwards: it has
    these layers only. Raises ConfigError: the model does not run on fake tensors.

    Grouped experts have fake products in 16 bits only: in float32 they count as twice a model of those.
    """
    has_experts = any(".experts." in name for name, _ in model.named_parameters())
    weights, times = (torch.bfloat16, 2) if dtype == torch.float32 and has_experts else (torch.float32, 1)
    kinds, kept = _keep_kinds(model)
    if not kept:
        raise ConfigError(
            f"transformers names no layers of {type(model).__name__}, so its memory is not known"
        )
    if dtype != torch.float32:
        round_alike(model)
    try:
        narrow, wide = (_saved_once(model, kept, dtype, weights, n, width) for n in (1, 2))
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"{type(model).__name__} does not run on fake tensors: {reason}") from None
    slopes = {owner: (wide[owner] - narrow[owner]) / width for owner in wide}
    counts = [kinds.count(kind) for kind in dict.fromkeys(kinds)]
    layers = [slopes.get(str(i), 0.0) for i in range(len(kept))]
    fixed = {owner: narrow[owner] - slopes[owner] * width for owner in narrow}
    copies = round(sum(n * fixed.get(str(i), 0.0) for i, n in enumerate(counts)) + fixed.get("", 0.0))
    return Saved(
        layers=times * sum(count * slope for count, slope in zip(counts, layers, strict=True)),
        layer=times * max(layers),
        inputs=float(len(kinds) * model.config.get_text_config().hidden_size * torch.float32.itemsize),
        rest=times * slopes.get("", 0.0),
        copies=times * max(0, copies),
    )


def is_read_whole(model: PreTrainedModel) -> bool:
    """Whether it is not clear which elements of its files a rank's shard is (`weights/pretrained.py`). One
    layer of each kind tells; the model has no others afterwards."""
    _keep_kinds(model)
    return bool(plan_export(model, model_tensors(model), torch.float32).converted)


def _keep_kinds(model: PreTrainedModel) -> tuple[list[tuple[Any, ...]], list[nn.Module]]:
    """Leave out all layers but one of each kind: the kinds of all, and what is kept."""
    blocks = layers_of(model)
    kinds = [_kind(block) for block in blocks]
    kept = [blocks[kinds.index(kind)] for kind in dict.fromkeys(kinds)]
    _keep_layers(model, kept)
    return kinds, kept


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Layers of one kind save the same."""
    shapes = tuple((name, tuple(p.shape)) for name, p in block.named_parameters())
    windows = tuple(
        (name, module.sliding_window)
        for name, module in block.named_modules()
        if hasattr(module, "sliding_window")
    )
    return type(block).__name__, shapes, windows


def _keep_layers(model: PreTrainedModel, kept: Sequence[nn.Module]) -> None:
    """Leave out all other layers."""
    config = model.config.get_text_config()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and any(block in kept for block in child):
                own = [block for block in child if block in kept]
                setattr(module, name, nn.ModuleList(own))
                config.num_hidden_layers = len(own)


def _saved_once(
    model: PreTrainedModel,
    kept: Sequence[nn.Module],
    dtype: torch.dtype,
    weights: torch.dtype,
    times: int,
    width: int,
) -> Counter[str]:
    """Bytes by owner: the number of a layer, or empty outside of them."""
    is_varlen = str(model.config.get_text_config()._attn_implementation) == VARLEN
    rows, width = (1, width * times) if is_varlen else (times, width)
    casting = nullcontext() if dtype == torch.float32 else torch.autocast("cpu", dtype=dtype)
    with FakeTensorMode():
        _fake(model, weights)
        owned = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        kwargs: dict[str, Any] = {"input_ids": torch.zeros((rows, width), dtype=torch.long)}
        if is_varlen:
            bounds = torch.zeros(2, dtype=torch.int32)
            kwargs |= {"position_ids": kwargs["input_ids"], "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
            kwargs |= {"max_length_q": width, "max_length_k": width}
        with casting, _told_unpacked(), counted(kept, owned) as found:
            model.base_model(**kwargs, use_cache=False)
    return found


@contextmanager
def _told_unpacked() -> Iterator[None]:
    """Let transformers make no masks. It would read from positions whether rows are packed, and fake ones
    have no values. Padded rows really get no mask, and boundaries take the place of masks."""
    look = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = look


def _fake(model: nn.Module, dtype: torch.dtype) -> None:
    """Give every parameter and buffer a fake tensor of its shape; call it in fake mode."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is not None:
                fake = nn.Parameter(torch.empty(old.shape, dtype=dtype), requires_grad=old.requires_grad)
                module._parameters[name] = made.setdefault(id(old), fake)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


@contextmanager
def counted(layers: Sequence[nn.Module], owned: set[int]) -> Iterator[Counter[str]]:
    """Counts the bytes of storages that autograd keeps inside, by the layer that was the first to; not those
    in `owned`."""
    seen: dict[int, Tensor] = {}
    owner, found = [""], Counter[str]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage._cdata not in owned:
            seen[storage._cdata] = tensor  # kept, so that no other storage gets its address
            found[owner[0]] += storage.nbytes()
        return tensor

    def enter(number: int) -> Any:
        return lambda *_: owner.__setitem__(0, str(number))

    def leave(*_: Any) -> None:
        owner[0] = ""

    hooks = [layer.register_forward_pre_hook(enter(i)) for i, layer in enumerate(layers)]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield found
    finally:
        for hook in hooks:
            hook.remove()
