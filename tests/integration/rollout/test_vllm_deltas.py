"""After many updates by deltas vLLM computes what a plain forward pass of the same weights does: with experts
and without, tied and untied, on one rank and on two. Two engines stand for all: each takes long to start.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support.models import run_config, write_tokenizer
from tests.support.parity import expected_logprobs, score
from tests.support.versions import Chain
from tests.support.vllm_machine import need_vllm
from tidemill.common.errors import WeightsMismatchError
from tidemill.services.rollout.engines import build_engine
from tidemill.services.rollout.engines.vllm import VllmEngine

need_vllm()

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("forked_engines")]

SHAPE: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"head_dim": 32, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
IDS = list(range(10, 40))
NUM_PROMPT = 5
NUM_UPDATES = 20


def dense(is_tied: bool) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=is_tied))


def experts(is_tied: bool) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, tie_word_embeddings=is_tied))


@pytest.mark.parametrize(("make", "is_tied", "num_ranks"), [(dense, True, 2), (experts, False, 1)])
async def test_logprobs_after_deltas_are_those_of_the_weights(
    make, is_tied, num_ranks, tmp_path, monkeypatch
):
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for `_spoil`
    torch.manual_seed(0)
    model = make(is_tied).eval()
    if not is_tied:
        # vLLM would tie a head that begins as a copy of the embeddings.
        model.lm_head.weight.data.copy_(model.model.embed_tokens.weight.data)
    model.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    chain = Chain(tmp_path / "run")
    chain.full(0, tmp_path / "model" / "model.safetensors")
    vllm = {"enforce_eager": True, "tensor_parallel_size": num_ranks}
    rollout = {"engine": "vllm", "num_threads": 1, "max_num_seqs": 8, "record_routes": False, "vllm": vllm}
    config = run_config(tmp_path / "model", rollout=rollout)
    engine = build_engine(config, "w")
    assert isinstance(engine, VllmEngine)
    await engine.start()
    try:
        await deltas_are_followed(engine, chain, model)
    finally:
        await engine.close()


async def deltas_are_followed(engine: VllmEngine, chain: Chain, model: Any) -> None:
    chain.delta(1)
    with pytest.raises(WeightsMismatchError, match="not known what the engine holds"):
        await engine.load(1, [], [chain.paths(1)], chain.newest.digest)
    await engine.load(1, chain.paths(0), [chain.paths(1)], chain.newest.digest)
    for version in range(2, NUM_UPDATES + 1):
        await engine.load(version, [], [deltas_to(chain, version)], chain.newest.digest)
    await assert_parity(engine, chain, model)

    held = NUM_UPDATES
    newest = NUM_UPDATES + 2
    skipped = deltas_to(chain, newest - 1)
    wanted = deltas_to(chain, newest)
    with pytest.raises(WeightsMismatchError, match="would hold"):
        await engine.load(newest, [], [wanted], chain.newest.digest)
    assert engine.version == held and engine.can_patch
    await engine.load(newest, [], [skipped, wanted], chain.newest.digest)
    await assert_parity(engine, chain, model)

    # Something else in memory than what was written: one rank's values are not those of the checkpoint.
    last = deltas_to(chain, newest + 1)
    await engine._running_llm().collective_rpc(_spoil)
    with pytest.raises(WeightsMismatchError):
        await engine.load(newest + 1, [], [last], chain.newest.digest)
    since = [chain.paths(version) for version in range(1, newest + 2)]
    await engine.load(newest + 1, chain.paths(0), since, chain.newest.digest)
    await assert_parity(engine, chain, model)


def deltas_to(chain: Chain, version: int) -> list[Path]:
    chain.delta(version)
    return chain.paths(version)


def _spoil(worker: Any) -> None:
    next(worker.model_runner.get_model().parameters()).data.mul_(1.5)


async def assert_parity(engine: VllmEngine, chain: Chain, model: Any) -> None:
    state = {
        name: torch.from_numpy(bits.view("f4").reshape(info.shape).copy())
        for name, (info, bits) in chain.tensors.items()
    }
    expected = type(model).from_pretrained(None, config=model.config, state_dict=state).eval()
    logprobs = expected_logprobs(IDS[:NUM_PROMPT], IDS[NUM_PROMPT:], ((0, 0),), {0: expected})
    scores = await score(engine, IDS[:NUM_PROMPT], IDS[NUM_PROMPT:])
    assert scores == pytest.approx(logprobs, abs=1e-5)
