"""Sizes of a model from its configuration alone: parameters, and what a pass keeps for its backward pass.

No weight is made: modules are built on torch's meta device, and the bytes that autograd keeps follow from the
shapes of a layer's modules. Against real passes of a model they are right within a tenth (tests). Layers that
recur (Mamba, gated delta rules) count by their matrices, without what their kernels keep.
"""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from tidemill.common.config import RunConfig
from tidemill.common.config.trainer import LoraConfig
from tidemill.common.errors import ConfigError
from tidemill.common.run.model_config import exact_attention, with_overrides
from tidemill.common.run.routers import find_routers
from tidemill.services.trainer.policy.adapters import find_targets
from tidemill.services.trainer.policy.attention import VARLEN, head_size, why_no_flash, why_no_varlen
from tidemill.services.trainer.policy.fsdp.experts import expert_weights
from tidemill.services.trainer.policy.layers import layers_of, tower_of
from tidemill.services.trainer.policy.model_loading import auto_class, compute_dtype, recomputable_layers
from tidemill.services.trainer.weights.exported import plan_export
from tidemill.services.trainer.weights.store import model_tensors

USUAL_GPU = (9, 0)
"""Compute capability for which an attention kernel is chosen, where no GPU is at hand."""
TOWER_SHARE = 1.5
"""What a tower and its projector keep, as a multiple of what matrices and norms of its layers do: rotations,
activations and merging keep the rest. 1.38 (Qwen2.5-VL), 1.65 (Qwen3-VL) and 1.44 (LLaVA) of two layers."""
WIDE = 4
"""Bytes of float32: what layers pass on to each other, and what norms compute with."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Numbers of elements, unless they say bytes."""

    parameters: int
    """All parameters; shared ones once."""
    layer: int
    """Parameters of the largest layer."""
    root: int
    """Parameters outside of the layers: embeddings, last norm, output head."""
    vocabulary: int
    hidden: int
    """Rows and columns of the output head's matrix."""
    linears: int
    """Matrices of linear layers that are not the embeddings."""
    adapters_per_rank: int
    """Parameters of LoRA adapters of rank 1."""
    can_recompute: bool
    """Whether transformers marks layers of it for gradient checkpointing."""
    has_capped_logits: bool
    layers_bytes: float
    """Kept for the backward pass for each token, in all layers."""
    layer_bytes: float
    """Kept for each token in the layer that keeps the most."""
    num_layers: int
    copied_bytes: float
    """Kept whatever the number of tokens: weights in the dtype of the products."""
    router_logits: int = 0
    """For each token: experts, summed over layers."""
    experts: int = 0
    """Parameters of experts that ranks can divide (`trainer.expert_ranks`), in all layers."""
    layer_experts: int = 0
    """Parameters of such experts in the largest layer."""
    num_experts: int = 0
    """Such experts of a layer; where layers differ, the greatest common divisor."""
    is_read_whole: bool = False
    """Whether every rank reads the whole model before it is split: it is not clear which elements of its
    files a rank's shard is (`weights/pretrained.py`)."""
    tower: int = 0
    """Parameters of what makes features of pictures."""
    tower_layer_bytes: float = 0.0
    """Kept for each patch of a picture, in the layer of the tower that keeps the most."""
    tower_layers_bytes: float = 0.0
    """Kept for each patch in all layers of the tower."""
    tower_hidden: int = 0
    num_tower_layers: int = 0
    config: Any = None
    """The model's configuration."""

    def kept_bytes(self, num_tokens: int, recomputed: bool) -> float:
        """Bytes kept at the beginning of the backward pass, without `copied_bytes`. With `recomputed` layers,
        whose inputs alone are kept, that is when the first of them has been computed again."""
        inputs = float(WIDE * self.num_layers * self.hidden)
        last_norm = 2.0 * WIDE * self.hidden
        layers = inputs + self.layer_bytes if recomputed else self.layers_bytes
        return num_tokens * (layers + last_norm)

    def tower_kept_bytes(self, num_patches: int, recomputed: bool, is_trained: bool) -> float:
        """The same of the tower, for so many patches; one that is frozen keeps nothing, and has one layer's
        activations at a time."""
        if not is_trained:
            return num_patches * self.tower_layer_bytes
        inputs = float(WIDE * self.num_tower_layers * self.tower_hidden)
        kept = inputs + self.tower_layer_bytes if recomputed else self.tower_layers_bytes
        return num_patches * kept


def read_model(config: RunConfig) -> ModelSizes:
    """The sizes of `model.path`, of which config.json alone is read.

    Raises:
        ConfigError: there is no config.json, or it is of no model whose sizes can be known.
    """
    try:
        model_config = with_overrides(AutoConfig.from_pretrained(config.model.path), config.model)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"model.path: {config.model.path} has no config.json to read: {reason}") from None
    model = build_on_meta(model_config, attention_on_gpus(model_config))
    dtype = compute_dtype(config.model)
    row_tokens = config.model.max_model_len
    return count_sizes(model, dtype, row_tokens, config.trainer.lora)


def build_on_meta(config: PreTrainedConfig, attention: Any = None) -> PreTrainedModel:
    """The model in float32, without storage. Raises ConfigError: transformers makes no causal model of it."""
    options = {} if attention is None else {"attn_implementation": attention}
    try:
        with torch.device("meta"):
            model: PreTrainedModel = auto_class(config).from_config(
                deepcopy(config), dtype=torch.float32, **options
            )
    except (ValueError, TypeError, AttributeError, KeyError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model.path: transformers makes no language model of config.json: {reason}"
        ) from None
    model.eval()
    return model


def attention_on_gpus(config: PreTrainedConfig) -> Any:
    """What `choose_attention` takes on a `USUAL_GPU`; both kernels keep the same."""
    if why_no_flash(config) or why_no_varlen(config, USUAL_GPU):
        return exact_attention(config)
    return VARLEN if config.get_text_config() is config else {"text_config": VARLEN}


def count_sizes(
    model: PreTrainedModel, dtype: torch.dtype, row_tokens: int, lora: LoraConfig | None = None
) -> ModelSizes:
    """The sizes of a model, which may be on the meta device, with products in `dtype` that round as
    `precision.py` says. A kernel with dense masks has rows of `row_tokens`.

    Raises:
        ConfigError: transformers names no layers of this model, or it has none with an adapter.
    """
    text = model.config.get_text_config()
    blocks = layers_of(model)
    of_text = set(model.get_decoder().modules())
    width = dtype.itemsize
    scores = _scores(text, width, row_tokens)
    layers = []
    for block in blocks:
        if block in of_text:
            layers.append(scores + sum(_kept(module, text, width) for module in block.modules()))
    vision: Any = getattr(model.config, "vision_config", None)
    tower_layers = []
    for block in blocks:
        if block not in of_text and vision is not None:
            kept = sum(_kept(module, vision, width) for module in block.modules())
            tower_layers.append(TOWER_SHARE * (_scores(vision, width, 0) + kept))
    tower_weights = [weight for module in tower_of(model) for weight in module.parameters()]
    if not layers:
        raise ConfigError(
            f"transformers names no layers of {type(model).__name__}, so its memory is not known"
        )
    experts = expert_weights(model)
    total = _count(model.parameters())
    inside = _count(p for block in blocks for p in block.parameters())
    matrices = _count(p for block in blocks for p in block.parameters() if block in of_text and p.ndim > 1)
    embedding = cast(Tensor, model.get_input_embeddings().weight)
    head = cast(Tensor, getattr(model.get_output_embeddings(), "weight", embedding))
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m.weight is not embedding]
    adapted = [model.get_parameter(f"{name}.weight") for name in find_targets(model, lora or LoraConfig())]
    largest = max(blocks, key=lambda block: _count(block.parameters()))
    return ModelSizes(
        parameters=total,
        layer=_count(largest.parameters()),
        root=total - inside,
        vocabulary=head.shape[0],
        hidden=head.shape[1],
        linears=sum(module.weight.numel() for module in linears),
        adapters_per_rank=sum(sum(weight.shape) for weight in adapted),
        can_recompute=bool(recomputable_layers(model)),
        has_capped_logits=getattr(text, "final_logit_softcapping", None) is not None,
        layers_bytes=sum(layers),
        layer_bytes=max(layers),
        num_layers=len(layers),
        # In float32 a product reads the weight itself.
        copied_bytes=float(width * matrices) if width < WIDE else 0.0,
        router_logits=sum(len(next(router.parameters(), ())) for _, router in find_routers(model)),
        experts=_count(experts),
        layer_experts=_count(p for p in largest.parameters() if id(p) in set(map(id, experts))),
        num_experts=gcd(*map(len, experts)),
        tower=_count(tower_weights),
        tower_layer_bytes=max(tower_layers, default=0.0),
        tower_layers_bytes=sum(tower_layers),
        tower_hidden=int(getattr(vision, "hidden_size", 0) or 0),
        num_tower_layers=len(tower_layers),
        is_read_whole=bool(plan_export(model, model_tensors(model), torch.float32).converted),
        config=model.config,
    )


def _count(parameters: Iterable[Tensor]) -> int:
    return sum({id(parameter): parameter.numel() for parameter in parameters}.values())


def _kept(module: nn.Module, text: Any, width: int) -> float:
    """Bytes for each token that one module of a layer keeps for its children."""
    linears = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
    norms = {name: child for name, child in module.named_children() if "norm" in type(child).__name__.lower()}
    kept = float(width * _matrix_elements(list(linears.values()), module, width))
    for name, norm in norms.items():
        size = next((p.numel() for p in norm.parameters(recurse=False)), int(text.hidden_size))
        prefix = name.replace("layernorm", "").replace("norm", "").rstrip("_")
        of_heads = [
            linear.out_features for linear_name, linear in linears.items() if linear_name.startswith(prefix)
        ]
        if prefix and of_heads:  # such as `q_norm`, over the output of `q_proj`
            kept += (WIDE + width) * max(size, of_heads[0])
        else:  # input and normalised values; in float32 the matrices behind it keep the output
            kept += WIDE * size * (1 if isinstance(norm, nn.LayerNorm) else 2) + (width // WIDE) * WIDE * size
    return kept + _experts(module, text, width)


def _matrix_elements(linears: Sequence[nn.Linear], module: nn.Module, width: int) -> int:
    """Elements for each token of inputs and outputs of linear layers. The output of a module's last one goes
    into the residual stream, which the next norm keeps. In half precision each casts a norm's float32 output
    for itself, else they share it."""
    if not linears:
        return 0
    *first, last = linears
    written = sum(linear.out_features for linear in first)
    # For a gated product the activation is kept beside both factors.
    is_gated = written >= 2 * last.in_features and "Attention" not in type(module).__name__
    read = sum(linear.in_features for linear in first) if width < WIDE else 0
    return read + written + last.in_features * (2 if is_gated else 1)


def _experts(module: nn.Module, text: Any, width: int) -> float:
    """Bytes for each token of grouped experts: rows of the chosen ones in and out, both factors, activation
    and product; and the router's input and probabilities."""
    shapes = [p.shape for p in module.parameters(recurse=False) if p.ndim == 3]
    if not shapes:
        return 0.0
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None) or 1
    num_experts = shapes[0][0]
    hidden = int(text.hidden_size)
    inner = sum(shape.numel() for shape in shapes) / (3 * hidden * num_experts)
    return width * (chosen * (2 * hidden + 4 * inner) + hidden) + WIDE * num_experts


def _scores(text: Any, width: int, row_tokens: int) -> float:
    """Bytes for each token of attention beside queries, keys and values: a sum a head, or dense scores."""
    heads = int(getattr(text, "num_attention_heads", None) or 0)
    if text._attn_implementation != "eager":
        return float(WIDE * heads)
    # Probabilities in float32 and, in half precision, as the product reads them; capped scores; and keys and
    # values repeated for each head.
    each = WIDE + (width if width < WIDE else 0)
    each += width if getattr(text, "attn_logit_softcapping", None) else 0
    repeated = heads - int(getattr(text, "num_key_value_heads", None) or heads)
    return float(heads * row_tokens * each + 2 * repeated * head_size(text) * width)
