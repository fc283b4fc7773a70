"""What one GPU of the trainer, one GPU of an engine, and one host take: arithmetic on a model's sizes.

Bytes throughout. With P parameters, T of them trained, in S shards (`trainer.shard_ranks`): master weights
4P / S, gradients 4T / S, AdamW's moments 8T / S, the version before in 16 bits 2P / S. Experts are divided by
whole ones: the fullest rank may have more of them. What a pass keeps is in `sizes.py`. A peak is what is
always there with the larger of what training and scoring take beside it, or what starting takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.services.trainer.policy.attention import head_size, layer_configs
from tidemill.services.trainer.policy.head import GPU_ELEMENTS
from tidemill.services.trainer.policy.memory.sizes import ModelSizes
from tidemill.services.trainer.policy.offload import PLACES, SLICE

GIB = float(1 << 30)
CONTEXT_BYTES = 1.0 * GIB
"""CUDA's context and libraries on a GPU."""
FRAGMENTED = 0.05
"""Share of a GPU's memory that an allocator cannot hand out at a peak, and collectives keep."""
ENGINE_WORK_BYTES = 1.5 * GIB
"""Activations of a prefill, and graphs, of an engine."""
VLLM_STEP_TOKENS = 2048
"""Tokens that vLLM schedules in a step, unless `rollout.vllm.extra` says otherwise."""
USUAL_GROUPS = 64
"""Groups that a worker holds with `max_groups_in_flight: auto`, where prompts are long."""
ASLEEP_BYTES = 2.0 * GIB
"""Context and graphs of an engine that sleeps."""
PINNED = 4.0 / 3.0
"""Host memory for a pinned tensor, as a mean multiple of its size: torch rounds up to powers of two."""

Uses = Mapping[str, float]
"""What memory is for -> bytes."""


@dataclass(frozen=True, slots=True)
class Take:
    """What one device takes; `parts` are those of its peak."""

    parts: Uses
    peak: float
    """The most at any time."""
    running: float
    """The most within a step."""


def make_take(running: Uses, starting: Uses) -> Take:
    """The larger of what a step takes and of what is there when the process starts."""
    parts = max(running, starting, key=_total)
    return Take(parts, _total(parts), _total(running))


def _total(parts: Uses) -> float:
    return sum(parts.values())


def usable(gpu_bytes: float) -> float:
    """Bytes of a GPU's memory that a process can use."""
    return gpu_bytes * (1.0 - FRAGMENTED) - CONTEXT_BYTES


def element_bytes(config: RunConfig) -> int:
    """Bytes of a weight in the dtype of the products."""
    return 2 if config.model.dtype == "bfloat16" else 4


def num_trained(config: RunConfig, sizes: ModelSizes) -> int:
    lora = config.trainer.lora
    if lora is not None:
        return sizes.adapters_per_rank * lora.rank
    is_frozen = config.images is not None and not config.trainer.train_tower
    return sizes.parameters - (sizes.tower if is_frozen else 0)


def has_critic(config: RunConfig) -> bool:
    return config.trainer.algorithm.needs_values and config.trainer.algorithm.value.model == "own"


def num_shards(config: RunConfig) -> int:
    """Ranks that hold one copy of the model together."""
    return config.trainer.shard_ranks or config.trainer.num_ranks


def longest_part(config: RunConfig) -> int:
    """Tokens of the longest sequence that a rank has."""
    return -(-config.model.max_model_len // config.trainer.context_size)


def held(config: RunConfig, sizes: ModelSizes) -> float:
    """Parameters of the model on the rank that has the most of them."""
    shards = num_shards(config)
    apart = config.trainer.expert_size
    same = shards / apart
    most = ceil(ceil(sizes.num_experts / apart) / same) / max(sizes.num_experts, 1)
    return (sizes.parameters - sizes.experts) / shards + sizes.experts * most


def others_experts(config: RunConfig, experts: int) -> float:
    """Number of parameters that a rank never gathers, of all `experts` parameters of experts."""
    return experts * (1 - 1 / config.trainer.expert_size)


def trainer_take(
    config: RunConfig, sizes: ModelSizes, gpu_bytes: float, num_tokens: int, recomputed: bool
) -> Take:
    """What a GPU of the trainer takes with `num_tokens` in a forward pass, or with its part of the longest
    sequence where that is more."""
    trainer = config.trainer
    shards = num_shards(config)
    copies = 1 + has_critic(config)
    num_tokens = max(num_tokens, longest_part(config))
    states = _states(config, sizes, gpu_bytes)
    training = {
        "activations": copies * sizes.kept_bytes(num_tokens, recomputed),
        "gradients of one layer's activations": num_tokens * sizes.layer_bytes,
        "logits": _logits(sizes, num_tokens, element_bytes(config)),
        **_working_weights(config, sizes, copies),
    }
    training |= _pictures(config, sizes, copies, num_tokens, recomputed)
    if trainer.algorithm.router.is_on:
        training["router logits"] = float(num_tokens * sizes.router_logits * element_bytes(config))
    scoring = {}
    if "held weights" in states:
        scoring["held weights, swapped"] = states["held weights"]
    if trainer.lora is not None:
        scoring["merged weights of an export"] = element_bytes(config) * held(config, sizes)
    starting = {}
    if sizes.is_read_whole:
        starting["whole model in float32, before it is split"] = 4.0 * sizes.parameters
        if shards > 1 and (trainer.algorithm.needs_reference or has_critic(config)):
            starting["its copy"] = 4.0 * sizes.parameters
    return make_take(states | max(training, scoring, key=_total), starting)


def _pictures(
    config: RunConfig, sizes: ModelSizes, copies: int, num_tokens: int, recomputed: bool
) -> dict[str, float]:
    """Pixels of the pictures of a pass, and their way through the tower. All its tokens may stand for some:
    so the limits of tokens are limits of pictures, too, whose memory needs no limit of its own."""
    vision: Any = getattr(sizes.config, "vision_config", None)
    if config.images is None or vision is None:
        return {}
    # Ranks that share a pass have its tokens in parts, and each of them all its pictures.
    num_patches = num_tokens * config.trainer.context_size * _patches_of_token(vision)
    tower = sizes.tower_kept_bytes(num_patches, recomputed, config.trainer.train_tower)
    return {
        "pixels of pictures": _pixel_bytes(vision, num_patches),
        "activations of the tower": copies * tower,
    }


def _patches_of_token(vision: Any) -> int:
    """Qwen's token stands for a square of patches, LLaVA's for one."""
    return int(getattr(vision, "spatial_merge_size", 1)) ** 2


def _pixel_bytes(vision: Any, num_patches: int) -> float:
    """Of patches in float32, with three colours; Qwen's are of some frames of a film."""
    return (
        4.0 * num_patches * 3 * int(vision.patch_size) ** 2 * int(getattr(vision, "temporal_patch_size", 1))
    )


def _states(config: RunConfig, sizes: ModelSizes, gpu_bytes: float) -> dict[str, float]:
    trainer = config.trainer
    algorithm = config.trainer.algorithm
    shards = num_shards(config)
    trained = num_trained(config, sizes)
    width = element_bytes(config)
    share_held = held(config, sizes)
    own_trained = share_held - (sizes.parameters - trained) / shards
    masters = 4.0 * share_held
    if trainer.lora is not None:
        own_trained = trained / shards
        # Experts stay in float32: only linear layers are read in the dtype of the products.
        masters = 4.0 * share_held + ((width - 4) * sizes.linears + 4 * trained) / shards
    parts = {
        "master weights": masters,
        "gradients": 4.0 * own_trained,
        "AdamW moments": 8.0 * own_trained,
    }
    if trainer.offload_optimizer:
        passing = float(8 * PLACES * min(SLICE, trained))
        parts["AdamW moments"] = min(passing, parts["AdamW moments"])
    if width == 2:
        parts["version before, for deltas"] = 2.0 * share_held
    # As `rank_policy.reduces_once` decides.
    summed = trained - (others_experts(config, sizes.experts) if trainer.lora is None else 0.0)
    is_small = trainer.sum_gradients == "auto" and 4 * summed <= gpu_bytes / 4
    if trainer.num_ranks > 1 and (is_small or trainer.sum_gradients == "update"):
        parts["gradients until an update"] = 4.0 * summed
    if algorithm.needs_reference and trainer.lora is None:
        size = 2.0 if algorithm.reference.dtype == "bfloat16" else 4.0
        parts["reference model"] = size * share_held
    if has_critic(config):
        parts["critic"] = 16.0 * share_held
    needs_start = trainer.needs_proximal or algorithm.needs_values or algorithm.needs_statistics
    if trainer.updates_per_step > 1 and needs_start:
        parts["held weights"] = 4.0 * own_trained
    return parts


def _working_weights(config: RunConfig, sizes: ModelSizes, copies: int) -> dict[str, float]:
    """Weights in the dtype of the products: all on one rank, else those of two layers and the root."""
    width = element_bytes(config)
    trainer = config.trainer
    if trainer.num_ranks == 1:
        kept = 0.0 if trainer.lora is not None else copies * sizes.copied_bytes
        return {"weights in the compute dtype": kept} if kept else {}
    layer = sizes.layer - others_experts(config, sizes.layer_experts)
    return {
        "gathered layers": float(width * (sizes.root + 2 * layer)),
        "gradients being summed": float((width + 4) * max(sizes.root, layer)),
    }


def _logits(sizes: ModelSizes, num_tokens: int, width: int) -> float:
    """Bytes, as `head.py` states them: chunks, the head's matrix, hidden states and their gradient."""
    elements = min(num_tokens * sizes.vocabulary, GPU_ELEMENTS)
    each = 16 if sizes.has_capped_logits else 12
    return float(
        each * elements + (width + 4) * sizes.vocabulary * sizes.hidden + 2 * 4 * num_tokens * sizes.hidden
    )


@dataclass(frozen=True, slots=True)
class EngineTake:
    parts: Uses
    """Without the KV cache."""
    room: float
    """Left for the KV cache, within `gpu_memory_utilization`."""
    sequence: float
    """KV cache of a sequence of `max_model_len`."""
    num_sequences: int
    """Sequences of that length that fit at once."""


def engine_take(config: RunConfig, sizes: ModelSizes, gpu_bytes: float, ways: int) -> EngineTake:
    """What a GPU of a vLLM engine takes that `ways` GPUs hold together."""
    vllm = config.rollout.vllm
    width = element_bytes(config)
    parts = {
        "weights": float(width * sizes.parameters) / ways,
        "activations and graphs": ENGINE_WORK_BYTES,
        "logits": 8.0 * config.rollout.max_num_seqs * sizes.vocabulary,
    }
    parts |= _pictures_of_engine(config, sizes, width)
    room = vllm.gpu_memory_utilization * gpu_bytes - sum(parts.values())
    sequence = kv_bytes(sizes.config, config.model.max_model_len, width, ways)
    return EngineTake(parts, room, sequence, max(0, int(room // sequence)) if sequence else 0)


def _pictures_of_engine(config: RunConfig, sizes: ModelSizes, width: int) -> dict[str, float]:
    """Pictures that vLLM's tower takes at a time, and the features that it keeps: of as many tokens as it
    schedules in a step, or of the largest picture. Whole on each GPU, as what the tower's layers pass on is.
    """
    vision: Any = getattr(sizes.config, "vision_config", None)
    if config.images is None or vision is None:
        return {}
    scheduled = int(config.rollout.vllm.extra.get("max_num_batched_tokens", VLLM_STEP_TOKENS))
    num_tokens = max(scheduled, _largest_picture(config, vision))
    num_patches = num_tokens * _patches_of_token(vision)
    # Further features of Qwen3-VL, for the first layers of the text.
    num_levels = 1 + len(getattr(vision, "deepstack_visual_indexes", ()))
    return {
        "pixels of pictures": _pixel_bytes(vision, num_patches),
        "activations of the tower": sizes.tower_kept_bytes(num_patches, recomputed=False, is_trained=False),
        "features of pictures": float(width * num_tokens * num_levels * sizes.hidden),
    }


def _pictures_of_host(config: RunConfig, sizes: ModelSizes, engines: int) -> dict[str, float]:
    """Pixels of the groups that workers hold, as many as a prompt (of sessions: a history) has tokens for:
    each group's once in the worker, and once in vLLM's core for each sample, which is a request there."""
    vision: Any = getattr(sizes.config, "vision_config", None)
    if config.images is None or vision is None:
        return {}
    groups = config.rollout.max_groups_in_flight
    num_groups = USUAL_GROUPS if groups == "auto" else groups
    is_single_turn = config.rollout.environment.is_single_turn
    longest = config.data.max_prompt_tokens if is_single_turn else config.model.max_model_len
    num_tokens = min(longest, config.images.max_per_prompt * _largest_picture(config, vision))
    of_prompt = _pixel_bytes(vision, num_tokens * _patches_of_token(vision))
    copies = 1 + config.largest_group_size
    return {"pixels of prompts in flight": copies * of_prompt * num_groups * engines}


def _largest_picture(config: RunConfig, vision: Any) -> int:
    """Most tokens of a picture."""
    assert config.images is not None, "a run of text has none"
    patch = int(vision.patch_size)
    merged = getattr(vision, "spatial_merge_size", None)
    if merged is None:  # all are of one size
        return int(vision.image_size // patch) ** 2
    return ceil(config.images.max_pixels / (patch * int(merged)) ** 2)


def kv_bytes(config: Any, length: int, width: int, ways: int = 1) -> float:
    """KV cache of a sequence, on each of `ways` GPUs: keys and values of each head, or the compressed ones of
    MLA; layers with a window keep that much; recurrent layers keep nothing that grows."""
    text = config.get_text_config()
    num_layers = int(text.num_hidden_layers)
    window = getattr(text, "sliding_window", None) or length
    usual = "sliding_attention" if window < length else "full_attention"
    kinds = list(getattr(text, "layer_types", None) or [usual] * num_layers)
    lengths = {"full_attention": length, "chunked_attention": length}
    lengths["sliding_attention"] = min(window, length)
    layers_of_config = layer_configs(config)
    layers = layers_of_config if len(layers_of_config) == num_layers else layers_of_config * num_layers
    return float(
        sum(
            lengths.get(kind, 0) * _key_bytes(layer, width, ways)
            for kind, layer in zip(kinds, layers, strict=True)
        )
    )


def _key_bytes(text: Any, width: int, ways: int) -> int:
    """KV cache of one token in one layer."""
    rank = getattr(text, "kv_lora_rank", None)
    if rank is not None:
        return int(width * (rank + text.qk_rope_head_dim))
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    return 2 * width * head_size(text) * max(1, -(-heads // ways))


def host_take(
    config: RunConfig, sizes: ModelSizes, ranks: int, engines: int, takes_turns: bool = False
) -> Take:
    """What a host with so many ranks and engines takes; with GPUs in turn, also for those that wait."""
    count = sizes.parameters
    trained = num_trained(config, sizes)
    shards = num_shards(config)
    always = {"processes and their libraries": 4.0 * GIB * (ranks + engines)} if ranks + engines else {}
    training = {}
    starting = {}
    if engines:
        always["full versions that engines stage"] = element_bytes(config) * count * engines
        always |= _pictures_of_host(config, sizes, engines)
        if config.weights.base_every > 1 and element_bytes(config) == 2:
            share = config.weights.max_share_changed
            training["changes that engines stage"] = 6.0 * share * count * engines
    if ranks:
        training["checkpoint on its way to the disk"] = 12.0 * trained / shards * min(ranks, shards)
        if config.trainer.offload_optimizer:
            always["AdamW moments"] = PINNED * 8.0 * trained / shards * ranks
        if sizes.is_read_whole:
            starting["whole model in float32, of each rank"] = 4.0 * count * ranks
    if takes_turns:
        always["weights of engines that sleep"] = PINNED * element_bytes(config) * count * engines
        # Between steps there are no gradients.
        states = _states(config, sizes, gpu_bytes=0.0)
        parked = sum(size for name, size in states.items() if not name.startswith("gradients"))
        always["trainer outside of its turn"] = PINNED * parked * ranks
    return make_take(always | training, always | starting)
