"""A GRPO step against TRL's GRPOTrainer and a bare loop of torch: the same model, batch and machine.

    python -m benchmarks.trainer    # a few minutes on 2 cores; on a GPU where there is one

What is compared: forward, loss, backward, clipping and optimizer update over one batch of completions that
exist already. Both sides have the same random weights, token ids and advantages, the same loss (token-level,
no reference model, no correction of the rollout's logprobs), fp32 on CPUs and bf16 over fp32 weights on
GPUs, no gradient checkpointing, fused AdamW, and a micro-batch budget of `--budget` tokens. TRL counts
sequences: it gets as many as fit the budget at the longest length, and its own padding and training loop;
only generation and rewards are replaced by given tensors, outside of the measured time. The column `norm` is
the gradient norm of the first step: equal norms mean equal work.

Each side is a process of its own with the same number of threads; sides alternate, `--rounds` times. The
time of a step is the fastest one after the first. tokens/s counts prompt and completion tokens without
padding. Memory is the peak above what the process held, model included, before its first step.

`ratio_equal` is our tokens/s over TRL's, the smaller of `short` and `long` completions; `ratio_unequal` that
of very unequal lengths (8 to 512, each octave equally likely); `memory_ratio` is our peak over TRL's, the
largest of the three.

`ratio_to_bare` is our tokens/s over those of a bare loop on the same packed tokens (`BareLoop`), the
smallest of the three cases: the median over pairs of steps, one of each side, in one process. `tree_N` is the
same where samples begin alike with N tokens, or are the turns of sessions; the bare loop computes each alone.
Both have four times the budget in `tree_4096`: else a group would not fit.
`--no-trl` leaves out the comparison with TRL.
"""

import json
import os
import subprocess
import sys
from typing import Annotated, Any

import typer

from benchmarks.report import machine, print_result, print_table
from benchmarks.trainer_sides import CASES, SHARED

SIDES = ("tidemill", "trl")
MIB = 1 << 20
LARGER = {"4096": 4}
"""Factor of a case's budget: in a budget that has no room for a group, nothing is shared."""


def measure(side: str, case: str, budget: int, steps: int, threads: int) -> dict[str, Any]:
    """One side on one case, in a process of its own."""
    print(f"running: {case}, {side}", flush=True)
    # One arena: what the allocator keeps for each thread would be counted as the side's need. Threads wait
    # without spinning, as in the services.
    variables = {"OMP_NUM_THREADS": str(threads), "MALLOC_ARENA_MAX": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "benchmarks.trainer_sides", side, case]
    command += map(str, (budget, steps, threads))
    environment = os.environ | variables | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{side} failed on {case}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def compare_with_trl(budget: int, steps: int, rounds: int, threads: int, note: str) -> dict[str, float]:
    """The step beside TRL's."""
    rows: list[tuple[str, ...]] = []
    speed: dict[str, float] = {}
    memory: dict[str, float] = {}
    for case in CASES:
        found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
        for _ in range(rounds):
            for side in SIDES:
                found[side].append(measure(side, case, budget, steps, threads))
        tokens_s = {
            side: results[0]["tokens"] / min(step_s for result in results for step_s in result["step_s"])
            for side, results in found.items()
        }
        peak = {side: max(result["peak_bytes"] for result in results) for side, results in found.items()}
        speed[case], memory[case] = (each["tidemill"] / each["trl"] for each in (tokens_s, peak))
        for side in SIDES:
            cells = f"{tokens_s[side]:,.0f}", f"{peak[side] / MIB:,.0f}", f"{found[side][0]['grad_norm']:.5f}"
            rows.append((case, side, *cells))
    columns = ("case", "side", "tokens/s", "peak MiB", "norm")
    print_table("One GRPO step, given completions", columns, rows, f"{note} x {rounds}.")
    return {
        "ratio_equal": round(min(speed["short"], speed["long"]), 3),
        "ratio_unequal": round(speed["unequal"], 3),
        "memory_ratio": round(max(memory.values()), 3),
    }


def compare_with_bare(budget: int, pairs: int, threads: int, note: str) -> dict[str, float]:
    """The step beside a bare loop's."""
    rows, ratios = [], []
    for case in CASES:
        result = measure("bare", case, budget, pairs, threads)
        ratios.append(result["ratio"])
        tokens_s = [f"{result['tokens'] / step_s:,.0f}" for step_s in result["step_s"]]
        rows.append((case, *tokens_s, f"{ratios[-1]:.3f}"))
    columns = ("case", "bare, tokens/s", "tidemill, tokens/s", "ratio")
    print_table("The same step, beside a bare loop of torch", columns, rows, f"{note} x {pairs}.")
    shared = {case: measure("bare", case, LARGER.get(case, 1) * budget, pairs, threads) for case in SHARED}
    rows = [
        (case, *(f"{found['tokens'] / step_s:,.0f}" for step_s in found["step_s"]), f"{found['ratio']:.2f}")
        for case, found in shared.items()
    ]
    print_table("Samples that begin alike; the bare loop has a row for each", columns, rows, note)
    return {"ratio_to_bare": round(min(ratios), 3)} | {
        f"tree_{case}": round(found["ratio"], 2) for case, found in shared.items()
    }


def main(
    budget: Annotated[int, typer.Option(help="tokens of a micro-batch (x 8 on a GPU)")] = 4096,
    steps: Annotated[int, typer.Option(help="timed steps of each process")] = 2,
    rounds: Annotated[int, typer.Option(help="processes of each side for each case")] = 2,
    pairs: Annotated[int, typer.Option(help="timed steps of each side beside the bare loop")] = 7,
    trl: Annotated[bool, typer.Option(help="compare with TRL too")] = True,
    threads: Annotated[int, typer.Option(help="CPU threads of each side; 0 is every core")] = 0,
) -> None:
    """Measure all sides on every case."""
    threads = threads or len(os.sched_getaffinity(0))
    note = f"{machine()}, {threads} thread(s), micro-batches of {budget} tokens, sides alternate"
    result = compare_with_trl(budget, steps, rounds, threads, note) if trl else {}
    print_result(result | compare_with_bare(budget, pairs, threads, note))


if __name__ == "__main__":
    typer.run(main)
