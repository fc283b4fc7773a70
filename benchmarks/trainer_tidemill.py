"""Our side of the trainer benchmark: what the trainer's step does with a complete batch."""

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.trainer_measures import LR, MAX_GRAD_NORM, Peak, now_s
from tidemill.common.config.trainer import TrainerConfig
from tidemill.services.trainer.algorithm.losses.totals import MicroBatchMetrics
from tidemill.services.trainer.groups.samples import Sample, form_micro_batches
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy


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
    peak, times, cpu_times, norms = Peak(), [], [], []
    for _ in range(steps + 1):
        started, cpu_started = now_s(), time.process_time()
        norms.append(train_step(policy, samples, budget_tokens))
        times.append(now_s() - started)
        cpu_times.append(time.process_time() - cpu_started)
    return {
        "step_s": times[1:],
        "cpu_s": cpu_times[1:],
        "peak_bytes": peak.above_base(),
        "grad_norm": norms[0],
    }
