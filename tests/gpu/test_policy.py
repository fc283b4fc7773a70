"""The policy on a GPU: the numbers of the CPU, packing without leakage, and replay bit by bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.gpu.models import gpu_model, make_gpu_policy, needs_gpu, needs_kernels
from tests.support.models import (
    accumulate_all,
    gradients_of,
    logprobs_of,
    make_relatives,
    one_batch,
    save_state,
    save_weights,
    train,
)
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

pytestmark = needs_gpu
SAMPLES = 24
LAYOUT = "tree_or_padded"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def deterministic() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def gaps(mine: TransformersPolicy, theirs: TransformersPolicy, samples: list[Sample]) -> np.ndarray:
    pairs = zip(logprobs_of(mine, samples), logprobs_of(theirs, samples), strict=True)
    return np.concatenate([np.abs(first - second) for first, second in pairs])


def similarity(first: torch.Tensor, second: torch.Tensor) -> float:
    return torch.nn.functional.cosine_similarity(first.cpu().double(), second.cpu().double(), dim=0).item()


@pytest.mark.parametrize("options", [{}, {"packing": False}, {"gradient_checkpointing": True}])
def test_float32_on_the_gpu_equals_the_cpu(folder: Path, options: dict[str, Any]) -> None:
    samples = make_relatives(SAMPLES)
    gpu = make_gpu_policy(folder, **options)
    cpu = make_gpu_policy(folder, "cpu", **options)
    assert gpu.layout == ("padded" if "packing" in options else LAYOUT)
    assert gaps(gpu, cpu, samples).max() < 1e-4
    results = [accumulate_all(policy, [one_batch(samples)]) for policy in (gpu, cpu)]
    assert results[0].loss_sum == pytest.approx(results[1].loss_sum, rel=1e-3, abs=1e-3)
    mine = gradients_of(gpu).cpu()
    theirs = gradients_of(cpu)
    assert ((mine - theirs).norm() / theirs.norm()).item() < 1e-3


def test_bfloat16_on_the_gpu_stays_near_float32(folder: Path) -> None:
    samples = make_relatives(SAMPLES)
    half = make_gpu_policy(folder, dtype="bfloat16")
    full = make_gpu_policy(folder)
    assert gaps(half, full, samples).mean() < 0.05
    for policy in (half, full):
        accumulate_all(policy, [one_batch(samples)])
    assert gradients_of(half).dtype == torch.float32
    assert similarity(gradients_of(half), gradients_of(full)) > 0.99


@needs_kernels
def test_trees_of_the_varlen_kernel_equal_row_by_row(folder: Path) -> None:
    """The kernel is the same for both; a leak of one sequence into the next is more than 1."""
    samples = make_relatives(SAMPLES)
    packed = make_gpu_policy(folder, dtype="bfloat16")
    single = make_gpu_policy(folder, dtype="bfloat16")
    assert packed.layout == "tree"
    alone = np.concatenate([logprobs for sample in samples for logprobs in logprobs_of(single, [sample])])
    together = np.concatenate(logprobs_of(packed, samples))
    assert np.abs(together - alone).mean() < 0.01 and np.abs(together - alone).max() < 0.2
    accumulate_all(packed, [one_batch(samples)])
    accumulate_all(single, [one_batch([sample]) for sample in samples])
    assert similarity(gradients_of(packed), gradients_of(single)) > 0.999


def test_trees_in_float32_equal_row_by_row(folder: Path) -> None:
    samples = make_relatives(SAMPLES)
    policy = make_gpu_policy(folder)
    assert policy.layout == LAYOUT
    alone = np.concatenate([logprobs for sample in samples for logprobs in logprobs_of(policy, [sample])])
    assert np.abs(np.concatenate(logprobs_of(policy, samples)) - alone).max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, {"rank": 8}])
def test_replay_from_a_checkpoint_is_bit_identical(
    folder: Path, tmp_path: Path, dtype: str, lora: dict[str, Any] | None, deterministic: None
) -> None:
    if lora:
        pytest.importorskip("peft", reason="the lora extra is not installed")
    samples = make_relatives(SAMPLES)
    options: dict[str, Any] = {"dtype": dtype, "lora": lora, "deterministic": True}
    batches = form_micro_batches(samples, 100)
    live = make_gpu_policy(folder, **options)
    replayed = make_gpu_policy(folder, **options)
    train(live, batches[:2])
    save_state(live, tmp_path)
    replayed.load_state(tmp_path)
    for _ in range(3):
        assert train(live, batches) == train(replayed, batches)
    assert live.digest() == replayed.digest() != make_gpu_policy(folder, **options).digest()


def test_merged_adapters_compute_what_the_policy_does(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="the lora extra is not installed")
    samples = make_relatives(SAMPLES)
    policy = make_gpu_policy(folder, lora={"rank": 8}, optimizer={"lr": 1e-2})
    train(policy, [one_batch(samples)])
    start = gpu_model(tmp_path)
    save_weights(policy, start)
    assert load_file(start / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    assert gaps(policy, make_gpu_policy(start), samples).max() < 1e-4
    assert gaps(policy, make_gpu_policy(folder), samples).max() > 0.05
