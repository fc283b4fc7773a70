"""On a GPU: fused kernels and compiled models give the same numbers, packed rows do not leak."""

import importlib.util

import numpy as np
import pytest
import torch

from benchmarks.trainer_mfu import Shape, measure
from tests.support.models import accumulate_all, gradients_of, make_samples, one_batch, tiny_llama
from tidemill.common.config.trainer import TrainerConfig
from tidemill.services.trainer.policy.model_loading import accelerate_model
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def policy_on_gpu(**trainer: object) -> TransformersPolicy:
    config = TrainerConfig.model_validate({"device": "cuda", "liger": "off", **trainer})
    model = tiny_llama().to("cuda")
    accelerate_model(model, config)
    return TransformersPolicy(model, config, dtype=torch.float32, temperature=1.0, max_completion_tokens=14)


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs liger-kernel")
def test_ligers_kernels_change_no_gradient():
    plain, fused = policy_on_gpu(), policy_on_gpu(liger="on")
    for policy in (plain, fused):
        accumulate_all(policy, [one_batch(make_samples(12))])
    torch.testing.assert_close(gradients_of(fused), gradients_of(plain), atol=1e-4, rtol=1e-3)


def test_a_compiled_model_has_the_same_gradients():
    plain, compiled = policy_on_gpu(), policy_on_gpu(compile=True)
    for policy in (plain, compiled):
        accumulate_all(policy, [one_batch(make_samples(count)) for count in (3, 12)])
    torch.testing.assert_close(gradients_of(compiled), gradients_of(plain), atol=1e-4, rtol=1e-3)


def test_packed_logprobs_equal_those_of_padded_rows():
    packed, padded = policy_on_gpu(), policy_on_gpu(packing=False)
    assert packed.layout == "block"
    samples = make_samples(24)
    for mine, expected in zip(packed.logprobs(samples), padded.logprobs(samples), strict=True):
        np.testing.assert_allclose(mine, expected, atol=1e-4)


def test_mfu_is_measured_and_the_profile_adds_up():
    step_s, flops, peak_bytes, shares = measure(Shape("tiny", 256, 2, 4, 512))
    assert min(step_s, flops, peak_bytes) > 0
    assert shares["matrix products"] > 0
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.1)
