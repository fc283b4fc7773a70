"""vLLM with `model.overrides`: logprobs are those of the model with an edited config; min-p filters them."""

from pathlib import Path

import pytest
import torch

from tests.support.models import tiny_model
from tests.support.vllm_machine import need_vllm, vllm_config
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines import build_engine
from tidemill.services.rollout.engines.engine import GenerationRequest
from tidemill.services.rollout.engines.model import load_model

need_vllm()

pytestmark = pytest.mark.usefixtures("forked_engines")

LONGROPE = {"short_factor": [1.0] * 16, "long_factor": [2.0 + 0.25 * i for i in range(16)]}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    # Long, as the run's sequences may be, although those that are sampled are short.
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 256, **LONGROPE},
}
SHAPE = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.1,
}  # fmt: skip
PROMPT = [6 + (j * 29) % 50 for j in range(12)]


@pytest.mark.parametrize("rope", ROPES)
async def test_the_engine_computes_with_the_overrides(rope: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, 0, **SHAPE)
    overrides = {"rope_scaling": ROPES[rope], "max_position_embeddings": 1024}
    config = vllm_config(folder, 512, model={"overrides": overrides}, max_num_seqs=16)
    engine = build_engine(config, "test-worker")
    await engine.start()
    try:
        wide = SamplingParams(max_tokens=24)
        narrow = SamplingParams(max_tokens=24, min_p=0.6)
        plain = await engine.generate(GenerationRequest("plain", PROMPT, wide))
        filtered = await engine.generate(GenerationRequest("filtered", PROMPT, narrow))
    finally:
        await engine.close()
    model = load_model(config.model)

    def logprobs(completion: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(torch.tensor([[*PROMPT, *completion]])).logits[0, len(PROMPT) - 1 : -1]
        return torch.log_softmax(logits.float(), -1)

    expected_TV = logprobs(plain.token_ids)
    expected = expected_TV[torch.arange(len(plain.token_ids)), plain.token_ids].tolist()
    assert plain.logprobs == pytest.approx(expected, abs=1e-3)
    whole_TV = logprobs(filtered.token_ids)
    floor_T1 = whole_TV.amax(-1, keepdim=True) + torch.tensor(0.6).log()
    kept_TV = torch.log_softmax(whole_TV.masked_fill(whole_TV < floor_T1, -torch.inf), -1)
    expected = kept_TV[torch.arange(len(filtered.token_ids)), filtered.token_ids].tolist()
    assert filtered.logprobs == pytest.approx(expected, abs=1e-3)
