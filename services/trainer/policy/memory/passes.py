"""The passes that `auto` chooses for a GPU, and keeps for the whole run."""

import json
from pathlib import Path
from typing import Any

import structlog
import torch

from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.files import write_atomically
from tidemill.services.trainer.policy.memory.estimate import GIB
from tidemill.services.trainer.policy.memory.fit import choose_passes, num_engines, trainer_room
from tidemill.services.trainer.policy.memory.sizes import read_model
from tidemill.services.trainer.policy.model_loading import pick_device

log = structlog.get_logger(__name__)


PASSES_FILE = "passes.json"
"""In the run's folder: the tokens of a pass that were chosen when the run started. Another GPU would choose
others, and sum gradients in another order: a replay there would not give the recorded bits."""


def with_fitting_passes(config: RunConfig, folder: Path | None = None) -> RunConfig:
    """`auto` of `micro_batch_tokens` and `gradient_checkpointing` replaced by what fits on this GPU;
    not on a CPU, nor where the model cannot be measured. With the run's folder, the tokens are those that the
    run has had from its start."""
    device = pick_device(config.trainer.device)
    is_auto = "auto" in (config.trainer.micro_batch_tokens, config.trainer.gradient_checkpointing)
    if device.type != "cuda" or not is_auto:
        return config
    if config.trainer.micro_batch_tokens == "auto" and (recorded := _recorded_tokens(folder)):
        config = _with_passes(config, micro_batch_tokens=recorded)
    try:
        sizes = read_model(config)
    except ConfigError as error:
        log.warning("passes are not fitted to the GPU's memory", reason=str(error))
        return config
    gpu_bytes = float(torch.cuda.get_device_properties(device).total_memory)
    placed = config.rollout.trainer_gpus
    is_shared = placed == "shared" and num_engines(config) > 0
    room = trainer_room(config, gpu_bytes, placed == "turns", is_shared)
    tokens, recomputed, take = choose_passes(config, sizes, gpu_bytes, room)
    report = log.info if take.running <= room else log.warning
    report(
        "passes are fitted to the GPU's memory",
        micro_batch_tokens=tokens,
        gradient_checkpointing=recomputed,
        estimated_gib=round(take.running / GIB, 1),
        usable_gib=round(room / GIB, 1),
    )
    if folder is not None and config.trainer.micro_batch_tokens == "auto":
        write_atomically(folder / PASSES_FILE, json.dumps({"micro_batch_tokens": tokens}) + "\n")
    return _with_passes(config, micro_batch_tokens=tokens, gradient_checkpointing=recomputed)


def _recorded_tokens(folder: Path | None) -> int | None:
    if folder is None or not (path := folder / PASSES_FILE).exists():
        return None
    return int(json.loads(path.read_text())["micro_batch_tokens"])


def _with_passes(config: RunConfig, **chosen: Any) -> RunConfig:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=chosen)})
