"""The transformers engine with models that keep recurrent states: a row's numbers are those of the row alone.

Against one pass over each row, in float32: prompts of different lengths in one batch, several samples of a
prompt, samples that end at different times, and samples that go on from a part.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.architectures import STATELESS_BATCHES, make_model
from tests.support.models import run_config, tiny_llama, write_tokenizer
from tidemill.common.errors import ConfigError
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines import transformers as engine_module
from tidemill.services.rollout.engines import trial
from tidemill.services.rollout.engines.decoding import name_of_cache
from tidemill.services.rollout.engines.engine import Generation, GenerationRequest
from tidemill.services.rollout.engines.states import is_recurrent
from tidemill.services.rollout.engines.transformers import TransformersEngine
from tidemill.services.rollout.engines.trial import takes_all_lengths

SMALL = {"initializer_range": 0.1}
"""Of larger weights float32 itself makes more than 1e-5 of a nat."""
USUAL = ["Qwen3_5Text", "Lfm2", "FalconH1", "Mamba", "MiniMax"]
"""Families with every kind of state: the rest in the table of docs/models.md."""


def saved(family: str, folder: Path) -> Any:
    model = make_model(family, **SMALL)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model


def make_engine(folder: Path) -> TransformersEngine:
    rollout = {"engine": "transformers", "max_num_seqs": 64}
    model = {"max_model_len": 64, "dtype": "float32"}
    return TransformersEngine(run_config(folder, model=model, rollout=rollout))


def gap_of(model: Any, prompt_ids: list[int], generation: Generation) -> float:
    """Largest |logprob of the engine - that of one pass over the row|."""
    ids_1T = torch.tensor([prompt_ids + generation.token_ids])
    with torch.no_grad():
        logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float()
    targets_T1 = torch.tensor(generation.token_ids)[:, None]
    expected_T = torch.log_softmax(logits_TV, -1).gather(-1, targets_T1)[:, 0]
    return float((expected_T - torch.tensor(generation.logprobs)).abs().max())


def prompt_of(length: int) -> list[int]:
    return [2 + (7 * index + length) % 29 for index in range(length)]


async def sample(engine: TransformersEngine, requests: list[tuple[list[int], int]]) -> list[Generation]:
    running = [
        engine.generate(GenerationRequest(f"r{i}", prompt_ids, SamplingParams(max_tokens=num_tokens)))
        for i, (prompt_ids, num_tokens) in enumerate(requests)
    ]
    return list(await asyncio.gather(*running))


@pytest.mark.parametrize("family", USUAL)
async def test_the_rows_of_a_batch_are_computed_as_each_row_alone(family, tmp_path):
    model = saved(family, tmp_path)
    assert is_recurrent(model)
    prompts = [prompt_of(length) for length in (1, 5, 9, 12, 2, 5)]
    # Four samples of each prompt, of which some end at once and others late; prompts of one length too.
    ends = (20, 1, 13, 6)
    requests = [(prompt_ids, num_tokens) for prompt_ids in prompts for num_tokens in ends]
    engine = make_engine(tmp_path)
    await engine.start()
    try:
        generations = await sample(engine, requests)
        gaps = [
            gap_of(model, ids, generation) for (ids, _), generation in zip(requests, generations, strict=True)
        ]
        assert max(gaps) <= 1e-5
        # What a dead worker left goes on from its tokens, beside new samples.
        parts = [
            prompts[3] + generations[12].token_ids[:7],
            prompts[1] + generations[4].token_ids[:3],
            prompts[0],
        ]
        further = await sample(engine, [(ids, 8) for ids in parts])
        assert (
            max(gap_of(model, ids, generation) for ids, generation in zip(parts, further, strict=True))
            <= 1e-5
        )
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("forward", "name"),
    [
        (lambda input_ids, cache=None, **kwargs: None, "cache"),
        (lambda input_ids, cache_params=None, **kwargs: None, "cache_params"),
        (lambda input_ids, past_key_values=None, **kwargs: None, "past_key_values"),
        (lambda *args, **kwargs: None, "past_key_values"),
    ],
)
def test_a_models_state_has_the_name_that_its_release_of_transformers_gives_it(
    forward: Callable[..., None], name: str
) -> None:
    assert name_of_cache(SimpleNamespace(forward=forward)) == name


def test_models_with_keys_and_values_alone_are_decoded_as_ever():
    assert not is_recurrent(tiny_llama())


def test_a_model_whose_library_mixes_lengths_up_decodes_them_apart(monkeypatch):
    """transformers masks MiniMax's padding by the length of a layer that keeps no keys."""
    assert takes_all_lengths(make_model("Lfm2", **SMALL))
    assert not takes_all_lengths(make_model("MiniMax", **SMALL))
    monkeypatch.setattr(trial, "KNOWN_APART", ())
    assert not takes_all_lengths(make_model("MiniMax", **SMALL)), "the trial finds it too"


def test_a_machine_without_memory_is_no_fault_of_the_model(monkeypatch):
    def fail(*args: Any) -> None:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: Error code 12 (Cannot allocate memory)"
        )

    monkeypatch.setattr(trial, "decode_batch", fail)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        takes_all_lengths(make_model("Lfm2", **SMALL))


@pytest.mark.parametrize("family", STATELESS_BATCHES)
async def test_what_cannot_be_sampled_is_refused_by_name_at_the_start(family, tmp_path, monkeypatch):
    kind = saved(family, tmp_path).config.model_type
    with pytest.raises(ConfigError, match=f"cannot sample from a {kind}"):
        await make_engine(tmp_path).start()
    # Also where the name is not known: the trial finds it.
    monkeypatch.setattr(engine_module, "check_sampling", lambda _: None)
    with pytest.raises(ConfigError, match=f"cannot sample from a {kind}"):
        await make_engine(tmp_path).start()
