"""Versions into vLLM on one GPU and on two: after full ones, deltas, and deltas over a full one its logprobs
are those of the trainer with the same weights, and what it holds is proven."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from tests.gpu.models import IS_DRY, gpu_model, make_gpu_policy, needs_gpu, needs_two_gpus
from tests.support.models import logprobs_of, run_config, save_weights
from tests.support.parity import score
from tests.support.samples import sample_of
from tests.support.versions import Chain
from tidemill.common.errors import WeightsMismatchError
from tidemill.common.weights.delta import write_whole
from tidemill.services.rollout.engines import build_engine
from tidemill.services.rollout.engines.vllm import VllmEngine

pytest.importorskip("vllm", reason="vLLM is not installed; install the extra vllm")

pytestmark = [needs_gpu, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

PROMPT = [3, 9, 4, 8, 5]
COMPLETION = [6, 7, 3, 12, 5, 11, 4, 9, 10]
MEAN_GAP = 0.1


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    """Version 0 in bfloat16, as trainers publish it."""
    folder = tmp_path_factory.mktemp("run")
    policy = make_gpu_policy(gpu_model(folder / "model"), dtype="bfloat16")
    save_weights(policy, folder / "model")
    chain = Chain(folder)
    chain.full(0, folder / "model" / "model.safetensors")
    return chain


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[1, pytest.param(2, marks=needs_two_gpus)]
)
async def engine(request: pytest.FixtureRequest, chain: Chain) -> AsyncIterator[VllmEngine]:
    vllm = {
        "gpu_memory_utilization": 0.3,
        "enforce_eager": IS_DRY,
        "tensor_parallel_size": request.param,
    }
    config = run_config(
        chain.run_dir / "model",
        model={"dtype": "bfloat16", "max_model_len": 128},
        rollout={"engine": "vllm", "num_threads": 1, "max_num_seqs": 8, "vllm": vllm},
    )
    engine = build_engine(config, "test-worker")
    assert isinstance(engine, VllmEngine)
    await engine.start()
    yield engine
    await engine.close()


async def test_versions_arrive_as_the_trainer_has_them(
    engine: VllmEngine, chain: Chain, tmp_path: Path
) -> None:
    begin = chain.newest.version
    await engine.load(begin + 1, *full(chain, begin))
    for version in range(begin + 1, begin + 5):
        chain.delta(version, share=0.02)
        await engine.load(version, [], [chain.paths(version)], chain.newest.digest)
    await assert_parity(engine, chain, tmp_path / "deltas")
    assert engine.can_patch

    chain.delta(begin + 5)
    chain.delta(begin + 6)
    with pytest.raises(WeightsMismatchError):
        await engine.load(begin + 6, [], [chain.paths(begin + 6)], chain.newest.digest)
    deltas = [chain.paths(version) for version in range(1, begin + 7)]
    update = await engine.load(begin + 6, chain.paths(0), deltas, chain.newest.digest)
    assert engine.version == update.version == begin + 6 and engine.can_patch
    await assert_parity(engine, chain, tmp_path / "full")


def full(chain: Chain, version: int) -> tuple[list[Path], list[list[Path]], str]:
    deltas = [chain.paths(each) for each in range(1, version + 1)]
    return chain.paths(0), deltas, chain.manifests[version].digest


async def assert_parity(engine: VllmEngine, chain: Chain, folder: Path) -> None:
    """Beside the trainer's policy with the newest weights, and not with the first."""
    model = gpu_model(folder)
    deltas = [chain.paths(version) for version in range(1, chain.newest.version + 1)]
    write_whole(chain.paths(0), deltas, model)
    scores = np.array(await score(engine, PROMPT, COMPLETION))
    assert np.abs(scores - logprobs(model)).mean() < MEAN_GAP
    assert np.abs(scores - logprobs(chain.run_dir / "model")).mean() > 2 * MEAN_GAP


def logprobs(folder: Path) -> np.ndarray:
    policy = make_gpu_policy(folder, dtype="bfloat16")
    policy._temperature = 1.0
    sample = sample_of((0, 0), PROMPT, COMPLETION)
    return logprobs_of(policy, [sample])[0]
