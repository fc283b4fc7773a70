"""One side of the trainer benchmark in a process of its own: `python -m benchmarks.trainer_sides SIDE CASE`.

Prints one line of JSON: seconds of each timed step, peak memory above what the process held before its
first step, and the gradient norm of the first step, which shows that both sides do the same work.
"""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.trainer_cases import CASES, CPU_SHAPE, GPU_SCALE, GPU_SHAPE, make_batch, make_model
from benchmarks.trainer_measures import LR, MAX_GRAD_NORM, Peak, now_s
from tidemill.services.trainer.groups.samples import Sample


def main(side: str, case_name: str, budget_tokens: int, steps: int, threads: int) -> None:
    """Measure one side on one case."""
    is_gpu = torch.cuda.is_available()
    if not is_gpu:
        torch.set_num_threads(threads)
    scale, shape = (GPU_SCALE, GPU_SHAPE) if is_gpu else (1, CPU_SHAPE)
    samples = make_batch(CASES[case_name], shape.vocabulary, scale)
    model = make_model(shape, context=1024 * scale)
    if is_gpu:
        model.to("cuda")  # type: ignore[arg-type]
    if side == "trl":
        from benchmarks.trainer_trl import run_trl as run  # imports all of TRL
    else:
        run = run_tidemill
    result = run(model, samples, budget_tokens * scale, steps)
    result["tokens"] = sum(sample.num_tokens for sample in samples)
    print(json.dumps(result), flush=True)


def run_tidemill(model: Any, samples: Sequence[Sample], budget_tokens: int, steps: int) -> dict[str, Any]:
    """Form micro-batches, accumulate them, update: what the trainer's step does with a complete batch."""
    from tidemill.common.config.trainer import TrainerConfig
    from tidemill.services.trainer.groups.samples import form_micro_batches
    from tidemill.services.trainer.policy.policy import MicroBatchMetrics
    from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

    config = TrainerConfig.model_validate(
        {
            "micro_batch_tokens": budget_tokens,
            "optimizer": {"lr": LR, "max_grad_norm": MAX_GRAD_NORM},
            "algorithm": {"normalisation": "token", "importance": {"mode": "off"}},
        }
    )
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    longest = max(len(sample.completion_ids) for sample in samples)
    policy = TransformersPolicy(model, config, dtype=dtype, temperature=1.0, max_completion_tokens=longest)
    peak, times, cpu_times, norms = Peak(), [], [], []
    for _ in range(steps + 1):
        started, cpu_started = now_s(), time.process_time()
        sums = MicroBatchMetrics()
        for batch in form_micro_batches(samples, budget_tokens):
            sums += policy.accumulate(batch)
        norms.append(policy.update(sums.denominator).grad_norm)
        times.append(now_s() - started)
        cpu_times.append(time.process_time() - cpu_started)
    return {
        "step_s": times[1:],
        "cpu_s": cpu_times[1:],
        "peak_bytes": peak.above_base(),
        "grad_norm": norms[0],
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
