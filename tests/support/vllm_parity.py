"""Logprobs as an engine has to give them, from plain forward passes of transformers."""

from collections.abc import Sequence

import torch
from transformers import DynamicCache, LlamaForCausalLM

from tidemill.common.wire.segments import VersionSpan


@torch.inference_mode()
def expected_logprobs(
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    spans: Sequence[VersionSpan],
    models: dict[int, LlamaForCausalLM],
    temperature: float = 1.0,
) -> list[float]:
    """What each token's logprob must be, version by version, each going on with the cache so far."""
    ids = [*prompt_ids, *token_ids]
    num_prompt, cache, logits = len(prompt_ids), DynamicCache(), []
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
