"""Tries whether batches of a model with recurrent states give the numbers of its rows alone, before a run.

Every library keeps such states in its own way, and a wrong one is no error: the model goes on with other
numbers. So a few tokens are sampled, from prompts of different lengths, of which some are equal and some end
early, and compared with one pass over each row.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import structlog
import torch

from tidemill.common.errors import ConfigError
from tidemill.common.process.shortage import is_machine_fault
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines.decoding import DecodingRow, RouteRecorder, decode_batch
from tidemill.services.rollout.engines.engine import GenerationRequest, StopTexts

log = structlog.get_logger(__name__)

PROMPTS = ((2, 6), (5, 2), (5, 6), (9, 4), (1, 6))
"""Tokens of a prompt, and of its completion. Prompts of one length are equal."""
KNOWN_APART = ("minimax",)
"""Kinds of models whose lengths transformers is known to mix up; in half precision it may not show."""
LEAST_GAP = 1e-3
ROUNDINGS = 8
"""The median token may differ by the first, in nats, or by so many rounding errors of the model's numbers:
what has another state differs by tenths. The median, for in a mixture a token may go to another expert."""
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)
"""What a model's code, and torch in it, raise where rows of a batch do not fit together."""


def takes_all_lengths(model: Any) -> bool:
    """Whether prompts of different lengths may be decoded in one batch; else those of one length may.

    Raises:
        ConfigError: neither gives the numbers of each row alone.
    """
    kind = model.config.model_type
    problem = "its padding is not masked" if kind in KNOWN_APART else _problem(model, one_length=False)
    if not problem:
        return True
    problem_of_one = _problem(model, one_length=True)
    if problem_of_one:
        raise ConfigError(
            f"model.path: the transformers engine cannot sample from a {kind}: in a batch {problem_of_one}. "
            "Set rollout.engine to vllm if that has this model, or take another model"
        )
    log.warning(
        "prompts of different lengths are decoded one after the other, this model does not keep them apart",
        model=str(kind),
        reason=problem,
    )
    return False


def _problem(model: Any, one_length: bool) -> str:
    """What goes wrong in batches; empty where nothing does."""
    loop = asyncio.new_event_loop()
    try:
        rows = [_make_row(model, number, loop.create_future()) for number in range(len(PROMPTS))]
        decode_batch(model, rows, frozenset(), RouteRecorder(()), one_length)
        gaps = torch.cat([_gaps(model, row) for row in rows])
    except FAILURES as error:
        if is_machine_fault(error):  # torch gets no memory: that says nothing of the model
            raise
        return f"it fails ({' '.join(repr(error).split())[:200]})"
    finally:
        loop.close()
    median = float(gaps.median())
    limit = max(LEAST_GAP, ROUNDINGS * torch.finfo(model.dtype).eps)
    if median <= limit:
        return ""
    return f"its logprobs differ by {median:.3g} nats from those of each sequence alone"


def _make_row(model: Any, number: int, done: Any) -> DecodingRow:
    num_prompt, num_tokens = PROMPTS[number]
    vocabulary = model.config.get_text_config().vocab_size
    # From the middle of the vocabulary: the first ids are often special.
    ids = [(vocabulary // 2 + 7 * position + num_prompt) % vocabulary for position in range(num_prompt)]
    request = GenerationRequest(f"trial-{number}", ids, SamplingParams(max_tokens=num_tokens))
    return DecodingRow(request, number, StopTexts((), _no_text), done)


def _no_text(ids: Sequence[int]) -> str:
    return ""


@torch.inference_mode()
def _gaps(model: Any, row: DecodingRow) -> torch.Tensor:
    """|logprob of the batch - of one pass| of each sampled token."""
    prompt_ids = list(row.request.prompt_ids)
    ids_1T = torch.tensor([prompt_ids + row.token_ids], device=model.device)
    logits_TV = model(input_ids=ids_1T, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float()
    targets_T1 = ids_1T[0, len(prompt_ids) :, None]
    logprobs_T = torch.log_softmax(logits_TV, -1).gather(-1, targets_T1)[:, 0]
    return (logprobs_T.cpu() - torch.tensor(row.logprobs)).abs().nan_to_num(nan=torch.inf)
