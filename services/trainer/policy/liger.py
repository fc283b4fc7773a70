"""Liger's fused kernels in a model: what was asked for and is missing ends the start; `auto` leaves the model
as it was."""

import importlib.util

import structlog
import torch
from transformers import PreTrainedModel

from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.errors import ConfigError
from tidemill.services.trainer.policy.options import OptionSettings, PolicyOption

log = structlog.get_logger(__name__)


class LigerKernels(PolicyOption):
    """`trainer.liger`."""

    def __init__(self, settings: OptionSettings) -> None:
        self._settings = settings

    def change_model(self, model: PreTrainedModel) -> None:
        """Put the kernels into the model. Raises ConfigError: `liger: on` where they cannot run."""
        if wants_liger(self._settings.trainer, self._settings.device):
            _apply_liger(model)


def wants_liger(config: TrainerConfig, device: torch.device) -> bool:
    """Whether to use Liger's kernels: `auto` where they are installed, the model is on a GPU and the compiler
    does not fuse the same. Raises ConfigError: `on`, and one of the first two is missing."""
    if config.liger == "off" or (config.liger == "auto" and config.compile):
        return False
    missing = ""
    if device.type != "cuda":
        missing = f"its kernels run on CUDA GPUs, and the model is on {device.type}"
    elif importlib.util.find_spec("liger_kernel") is None:
        missing = "the package liger-kernel is not installed: pip install 'tidemill[liger]'"
    if missing and config.liger == "on":
        raise ConfigError(
            f"trainer.liger: on is not possible, {missing}. Or set trainer.liger to auto or off"
        )
    return not missing


def _apply_liger(model: PreTrainedModel) -> None:
    """Fused norms, rotary embeddings and gated units; logprobs stay with `head.score_hidden`."""
    from liger_kernel.transformers import _apply_liger_kernel_to_instance

    _apply_liger_kernel_to_instance(model=model, cross_entropy=False, fused_linear_cross_entropy=False)
    log.info("using Liger's kernels", model=str(model.config.model_type))
