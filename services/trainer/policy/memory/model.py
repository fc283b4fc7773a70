"""The model of a run as the estimate needs it, and the passes that `auto` chooses for a GPU."""

from dataclasses import replace

import structlog
import torch
from transformers import AutoConfig

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.run.model_overrides import with_overrides
from tidemill.services.trainer.policy.memory.estimate import ASLEEP_BYTES, GIB, Model, usable
from tidemill.services.trainer.policy.memory.fit import choose_passes
from tidemill.services.trainer.policy.memory.sizes import (
    attention_on_gpus,
    build_on_meta,
    count_sizes,
    is_read_whole,
    measure_saved,
)
from tidemill.services.trainer.policy.model_loading import compute_dtype, pick_device

log = structlog.get_logger(__name__)


def read_model(config: RunConfig) -> Model:
    """Sizes and saved bytes of `model.path`, of which config.json alone is read. Raises ConfigError: there is
    none, or it is of no model that can be measured."""
    try:
        found = with_overrides(AutoConfig.from_pretrained(config.model.path), config.model)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"model.path: {config.model.path} has no config.json to read: {reason}") from None
    dtype, attention = compute_dtype(config.model), attention_on_gpus(found)

    model = build_on_meta(found, attention, torch.float32)
    sizes = count_sizes(model, config.trainer.lora)
    sizes = replace(sizes, is_read_whole=is_read_whole(model))
    model = build_on_meta(found, attention, torch.float32)
    return Model(sizes, measure_saved(model, dtype, config.model.max_model_len), found)


def with_fitting_passes(config: RunConfig) -> RunConfig:
    """`auto` of `micro_batch_tokens` and `gradient_checkpointing` replaced by what fits on this GPU;
    not on a CPU, nor where the model cannot be measured."""
    trainer = config.trainer
    device = pick_device(trainer.device)
    is_auto = "auto" in (trainer.micro_batch_tokens, trainer.gradient_checkpointing)
    if device.type != "cuda" or not is_auto:
        return config
    try:
        model = read_model(config)
    except ConfigError as error:
        log.warning("passes are not fitted to the GPU's memory", reason=str(error))
        return config
    gpu_bytes = float(torch.cuda.get_device_properties(device).total_memory)
    room = usable(gpu_bytes)
    rollout = config.rollout
    if rollout.takes_gpu_turns:
        room -= ASLEEP_BYTES
    elif rollout.shares_trainer_gpus and rollout.engine == "vllm" and rollout.workers:
        room -= rollout.vllm.gpu_memory_utilization * gpu_bytes
    tokens, recomputed, take = choose_passes(config, model, gpu_bytes, room)
    told = log.info if take.running <= room else log.warning
    told(
        "passes are fitted to the GPU's memory",
        micro_batch_tokens=tokens,
        gradient_checkpointing=recomputed,
        estimated_gib=round(take.running / GIB, 1),
        usable_gib=round(room / GIB, 1),
    )
    chosen = {"micro_batch_tokens": tokens, "gradient_checkpointing": recomputed}
    return config.model_copy(update={"trainer": trainer.model_copy(update=chosen)})
