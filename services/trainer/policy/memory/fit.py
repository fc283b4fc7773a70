"""The passes of a trainer that fit into its GPUs.

`choose_passes` is what `auto` means on a GPU: the tokens of a forward pass and whether layers are computed
again, tried from fast to small; `choose_ranks`, how many ranks share a pass or divide experts. What
`tidemill check` says of a run's memory is in advice.py, which a trainer does not import.
"""

import json
import os
from functools import reduce
from math import gcd
from pathlib import Path
from typing import Any

import structlog
import torch

from tidemill.common.config import RunConfig
from tidemill.common.config.trainer import DEFAULT_RANK_TOKENS, LoraConfig
from tidemill.common.errors import ConfigError
from tidemill.common.files import write_atomically
from tidemill.common.run.model_config import has_capped_attention
from tidemill.services.trainer.policy.attention import layer_configs
from tidemill.services.trainer.policy.memory.estimate import (
    ASLEEP_BYTES,
    GIB,
    Take,
    longest_part,
    num_shards,
    trainer_take,
    usable,
)
from tidemill.services.trainer.policy.memory.sizes import ModelSizes, read_model
from tidemill.services.trainer.policy.model_loading import pick_device
from tidemill.services.trainer.policy.packing import SOFTMAX_ATTENTION, kinds_of_layers

log = structlog.get_logger(__name__)


Settings = dict[str, Any]
"""Fields of the config, and values."""
TOKENS = "trainer.micro_batch_tokens"
RECOMPUTES = "trainer.gradient_checkpointing"
CONTEXT = "trainer.context_ranks"
EXPERTS = "trainer.expert_ranks"
PASSES_FILE = "passes.json"
"""File in the run's folder with the sizes of passes that the run started with. Another GPU would choose
others, and sum gradients in another order: a replay there would not give the recorded bits."""


def with_fitting_passes(config: RunConfig, folder: Path | None = None) -> RunConfig:
    """`auto` of the trainer's passes and ranks replaced by what fits on this GPU; on a CPU, and where the
    model cannot be measured, it stays. With the run's folder, tokens and ranks are those that the run has had
    from its start."""
    device = pick_device(config.trainer.device)
    fields = (TOKENS, RECOMPUTES, *((CONTEXT, EXPERTS) if config.trainer.num_ranks > 1 else ()))
    autos = [field for field in fields if value_of(config, field) == "auto"]
    if device.type != "cuda" or not autos:
        return config
    kept = {field: field.rpartition(".")[2] for field in autos if field != RECOMPUTES}
    record = None if folder is None or not kept else folder / PASSES_FILE
    if record is not None and record.exists():
        # Runs that began before ranks were chosen have had 1.
        values = {"context_ranks": 1, "expert_ranks": 1, **json.loads(record.read_text())}
        config = with_settings(
            config, {field: values[name] for field, name in kept.items() if name in values}
        )
    try:
        sizes = read_model(config)
    except ConfigError as error:
        log.warning("passes are not fitted to the GPU's memory", reason=str(error))
        return config
    gpu_bytes = float(torch.cuda.get_device_properties(device).total_memory)
    placed = config.rollout.trainer_gpus
    is_shared = placed == "shared" and num_engines(config) > 0
    room = trainer_room(config, gpu_bytes, placed == "turns", is_shared)
    width = int(os.environ.get("LOCAL_WORLD_SIZE", config.trainer.num_ranks))
    config = choose_ranks(config, sizes, gpu_bytes, room, width)
    tokens, recomputed, take = choose_passes(config, sizes, gpu_bytes, room)
    config = with_settings(config, {TOKENS: tokens, RECOMPUTES: recomputed})
    chosen = {name: value_of(config, field) for field, name in kept.items()}
    report = log.info if take.running <= room else log.warning
    report(
        "passes are fitted to the GPU's memory",
        **{field.rpartition(".")[2]: value_of(config, field) for field in fields},
        estimated_gib=round(take.running / GIB, 1),
        usable_gib=round(room / GIB, 1),
    )
    if record is not None and not record.exists():
        write_atomically(record, json.dumps(chosen) + "\n")
    return config


SMALLEST_TILE = 1024
"""Tokens of a forward pass below which a GPU has too little to do."""
CONTEXT_SIZES = (2, 4, 8, 16, 32)
"""Ranks that share passes; more than a host has only where nothing else fits."""


def trainer_room(config: RunConfig, gpu_bytes: float, takes_turns: bool, is_shared: bool) -> float:
    """Bytes of a GPU that the trainer can use, where it may use it in turn with an engine, or share it."""
    if takes_turns:
        return usable(gpu_bytes) - ASLEEP_BYTES
    return usable(gpu_bytes) - (config.rollout.vllm.gpu_memory_utilization * gpu_bytes if is_shared else 0.0)


def choose_passes(
    config: RunConfig, sizes: ModelSizes, gpu_bytes: float, room: float
) -> tuple[int, bool, Take]:
    """Tokens of a forward pass, whether layers are computed again, and what that takes: the first choice that
    fits into `room`, else the smallest. What the config names is kept."""
    takes = [
        (num_tokens, recomputed, trainer_take(config, sizes, gpu_bytes, num_tokens, recomputed))
        for num_tokens, recomputed in _choices(config, sizes)
    ]
    fitting = (choice for choice in takes if choice[2].running <= room)
    return next(fitting, min(takes, key=lambda choice: choice[2].running))


def choose_ranks(
    config: RunConfig, sizes: ModelSizes, gpu_bytes: float, room: float, width: int
) -> RunConfig:
    """Replace `auto`: of ranks that share a pass by the fewest with which one fits into `room`, else by 1; of
    ranks that divide experts by `experts_apart` over several hosts of `width` ranks, else by 1."""
    trainer = config.trainer
    if trainer.expert_ranks == "auto":
        size = experts_apart(config, sizes, width) if trainer.num_ranks > width else 1
        config = with_settings(config, {EXPERTS: size})
    if trainer.context_ranks != "auto":
        return config
    possible = [n for n in context_sizes(config, sizes) if trainer.num_ranks % n == 0]
    for size in (1, *possible):
        shared: RunConfig = with_settings(config, {CONTEXT: size})
        _, _, take = choose_passes(shared, sizes, gpu_bytes, room)
        if take.running <= room:
            return shared
    alone: RunConfig = with_settings(config, {CONTEXT: 1})
    return alone


def experts_apart(config: RunConfig, sizes: ModelSizes, width: int) -> int:
    """The most of a host's `width` ranks that can divide the experts; 1 where there are none."""
    return gcd(width, num_shards(config), sizes.num_experts) if sizes.num_experts else 1


def _choices(config: RunConfig, sizes: ModelSizes) -> list[tuple[int, bool]]:
    """Tokens of a pass, and whether layers are computed again, from fast to small. A pass holds a rank's part
    of the longest sequence in any case."""
    tokens = config.trainer.micro_batch_tokens
    recomputed = config.trainer.gradient_checkpointing
    if isinstance(tokens, int):
        tiles = [tokens]
    else:
        longest = longest_part(config)
        tiles = [max(DEFAULT_RANK_TOKENS, longest)]
        while tiles[-1] // 2 >= max(SMALLEST_TILE, longest):
            tiles.append(tiles[-1] // 2)
    if recomputed != "auto":
        return [(size, recomputed) for size in tiles]
    # Half of the work of a pass is worth more than computing layers again; less is not.
    kept = [(size, False) for size in tiles[:2]]
    return kept + [(size, True) for size in tiles] if sizes.can_recompute else kept


def value_of(config: RunConfig, field: str) -> Any:
    return reduce(getattr, field.split("."), config)


def num_engines(config: RunConfig) -> int:
    """Number of engines that reserve GPU memory."""
    return config.rollout.workers if config.rollout.engine_traits.reserves_gpu_memory else 0


def context_sizes(config: RunConfig, sizes: ModelSizes) -> list[int]:
    """Numbers of ranks that could share passes over the longest sequences, with enough tokens for each."""
    text = sizes.config.get_text_config()
    is_packed = config.trainer.packing and kinds_of_layers(text) <= SOFTMAX_ATTENTION
    if not is_packed or has_capped_attention(text):
        return []
    # A size divides the heads of every layer where it divides their greatest common divisor.
    num_heads = gcd(*(int(layer.num_attention_heads) for layer in layer_configs(sizes.config)))
    most = config.model.max_model_len // SMALLEST_TILE
    return [size for size in CONTEXT_SIZES if size <= most and num_heads % size == 0]


def with_settings(section: Any, settings: Settings) -> Any:
    """The section with fields replaced, not validated: it is only used for estimates."""
    for path, value in settings.items():
        name, _, inner = path.partition(".")
        if inner:
            value = with_settings(getattr(section, name), {inner: value})
        elif path == "lora":
            value = LoraConfig()
        section = section.model_copy(update={name: value})
    return section
