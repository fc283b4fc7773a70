"""Our side of the trainer benchmark, and what all sides share: batches, model, settings, clock and memory.

One side in a process of its own: `python -m benchmarks.trainer_sides SIDE CASE BUDGET STEPS THREADS`. It
prints one line of JSON: seconds of each timed step, peak memory above what the process held before its first
step, and the gradient norm of the first step, which shows that both sides do the same work. SIDE `bare` is
our side and a bare loop of torch in turns.
"""

import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tidemill.common.config.trainer import TrainerConfig
from tidemill.services.trainer.algorithm.losses.totals import MicroBatchMetrics
from tidemill.services.trainer.groups.samples import Sample, form_micro_batches
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

LR = 1e-6
MAX_GRAD_NORM = 1.0
GROUP_SIZE = 8


@dataclass(frozen=True)
class Case:
    """Lengths of one batch: uniform between two bounds, or so that each octave is equally likely."""

    sequences: int
    prompt_tokens: tuple[int, int]
    completion_tokens: tuple[int, int]
    is_spread: bool = False


CASES = {
    "short": Case(48, (24, 32), (48, 64)),
    "long": Case(8, (24, 32), (448, 512)),
    "unequal": Case(32, (8, 32), (8, 512), is_spread=True),
}
GPU_SCALE = 8
"""Completions and prompts are this many times longer on a GPU."""


CPU_SHAPE = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 6, "intermediate_size": 512}
GPU_SHAPE = {
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "intermediate_size": 4864,
}


def make_model(is_gpu: bool) -> PreTrainedModel:
    """A dense Llama with random weights, always the same, in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **(GPU_SHAPE if is_gpu else CPU_SHAPE),
        num_key_value_heads=2 if is_gpu else 1,
        vocab_size=151_936 if is_gpu else 8192,
        max_position_embeddings=1024 * GPU_SCALE,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval().to("cuda" if is_gpu else "cpu")  # type: ignore[arg-type]


def make_batch(case: Case, vocabulary: int, scale: int) -> list[Sample]:
    """Samples of a case in random order, with advantages of mean 0."""
    rng = np.random.default_rng(0)
    low, high = (length * scale for length in case.completion_tokens)
    if case.is_spread:
        lengths = np.exp(rng.uniform(np.log(low), np.log(high + 1), case.sequences)).astype(int)
    else:
        lengths = rng.integers(low, high + 1, case.sequences)
    lengths[rng.integers(case.sequences)] = high  # the longest is there in every case
    samples = []
    for i, length in enumerate(lengths):
        num_prompt = int(rng.integers(case.prompt_tokens[0], case.prompt_tokens[1] + 1)) * scale
        samples.append(
            Sample(
                key=(i // GROUP_SIZE, i % GROUP_SIZE),
                prompt_ids=rng.integers(3, vocabulary, num_prompt).astype(np.int32),
                completion_ids=rng.integers(3, vocabulary, length).astype(np.int32),
                rollout_logprobs=np.full(length, -np.log(vocabulary), dtype=np.float32),
                mask=np.ones(length, dtype=np.bool_),
                advantage=float(rng.normal()),
                reward=0.0,
            )
        )
    return samples


class Peak:
    """Peak memory above what was held when this was made, in bytes: of the GPU where there is one."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
        else:
            self.base = psutil.Process().memory_info().rss

    def above_base(self) -> int:
        """Bytes."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() - self.base
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self.base


def now_s() -> float:
    """Seconds on a clock that never goes back, once the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def make_policy(model: Any, samples: Sequence[Sample], budget_tokens: int) -> TransformersPolicy:
    """The policy of a run that trains on these samples in micro-batches of so many tokens."""
    config = TrainerConfig.model_validate(
        {
            "micro_batch_tokens": budget_tokens,
            "optimizer": {"lr": LR, "max_grad_norm": MAX_GRAD_NORM},
            "algorithm": {"normalisation": "token", "importance": {"mode": "off"}},
        }
    )
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    longest = max(len(sample.completion_ids) for sample in samples)
    return TransformersPolicy(model, config, dtype=dtype, temperature=1.0, max_completion_tokens=longest)


def train_step(policy: TransformersPolicy, samples: Sequence[Sample], budget_tokens: int) -> float:
    """Form micro-batches, accumulate them, update; returns the gradient norm."""
    sums = MicroBatchMetrics()
    for batch in form_micro_batches(samples, budget_tokens):
        sums += policy.accumulate(batch)
    return policy.update(sums.denominator).grad_norm


def run_tidemill(model: Any, samples: Sequence[Sample], budget_tokens: int, steps: int) -> dict[str, Any]:
    """Train `steps` steps after one to warm up."""
    policy = make_policy(model, samples, budget_tokens)
    peak, times, norms = Peak(), [], []
    for _ in range(steps + 1):
        started = now_s()
        norms.append(train_step(policy, samples, budget_tokens))
        times.append(now_s() - started)
    return {"step_s": times[1:], "peak_bytes": peak.above_base(), "grad_norm": norms[0]}


def main(side: str, case_name: str, budget_tokens: int, steps: int, threads: int) -> None:
    """Measure one side on one case."""
    is_gpu = torch.cuda.is_available()
    if not is_gpu:
        torch.set_num_threads(threads)
    scale, model = GPU_SCALE if is_gpu else 1, make_model(is_gpu)
    samples = make_batch(CASES[case_name], model.config.vocab_size, scale)
    if side == "trl":
        from benchmarks.trainer_trl import run_trl as run  # imports all of TRL
    elif side == "bare":
        from benchmarks.trainer_bare import run_bare as run
    else:
        run = run_tidemill
    result = run(model, samples, budget_tokens * scale, steps)
    result["tokens"] = sum(sample.num_tokens for sample in samples)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
