"""vLLM on a GPU in bfloat16: its logprobs are the trainer's, also after updates in flight and after sleep.

The trainer's policy is the reference. Each version is a model of another seed, so that a token with the
wrong version's label, or weights that did not arrive, miss by whole units and not by rounding.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from tests.gpu.models import IS_DRY, gpu_model, make_gpu_policy, needs_gpu, needs_kernels
from tests.support.models import PIECES, logprobs_of, run_config
from tests.support.samples import sample_of
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines import build_engine
from tidemill.services.rollout.engines.engine import Generation, GenerationRequest
from tidemill.services.rollout.engines.vllm import VllmEngine
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

pytest.importorskip("vllm", reason="vLLM is not installed; install the extra vllm")

pytestmark = [needs_gpu, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

MEAN_GAP = 0.1
MAX_GAP = 0.5
"""Of bfloat16, engine against trainer; another version's weights differ by far more on average."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The model of each version; version 0 is the starting model."""
    return [gpu_model(tmp_path_factory.mktemp(f"v{seed}"), seed) for seed in range(4)]


@pytest.fixture(scope="module")
def policies(folders: list[Path]) -> list[TransformersPolicy]:
    return [make_gpu_policy(folder, dtype="bfloat16") for folder in folders]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folders: list[Path]) -> AsyncIterator[VllmEngine]:
    config = run_config(
        folders[0],
        model={"dtype": "bfloat16", "max_model_len": 128},
        rollout={
            "engine": "vllm",
            "sampling": {"max_tokens": 100},
            "max_num_seqs": 16,
            "vllm": {
                "gpu_memory_utilization": 0.3,
                "enforce_eager": IS_DRY,
                "extra": {"enable_sleep_mode": not IS_DRY},
            },
        },
    )
    engine = build_engine(config, "test-worker")
    assert isinstance(engine, VllmEngine)
    await engine.start()
    yield engine
    await engine.close()


def make_requests(name: str, count: int, max_tokens: int = 24) -> list[GenerationRequest]:
    params = SamplingParams(max_tokens=max_tokens)
    requests = []
    for i in range(count):
        prompt_ids = [3 + (i * 7 + j * 5) % (len(PIECES) - 3) for j in range(9)]
        requests.append(GenerationRequest(f"{name}{i}", prompt_ids, params))
    return requests


async def generate_all(engine: VllmEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    return list(await asyncio.gather(*(engine.generate(request) for request in requests)))


def gaps(policy: TransformersPolicy, request: GenerationRequest, result: Generation) -> np.ndarray:
    """|engine - trainer| of each token, with one version's weights for all of them."""
    sample = sample_of((0, 0), request.prompt_ids, result.token_ids, result.logprobs)
    return np.abs(logprobs_of(policy, [sample])[0] - sample.rollout_logprobs)


def assert_near(logprobs: Sequence[np.ndarray]) -> None:
    values = np.concatenate(logprobs)
    assert values.mean() < MEAN_GAP and values.max() < MAX_GAP, (values.mean(), values.max())


async def test_weights_are_replaced_while_requests_run(
    engine: VllmEngine, folders: list[Path], policies: list[TransformersPolicy]
) -> None:
    requests = make_requests("flight", 64, max_tokens=100)
    running = [asyncio.create_task(engine.generate(request)) for request in requests]
    await engine.generate(make_requests("first", 1, max_tokens=1)[0])
    update = await engine.load(1, [folders[1] / "model.safetensors"])
    assert engine.version == update.version == 1
    pairs = list(zip(requests, await asyncio.gather(*running), strict=True))
    crossing = [pair for pair in pairs if len(pair[1].spans) == 2]
    assert crossing, "no request was under way: nothing is tested"
    # A token after the update has seen the cache that the old weights left; before it, none has.
    before = [gaps(policies[0], *pair)[: pair[1].spans[1][1]] for pair in crossing]
    assert_near(before)
    whole = [pair for pair in pairs if pair[1].spans == ((1, 0),)]
    assert whole, "no request was waiting: nothing is tested"
    assert_near([gaps(policies[1], *pair) for pair in whole])


@needs_kernels
async def test_sleep_frees_the_gpu_and_wake_keeps_the_weights(
    engine: VllmEngine, folders: list[Path], policies: list[TransformersPolicy]
) -> None:
    await engine.load(3, [folders[3] / "model.safetensors"])
    awake_bytes = torch.cuda.mem_get_info()[0]
    await engine.sleep()
    assert torch.cuda.mem_get_info()[0] > awake_bytes + (256 << 20), "the KV cache is freed"
    await engine.wake()
    requests = make_requests("woken", 16)
    results = await generate_all(engine, requests)
    assert {result.spans for result in results} == {((3, 0),)}
    pairs = zip(requests, results, strict=True)
    assert_near([gaps(policies[3], *pair) for pair in pairs])
