"""A GRPO step against TRL's GRPOTrainer and a bare loop of torch: the same model, batch and machine.

    python -m benchmarks.trainer    # a few minutes on 2 cores; on a GPU where there is one

What is compared: forward, loss, backward, clipping and optimizer update over one batch of completions that
exist already. Both sides have the same random weights, token ids and advantages, the same loss (token-level,
no reference model, no correction of the rollout's logprobs), fp32 on CPUs and bf16 over fp32 weights on
GPUs, no gradient checkpointing, fused AdamW, and a micro-batch budget of 4,096 tokens (x 8 on a GPU). TRL
counts sequences: it gets as many as fit the budget at the longest length, and its own padding and training
loop; only generation and rewards are replaced by given tensors, outside of the measured time. The column
`norm` is the gradient norm of the first step: equal norms mean equal work.

Each side is a process of its own with the same number of threads; sides take turns. The time of a step is
the fastest one after the first. tokens/s counts prompt and completion tokens without padding. Memory is the
peak above what the process held, model included, before its first step.

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
from functools import partial
from typing import Any

import typer

from benchmarks.report import in_turns, machine, print_result, print_table
from benchmarks.trainer_sides import CASES, SHARED

BUDGET = 4096
STEPS = 2
ROUNDS = 2
LARGER = {"4096": 4}
"""Factor of a case's budget: in a budget that has no room for a group, nothing is shared."""


def measure(side: str, case: str, steps: int, threads: int) -> dict[str, Any]:
    """One side on one case, in a process of its own."""
    print(f"running: {case}, {side}", flush=True)
    # One arena: what the allocator keeps for each thread would be counted as the side's need. Threads wait
    # without spinning, as in the services.
    variables = {"OMP_NUM_THREADS": str(threads), "MALLOC_ARENA_MAX": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "benchmarks.trainer_sides", side, case]
    command += map(str, (BUDGET * LARGER.get(case, 1), steps, threads))
    environment = os.environ | variables | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{side} failed on {case}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def compare_with_trl(threads: int, note: str) -> dict[str, float]:
    """The step beside TRL's."""
    rows = []
    speed = dict[str, float]()
    memory = []
    for case in CASES:
        sides = {side: partial(measure, side, case, STEPS, threads) for side in ("tidemill", "trl")}
        tokens_s = dict[str, float]()
        peak = dict[str, int]()
        for side, results in in_turns(sides, ROUNDS).items():
            tokens_s[side] = results[0]["tokens"] / min(
                step_s for result in results for step_s in result["step_s"]
            )
            peak[side] = max(result["peak_bytes"] for result in results)
            cells = f"{tokens_s[side]:,.0f}", f"{peak[side] >> 20:,}", f"{results[0]['grad_norm']:.5f}"
            rows.append((case, side, *cells))
        speed[case] = tokens_s["tidemill"] / tokens_s["trl"]
        memory.append(peak["tidemill"] / peak["trl"])
    print_table("One GRPO step, given completions", "case,side,tokens/s,peak MiB,norm", rows, note)
    ratios = min(speed["short"], speed["long"]), speed["unequal"], max(memory)
    names = "ratio_equal", "ratio_unequal", "memory_ratio"
    return {name: round(ratio, 3) for name, ratio in zip(names, ratios, strict=True)}


def main(pairs: int = 7, trl: bool = True, threads: int = 0) -> None:
    """Measure all sides on every case."""
    threads = threads or len(os.sched_getaffinity(0))
    note = f"{machine()}, {threads} thread(s), micro-batches of {BUDGET} tokens, sides in turns."
    result = compare_with_trl(threads, note) if trl else {}
    results = {case: measure("bare", case, pairs, threads) for case in (*CASES, *SHARED)}
    rows = {}
    for case, measured in results.items():
        speeds = [f"{measured['tokens'] / step_s:,.0f}" for step_s in measured["step_s"]]
        rows[case] = (case, *speeds, f"{measured['ratio']:.3f}")
    columns = "case,bare: tokens/s,tidemill: tokens/s,ratio"
    print_table("The same step, beside a bare loop of torch", columns, [rows[case] for case in CASES], note)
    title = "Samples that begin alike; the bare loop has a row for each"
    print_table(title, columns, [rows[case] for case in SHARED], note)
    result["ratio_to_bare"] = min(results[case]["ratio"] for case in CASES)
    print_result(result | {f"tree_{case}": results[case]["ratio"] for case in SHARED})


if __name__ == "__main__":
    typer.run(main)
