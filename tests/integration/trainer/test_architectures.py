"""Any Hugging Face causal language model: the policy's numbers are those of the model's plain forward pass.

Each family does something that packing, tiles or chunked logits could get wrong: biases, norms of queries
and keys, windows shorter than the sequences, capped logits, learned positions, experts, recurrent state.
"""

import asyncio

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.architectures import FAMILIES, make_config, make_model
from tests.support.models import (
    accumulate_all,
    gradients_of,
    logprobs_of,
    make_policy,
    make_relatives,
    make_samples,
    one_batch,
    run_config,
    save_weights,
    train,
    write_tokenizer,
)
from tests.support.parity import score
from tests.support.samples import changed, sample_of
from tidemill.common.run.model_config import exact_attention
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines import build_engine
from tidemill.services.rollout.engines.engine import GenerationRequest
from tidemill.services.rollout.engines.transformers import TransformersEngine
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.forward import TokenScorer, pick_layout

FLOAT32_ONLY = ("Mixtral", "Phimoe", "GptOss")
"""Kernels of experts know no float64."""


@torch.no_grad()
def plain_logprobs(model: PreTrainedModel, sample: Sample) -> np.ndarray:
    """One sequence, whole logits, nothing of ours."""
    ids = torch.tensor(np.concatenate([sample.prompt_ids, sample.completion_ids])).long()
    logits_TV = model(input_ids=ids[None], use_cache=False).logits[0]
    logprobs_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)).log_softmax(-1)
    start = len(sample.prompt_ids)
    return logprobs_TV[torch.arange(start - 1, len(ids) - 1), ids[start:]].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_one_sequence_at_a_time(family):
    samples = make_relatives(12)
    is_coarse = family in FLOAT32_ONLY
    dtype = torch.float32 if is_coarse else torch.float64
    tolerance = 1e-4 if is_coarse else 1e-6
    policy = make_policy(dtype, model=make_model(family))
    chosen = policy.layout
    policy.layout = "padded"
    accumulate_all(policy, [one_batch([sample]) for sample in samples])
    expected = gradients_of(policy).clone()
    plain = make_model(family).to(dtype)
    for layout in {"padded", chosen.removesuffix("_or_padded")}:
        policy.layout = layout
        for sample, mine in zip(samples, logprobs_of(policy, samples), strict=True):
            np.testing.assert_allclose(mine, plain_logprobs(plain, sample), atol=1e-5)
        policy.zero()
        accumulate_all(policy, [one_batch(samples)])
        # Some families compute norms and routers in float32 whatever the weights are.
        assert ((gradients_of(policy) - expected).norm() / expected.norm()).item() < tolerance


def test_trees_are_chosen_where_every_layer_computes_them():
    models = {name: make_model(name) for name in FAMILIES}
    layouts = {
        name: pick_layout(model, TokenScorer(model, torch.float32), True, 64)
        for name, model in models.items()
    }
    padded = {name for name, layout in layouts.items() if layout == "padded"}
    assert padded == {"Gemma2", "GptOss", "Mamba", "RecurrentGemma", "Falcon"}, (
        "capped scores, sinks, recurrent state, and attention of its own"
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_weights_load_into_the_plain_model(family, tmp_path):
    policy = make_policy(model=make_model(family))
    samples = make_samples(6)
    assert not train(policy, [one_batch(samples)]).skipped
    make_model(family).save_pretrained(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    save_weights(policy, tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == names
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    for sample, mine in zip(samples, logprobs_of(policy, samples), strict=True):
        np.testing.assert_allclose(mine, plain_logprobs(loaded, sample), atol=1e-5)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "Gemma3"])
async def test_in_bfloat16_the_engine_gets_rounded_weights_and_stays_near_the_trainer(family, tmp_path):
    """Master weights and norms are float32 in the trainer alone: the gap is that of bfloat16, no more."""
    policy = make_policy(torch.bfloat16, model=make_model(family))
    samples = make_samples(12)
    train(policy, [one_batch(samples)])
    make_model(family).save_pretrained(tmp_path / "start")
    write_tokenizer(tmp_path / "start")
    model = {"dtype": "bfloat16", "max_model_len": 64}
    engine = build_engine(
        run_config(tmp_path / "start", model=model, rollout={"engine": "transformers", "num_threads": 1})
    )
    await engine.start()
    await engine.load(1, [save_weights(policy, tmp_path / "trained")])
    assert isinstance(engine, TransformersEngine) and engine._model is not None
    master = dict(policy._model.named_parameters())
    for name, weight in engine._model.named_parameters():
        assert master[name].dtype == torch.float32
        assert torch.equal(weight, master[name].bfloat16()), name
    scores = [
        np.array(await score(engine, sample.prompt_ids.tolist(), sample.completion_ids.tolist()), np.float32)
        for sample in samples
    ]
    await engine.close()
    gaps = np.abs(np.concatenate(scores) - np.concatenate(logprobs_of(policy, samples)))
    assert 0.0 < gaps.mean() < 0.05 and gaps.max() < 0.3
    rescored = [
        changed(sample, rollout_logprobs=logprobs) for sample, logprobs in zip(samples, scores, strict=True)
    ]
    metrics = policy.accumulate(one_batch(rescored))
    assert metrics.rollout_kl_sum / metrics.tokens < 2e-3


@pytest.mark.parametrize("family", ["Gemma2", "Gemma3", "Gemma4", "GptOss"])
async def test_the_engine_samples_from_the_distribution_that_the_trainer_scores(family, tmp_path):
    """With a cache and padding on the left, against one pass without either."""
    policy = make_policy(model=make_model(family, attention=exact_attention(make_config(family))))
    save_weights(policy, tmp_path)
    policy._model.config.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    options = {"engine": "transformers", "num_threads": 1}
    engine = build_engine(run_config(tmp_path, model={"dtype": "float32"}, rollout=options))
    await engine.start()
    sampling = SamplingParams(max_tokens=12, temperature=1.0)
    prompts = [list(range(3, 3 + length)) for length in (2, 5, 9)]
    generations = await asyncio.gather(
        *(engine.generate(GenerationRequest(str(i), ids, sampling)) for i, ids in enumerate(prompts))
    )
    await engine.close()
    for ids, generation in zip(prompts, generations, strict=True):
        logprobs = np.array(generation.logprobs, np.float32)
        sample = sample_of((0, 0), ids, generation.token_ids, logprobs)
        np.testing.assert_allclose(logprobs_of(policy, [sample])[0], logprobs, atol=2e-4)
