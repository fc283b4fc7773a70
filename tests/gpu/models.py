"""What the tests on GPUs share: the mark that skips them elsewhere, and a model that GPU kernels accept.

`make gpu-proof DRY=1` has them compute on the CPU all that does not need a GPU's own kernels.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.runner import DRY_VARIABLE
from tests.support.models import run_config, tiny_model
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy, load_policy

IS_DRY = bool(os.environ.get(DRY_VARIABLE))
DEVICE = "cpu" if IS_DRY else "cuda"
needs_gpu = pytest.mark.skipif(
    not IS_DRY and not torch.cuda.is_available(), reason="needs a CUDA GPU; torch sees none"
)
needs_two_gpus = pytest.mark.skipif(
    not IS_DRY and torch.cuda.device_count() < 2,
    reason=f"needs 2 CUDA GPUs; torch sees {torch.cuda.device_count()}",
)
needs_kernels = pytest.mark.skipif(IS_DRY, reason="a dry run: needs what only GPUs have")

# Heads of 64: the smallest that every attention kernel takes.
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}


def gpu_model(folder: Path, seed: int = 0) -> Path:
    """Write a small Llama; each seed is another model."""
    return tiny_model(folder, seed, **SHAPE)


def make_gpu_policy(
    folder: Path, device: str = DEVICE, dtype: str = "float32", **trainer: Any
) -> TransformersPolicy:
    """The policy that a trainer with this config would load."""
    fields = {"device": device, "liger": "off", "optimizer": {"lr": 1e-3}, **trainer}
    return load_policy(run_config(folder, model={"dtype": dtype}, trainer=fields))
