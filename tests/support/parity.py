"""Logprobs as an engine has to give them, from plain forward passes of transformers; and logprobs that an
engine gives to tokens which it has not sampled, to compare with them."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM

from tidemill.common.wire import messages
from tidemill.common.wire.segments import VersionSpan
from tidemill.services.rollout.engines.engine import Engine, GenerationRequest, StopTexts
from tidemill.services.rollout.engines.transformers import TransformersEngine
from tidemill.services.rollout.engines.vllm import VllmEngine


@torch.inference_mode()
def expected_logprobs(
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    spans: Sequence[VersionSpan],
    models: dict[int, LlamaForCausalLM],
    temperature: float = 1.0,
) -> list[float]:
    """The logprob that each token must have; each version goes on with the KV cache of those before."""
    ids = [*prompt_ids, *token_ids]
    num_prompt = len(prompt_ids)
    cache = DynamicCache()
    logits = []
    ends = [first for _, first in spans[1:]] + [len(token_ids)]
    done = 0
    for (version, _), end in zip(spans, ends, strict=True):
        # The last token of a span is an input of the forward pass that samples the next one.
        inputs = ids[done : num_prompt + end - 1]
        done += len(inputs)
        logits.append(models[version](torch.tensor([inputs]), past_key_values=cache).logits[0])
    logits_TV = torch.cat(logits)[num_prompt - 1 :] / (temperature or 1.0)
    targets_T1 = torch.tensor(token_ids)[:, None]
    return torch.log_softmax(logits_TV, dim=-1).gather(-1, targets_T1)[:, 0].tolist()


async def score(engine: Engine, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
    """Logprobs of the completion at temperature 1, computed without a prefix cache."""
    if isinstance(engine, TransformersEngine):
        return score_plain(engine._running_model(), prompt_ids, completion_ids)
    from vllm import SamplingParams

    assert isinstance(engine, VllmEngine)
    params = SamplingParams(
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        skip_reading_prefix_cache=True,
    )
    async with engine._updating:  # no update may fall between the chunks of one prefill
        request = GenerationRequest(
            "score", [*prompt_ids, *completion_ids], messages.SamplingParams(max_tokens=1)
        )
        final = await engine._submit(request, params, 0, StopTexts((), engine.decode))
    assert final is not None
    logprobs: Any = final.prompt_logprobs
    # The first token has no logprob, each later one exactly one.
    return [float(value) for value in logprobs.logprobs[len(prompt_ids) - 1 :]]


def score_plain(model: Any, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
    """Like `score`, for a model of transformers."""
    first = len(prompt_ids) - 1
    ids_1T = torch.tensor([[*prompt_ids, *completion_ids]], device=model.device)
    with torch.inference_mode():
        logits_TV = model(ids_1T, use_cache=False).logits[0, first:-1]
    targets_T1 = ids_1T[0, first + 1 :, None]
    scores: list[float] = torch.log_softmax(logits_TV.float(), -1).gather(-1, targets_T1)[:, 0].tolist()
    return scores
