"""Which GPUs of this machine each process of a run may use, as the variable that CUDA reads."""

from collections.abc import Sequence

from common.config import RunConfig
from common.config.reward_model import RewardModelConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"


def trainer_gpus(config: RunConfig) -> dict[str, str]:
    """The environment of the trainer."""
    return _visible(config.trainer.gpus)


def rollout_gpus(config: RunConfig, index: int) -> dict[str, str]:
    """The environment of rollout worker `index`."""
    size = config.rollout.vllm.tensor_parallel_size
    return _visible(config.rollout.gpus[index * size : (index + 1) * size])


def replica_gpus(config: RunConfig, model: RewardModelConfig | None, index: int) -> dict[str, str]:
    """The environment of a local replica: its own GPUs, or those of the rollout worker it shares with."""
    if model is None:
        return {}
    if model.shares_rollout_gpus:
        return rollout_gpus(config, index % max(1, config.rollout.workers))
    if not model.gpus or model.local_replicas is None:
        return {}
    size = max(1, len(model.gpus) // model.local_replicas.count)
    first = index * size % len(model.gpus)
    return _visible(model.gpus[first : first + size])


def _visible(gpus: Sequence[int]) -> dict[str, str]:
    return {VISIBLE: ",".join(map(str, gpus))} if gpus else {}
