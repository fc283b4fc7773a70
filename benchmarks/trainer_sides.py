"""The sides of the trainer benchmark, and what they share: batches, model, settings and memory.

One side in a process of its own: `python -m benchmarks.trainer_sides SIDE CASE BUDGET STEPS THREADS`. It
prints one line of JSON. SIDE `tidemill` and `trl`: seconds of each timed step, peak memory above what the
process held before its first step, and the gradient norm of the first step, which shows that both sides do
the same work. SIDE `bare`: our side and a bare loop of torch in turns.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import get_total_norm
from torch.utils.checkpoint import checkpoint
from transformers import LlamaForCausalLM

from benchmarks.device import Peak, is_gpu, now_s, random_sample
from benchmarks.report import in_turns, paired_ratio, print_result
from tests.support.models import tiny_llama
from tests.support.samples import changed
from tidemill.common.config.trainer import TrainerConfig
from tidemill.services.trainer.algorithm.losses.sums import Sums
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy.packing import Layout, make_rows, plan_tiles
from tidemill.services.trainer.policy.tile import lay_out
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

LR = 1e-6
MAX_GRAD_NORM = 1.0
GROUP_SIZE = 8
GPU_SCALE = 8
"""Completions, prompts and micro-batches are this many times longer on a GPU."""
CHUNK_ELEMENTS = 1 << 26
"""Logits of the bare loop at once; more are computed again in the backward pass."""


class Case(NamedTuple):
    """Lengths of one batch: uniform between two bounds, or so that each octave is equally likely."""

    sequences: int
    prompt_tokens: tuple[int, int]
    completion_tokens: tuple[int, int]
    is_spread: bool = False
    group: int = 1
    """Samples that have one prompt."""
    turns: int = 1
    """Parts of the prompt. The i-th sample of a group has the first i of them: a session's history at each of
    its turns. `prompt_tokens` counts one part."""


CASES = {
    "short": Case(48, (24, 32), (48, 64)),
    "long": Case(8, (24, 32), (448, 512)),
    "unequal": Case(32, (8, 32), (8, 512), is_spread=True),
}
SHARED = {
    "12": Case(512, (12, 12), (6, 12), group=16),
    "128": Case(64, (128, 128), (32, 64), group=8),
    "512": Case(32, (512, 512), (32, 64), group=8),
    "4096": Case(8, (4096, 4096), (128, 256), group=8),
    "sessions": Case(40, (128, 128), (32, 64), group=10, turns=10),
}
"""Named after the prompt that samples have in common."""


def make_model() -> LlamaForCausalLM:
    """A dense Llama with random weights, always the same, in float32."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    shape = (896, 24, 14, 4864, 151_936) if is_gpu() else (192, 4, 6, 512, 8192)
    sizes = {"num_key_value_heads": 2 if is_gpu() else 1, "max_position_embeddings": 8192 * GPU_SCALE}
    model = tiny_llama(
        **dict(zip(names, shape, strict=True)), **sizes, initializer_range=0.02, eos_token_id=2
    )
    return model.to("cuda" if is_gpu() else "cpu")  # type: ignore[arg-type]


def make_batch(case: Case, vocab_size: int, scale: int) -> list[Sample]:
    """Samples of a case in random order, with advantages of mean 0."""
    rng = np.random.default_rng(0)
    shortest, longest = case.completion_tokens
    low = shortest * scale
    high = longest * scale
    if case.is_spread:
        lengths = np.exp(rng.uniform(np.log(low), np.log(high + 1), case.sequences)).astype(int)
    else:
        lengths = rng.integers(low, high + 1, case.sequences)
    lengths[rng.integers(case.sequences)] = high  # the longest is there in every case
    prompts = rng.integers(case.prompt_tokens[0], case.prompt_tokens[1] + 1, case.sequences) * scale
    size = max(case.group, GROUP_SIZE)
    samples = [
        random_sample(rng, divmod(i, size), vocab_size, int(prompt) * case.turns, int(length))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    if case.group == 1:
        return samples
    firsts = (samples[i - i % case.group].prompt_ids for i in range(case.sequences))
    shares = ((i % case.turns + 1) / case.turns for i in range(case.sequences))
    return [
        changed(sample, prompt_ids=first[: round(len(first) * share)])
        for sample, first, share in zip(samples, firsts, shares, strict=True)
    ]


def make_policy(model: Any, samples: Sequence[Sample], budget_tokens: int) -> TransformersPolicy:
    """The policy of a run that trains on these samples in micro-batches of this many tokens."""
    config = TrainerConfig.model_validate(
        {
            "micro_batch_tokens": budget_tokens,
            "liger": "off",
            "optimizer": {"lr": LR, "max_grad_norm": MAX_GRAD_NORM},
            "algorithm": {"normalisation": "token", "importance": {"mode": "off"}},
        }
    )
    dtype = torch.bfloat16 if is_gpu() else torch.float32
    longest = max(len(sample.completion_ids) for sample in samples)
    return TransformersPolicy(model, config, dtype=dtype, temperature=1.0, max_completion_tokens=longest)


def train_step(policy: TransformersPolicy, samples: Sequence[Sample], budget_tokens: int) -> float:
    """Form micro-batches, accumulate them, update; returns the gradient norm."""
    sums = Sums()
    for batch in form_micro_batches(samples, budget_tokens):
        sums += policy.accumulate(batch)
    return policy.update(sums.denominator).grad_norm


def run_tidemill(model: Any, samples: Sequence[Sample], budget_tokens: int, steps: int) -> dict[str, Any]:
    """Train `steps` steps after one to warm up."""
    policy = make_policy(model, samples, budget_tokens)
    peak = Peak()
    norm = train_step(policy, samples, budget_tokens)
    times = [time_of(partial(train_step, policy, samples, budget_tokens)) for _ in range(steps)]
    return {"step_s": times, "peak_bytes": peak.above_base(), "grad_norm": norm}


class Rectangle(NamedTuple):
    """One forward pass, on the device: what the model gets, and of N scored tokens the flat position before
    each, its id, and the advantage over the number of tokens of the step."""

    inputs: dict[str, Any]
    places_N: Tensor
    targets_N: Tensor
    weights_N: Tensor


def packed(policy: TransformersPolicy, samples: Sequence[Sample], budget_tokens: int) -> Iterator[Rectangle]:
    """The trainer's tiles where each sample is a row of its own, as tensors on the device."""
    rows_alone: Layout = "varlen" if is_gpu() else "padded"
    num_trained = sum(sample.num_trained for sample in samples)
    to_device = partial(torch.as_tensor, device=policy._model.device)
    for batch in form_micro_batches(samples, budget_tokens):
        rows = make_rows(batch.samples, [sample.mask for sample in batch.samples])
        for tile in map(lay_out, plan_tiles(rows, rows_alone, policy._tile_tokens)):
            advantages = [
                float(batch.samples[row.sample].advantage) for row in tile.rows for _ in row.targets
            ]
            inputs = {"input_ids": tile.ids_BT, **tile.model_kwargs}
            yield Rectangle(
                {name: to_device(it) if isinstance(it, Tensor) else it for name, it in inputs.items()},
                to_device(tile.sources_N),
                to_device(tile.targets_N),
                to_device([advantage / num_trained for advantage in advantages]),
            )


class BareLoop:
    """A bare loop of torch: the model, F.cross_entropy over a chunk of logits at a time, backward, and fused
    AdamW. It gets packed tokens ready made, plans nothing, clips nothing, and measures nothing."""

    def __init__(self, model: Any, rectangles: Sequence[Rectangle]) -> None:
        self._model = model
        self._rectangles = rectangles
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)

    def step(self) -> None:
        """All rectangles, then one update."""
        self.add_gradients()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def add_gradients(self) -> None:
        """Forward and backward passes."""
        for rectangle in self._rectangles:
            with torch.autocast("cuda", torch.bfloat16, enabled=is_gpu()):
                hidden = self._model.base_model(**rectangle.inputs, use_cache=False).last_hidden_state
                loss = self._loss(hidden.flatten(0, 1)[rectangle.places_N], rectangle)
            loss.backward()

    def _loss(self, hidden_NH: Tensor, rectangle: Rectangle) -> Tensor:
        """-A log p, summed: the loss of a policy gradient where the ratio is 1."""
        head = self._model.lm_head.weight
        size = CHUNK_ELEMENTS // head.shape[0]
        columns = (hidden_NH, rectangle.targets_N, rectangle.weights_N)
        chunks = list(zip(*(column.split(size) for column in columns), strict=True))
        if len(chunks) == 1:
            return weighted_loss(head, *chunks[0])
        parts = [checkpoint(weighted_loss, head, *chunk, use_reentrant=False) for chunk in chunks]
        return torch.stack(parts).sum()

    def norm(self) -> float:
        """Norm of the gradient of a step, which is then discarded."""
        self.add_gradients()
        norm = float(get_total_norm([weight.grad for weight in self._model.parameters()]))
        self._optimizer.zero_grad(set_to_none=True)
        return norm


def weighted_loss(head_VH: Tensor, hidden_CH: Tensor, targets_C: Tensor, weights_C: Tensor) -> Tensor:
    """Weighted cross-entropy of a chunk's tokens, summed."""
    logits_CV = F.linear(hidden_CH, head_VH).float()
    return (F.cross_entropy(logits_CV, targets_C, reduction="none") * weights_C).sum()


def run_bare(model: Any, samples: Sequence[Sample], budget_tokens: int, steps: int) -> dict[str, Any]:
    """A step of each side in turns, after one of each to warm up; medians.

    Raises:
        RuntimeError: their gradients differ, so that they do not do the same work.
    """
    bare_model = copy.deepcopy(model)
    policy = make_policy(model, samples, budget_tokens)
    bare = BareLoop(bare_model, list(packed(policy, samples, budget_tokens)))
    norms = bare.norm(), train_step(policy, samples, budget_tokens)
    bare.step()
    if abs(norms[0] / norms[1] - 1.0) > 1e-2:
        raise RuntimeError(
            f"the gradient's norm is {norms[0]} in the bare loop and {norms[1]} in the trainer"
        )
    policy_step = partial(train_step, policy, samples, budget_tokens)
    # Over pairs of steps: what else the machine does slows both steps of a pair.
    times = in_turns(
        {side: partial(time_of, work) for side, work in (("bare", bare.step), ("own", policy_step))}, steps
    )
    ratio = paired_ratio(times["bare"], times["own"])
    return {"step_s": [median(each) for each in times.values()], "ratio": ratio}


def time_of(work: Callable[[], object]) -> float:
    """Seconds of a step."""
    started = now_s()
    work()
    return now_s() - started


def main(side: str, case_name: str, budget_tokens: int, steps: int, threads: int) -> None:
    """Measure one side on one case."""
    if not is_gpu():
        torch.set_num_threads(threads)
    scale = GPU_SCALE if is_gpu() else 1
    model = make_model()
    samples = make_batch((CASES | SHARED)[case_name], model.config.vocab_size, scale)
    run = {"tidemill": run_tidemill, "bare": run_bare}.get(side)
    if run is None:
        from benchmarks.trainer_trl import run_trl as run  # imports all of TRL
    result = run(model, samples, budget_tokens * scale, steps)
    print_result(result | {"tokens": sum(sample.num_tokens for sample in samples)})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
