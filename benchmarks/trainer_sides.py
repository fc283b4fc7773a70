"""One side of the trainer benchmark in a process of its own: `python -m benchmarks.trainer_sides SIDE CASE`.

Prints one line of JSON: seconds of each timed step, peak memory above what the process held before its
first step, and the gradient norm of the first step, which shows that both sides do the same work. SIDE
`bare` is our side and a bare loop of torch in turns, and what they took.
"""

import json
import sys

import torch

from benchmarks.trainer_cases import CASES, CPU_SHAPE, GPU_SCALE, GPU_SHAPE, make_batch, make_model


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
    elif side == "bare":
        from benchmarks.trainer_bare import run_bare as run
    else:
        from benchmarks.trainer_tidemill import run_tidemill as run
    result = run(model, samples, budget_tokens * scale, steps)
    result["tokens"] = sum(sample.num_tokens for sample in samples)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]))
