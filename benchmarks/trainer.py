"""A GRPO step against TRL's GRPOTrainer: the same model, batch and machine, in one run.

    python -m benchmarks.trainer          # a few minutes on 2 cores; on a GPU where there is one
    python -m benchmarks.trainer --gpu    # MFU of dense models at 16k packed tokens, with a profile

What is compared: forward, loss, backward, clipping and optimizer update over one batch of completions that
exist already. Both sides have the same random weights, token ids and advantages, the same loss (token-level,
no reference model, no correction of the rollout's logprobs), fp32 on CPUs and bf16 over fp32 weights on
GPUs, no gradient checkpointing, fused AdamW, and a micro-batch budget of `--budget` tokens. TRL counts
sequences: it gets as many as fit the budget at the longest length, and its own padding and training loop;
only generation and rewards are replaced by given tensors, outside of the measured time. The column `norm` is
the gradient norm of the first step: equal norms mean equal work.

Each side is a process of its own with the same number of threads; sides take turns, `--rounds` times. The
time of a step is the fastest one after the first. tokens/s counts prompt and completion tokens without
padding. `CPU s` is the processor time of a step: where the machine is busy with other work, compare that,
with `--threads 1`. Memory is the peak above what the process held, model included, before its first step.

`ratio_equal` is our tokens/s over TRL's, the smaller of `short` and `long` completions; `ratio_unequal` that
of very unequal lengths (8 to 512, each octave equally likely); `memory_ratio` is our peak over TRL's, the
largest of the three.
"""

import json
import os
import subprocess
import sys
from typing import Annotated, Any

import typer

from benchmarks.report import machine, print_result, print_table
from benchmarks.trainer_cases import CASES

SIDES = ("tidemill", "trl")
MIB = 1 << 20


def measure(side: str, case: str, budget: int, steps: int, threads: int) -> dict[str, Any]:
    """One side on one case, in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.trainer_sides",
        side,
        case,
        *map(str, (budget, steps, threads)),
    ]
    # One arena: what the allocator keeps for each thread would be counted as the side's need.
    variables = {"OMP_NUM_THREADS": str(threads), "MALLOC_ARENA_MAX": "1", "HF_HUB_OFFLINE": "1"}
    variables["OMP_WAIT_POLICY"] = "PASSIVE"  # as in the services: threads that spin hide what they cost
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{side} failed on {case}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main(
    budget: Annotated[int, typer.Option(help="tokens of a micro-batch (x 8 on a GPU)")] = 4096,
    steps: Annotated[int, typer.Option(help="timed steps of each process")] = 2,
    rounds: Annotated[int, typer.Option(help="processes of each side for each case")] = 2,
    threads: Annotated[int, typer.Option(help="CPU threads of each side; 0 is every core")] = 0,
    gpu: Annotated[bool, typer.Option("--gpu", help="measure MFU on this GPU instead")] = False,
) -> None:
    """Measure both sides on every case."""
    if gpu:
        from benchmarks.gpu.mfu import measure_all

        measure_all()
        return
    threads = threads or len(os.sched_getaffinity(0))
    rows: list[tuple[str, ...]] = []
    speed: dict[tuple[str, str], float] = {}
    cpu: dict[tuple[str, str], float] = {}
    peak: dict[tuple[str, str], float] = {}
    for name in CASES:
        results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for _ in range(rounds):
            for side in SIDES:
                print(f"running: {name}, {side}", flush=True)
                results[side].append(measure(side, name, budget, steps, threads))
        for side in SIDES:
            step_s = min(step for result in results[side] for step in result["step_s"])
            speed[name, side] = results[side][0]["tokens"] / step_s
            peak[name, side] = max(result["peak_bytes"] for result in results[side])
            cpu[name, side] = min(step for result in results[side] for step in result["cpu_s"])
        rows += [_row(name, side, speed, cpu, peak, results[side][0]["grad_norm"]) for side in SIDES]
    columns = ("case", "side", "tokens/s", "to TRL", "CPU s", "to TRL", "peak MiB", "to TRL", "norm")
    note = f"{machine()}, {threads} thread(s), micro-batches of {budget} tokens, sides in turns x {rounds}."
    print_table("One GRPO step, given completions", columns, rows, note)
    ratio = {name: speed[name, "tidemill"] / speed[name, "trl"] for name in CASES}
    print_result(
        {
            "ratio_equal": round(min(ratio["short"], ratio["long"]), 3),
            "ratio_unequal": round(ratio["unequal"], 3),
            "memory_ratio": round(max(peak[name, "tidemill"] / peak[name, "trl"] for name in CASES), 3),
        }
    )


def _row(
    name: str,
    side: str,
    speed: dict[tuple[str, str], float],
    cpu: dict[tuple[str, str], float],
    peak: dict[tuple[str, str], float],
    grad_norm: float,
) -> tuple[str, ...]:
    return (
        name,
        side,
        f"{speed[name, side]:,.0f}",
        f"{speed[name, side] / speed[name, 'trl']:.2f}",
        f"{cpu[name, side]:.1f}",
        f"{cpu[name, side] / cpu[name, 'trl']:.2f}",
        f"{peak[name, side] / MIB:,.0f}",
        f"{peak[name, side] / peak[name, 'trl']:.2f}",
        f"{grad_norm:.5f}",
    )


if __name__ == "__main__":
    typer.run(main)
