"""The parity probe: what the weights that an engine computes with give to tokens not sampled now."""

from collections.abc import Sequence
from typing import Any

import torch

from tidemill.services.rollout.engines.engine import Engine, StopTexts
from tidemill.services.rollout.engines.transformers import TransformersEngine
from tidemill.services.rollout.engines.vllm import NORMAL, VllmEngine


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
        final = await engine._submit(
            [*prompt_ids, *completion_ids], params, "score", NORMAL, StopTexts((), engine.decode)
        )
    assert final is not None
    logprobs: Any = final.prompt_logprobs
    # The first token has no logprob, each later one exactly one.
    return [float(value) for value in logprobs.logprobs[len(prompt_ids) - 1 :]]


def score_plain(model: Any, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> list[float]:
    """The same of a model of transformers."""
    first = len(prompt_ids) - 1
    ids_1T = torch.tensor([[*prompt_ids, *completion_ids]], device=model.device)
    with torch.inference_mode():
        logits_TV = model(ids_1T, use_cache=False).logits[0, first:-1]
    targets_T1 = ids_1T[0, first + 1 :, None]
    scores: list[float] = torch.log_softmax(logits_TV.float(), -1).gather(-1, targets_T1)[:, 0].tolist()
    return scores
