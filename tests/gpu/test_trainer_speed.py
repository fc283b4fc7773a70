"""On a GPU: fused kernels and compiled models give the same numbers, packed rows do not leak."""

import importlib.util

import pytest
import torch
from transformers.models.llama import modeling_llama

from benchmarks.gpu.mfu import measure
from tests.gpu.models import DEVICE, needs_gpu, needs_kernels
from tests.support.models import accumulate_all, gradients_of, make_samples, one_batch, tiny_llama
from tidemill.common.config.trainer import TrainerConfig
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

pytestmark = needs_gpu


def policy_on_gpu(**trainer: object) -> TransformersPolicy:
    config = TrainerConfig.model_validate({"device": DEVICE, "liger": "off", **trainer})
    model = tiny_llama().to(DEVICE)
    return TransformersPolicy(model, config, dtype=torch.float32, temperature=1.0, max_completion_tokens=14)


@needs_kernels
@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
def test_ligers_kernels_change_no_gradient(monkeypatch):
    for name in ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb"):
        # Liger replaces these in the module too: models that are made later would have them.
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    plain = policy_on_gpu()
    fused = policy_on_gpu(liger="on")
    for policy in (plain, fused):
        accumulate_all(policy, [one_batch(make_samples(12))])
    torch.testing.assert_close(gradients_of(fused), gradients_of(plain), atol=1e-4, rtol=1e-3)


@needs_kernels  # on CPUs tests/integration/trainer/test_compiled_model.py does it
def test_a_compiled_model_has_the_same_gradients():
    plain = policy_on_gpu()
    compiled = policy_on_gpu(compile=True)
    for policy in (plain, compiled):
        accumulate_all(policy, [one_batch(make_samples(count)) for count in (3, 12)])
    torch.testing.assert_close(gradients_of(compiled), gradients_of(plain), atol=1e-4, rtol=1e-3)


def test_mfu_is_measured_and_the_profile_adds_up():
    figures = measure("0.6b", dry=True)
    assert min(figures["step_s"], figures["tflops"], figures["tokens_per_s"]) > 0
    assert figures["profile"]["matrix products"] > 0
    assert sum(figures["profile"].values()) == pytest.approx(1.0, abs=0.1)
