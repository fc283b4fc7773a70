"""A GRPO step against TRL's GRPOTrainer and a bare loop of torch: the same model, batch and machine.

    python -m benchmarks.trainer          # a few minutes on 2 cores; on a GPU where there is one
    python -m benchmarks.trainer --whole  # the demo's task, both from process start to the end

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

`ratio_to_bare` is our tokens/s over those of a bare loop on the same packed tokens (`trainer_bare.py`), the
smallest of the three cases: the median over pairs of steps, one of each side, in one process.
`ratio_shared_prompts` is the same for groups of 8 that share a prompt of 512 tokens and have 64 each, where
the bare loop has a row for each sample.
`ratio_to_bare_cpu` is the same of processor time. `tile_ms` is the time to plan and lay out 16k tokens for
one forward pass, in the slower of the two packed layouts. With `--no-trl` there is no more than these.

`--whole` runs examples/arith without evaluation, with one checkpoint at the end: `tidemill up` beside TRL's
own generation and training, for as many steps of as many groups (`trainer_trl.py`). `ratio_whole` is their
time over ours.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import typer
import yaml

from benchmarks.report import machine, print_result, print_table
from benchmarks.trainer_sides import CASES
from tidemill.services.trainer.policy.packing import Layout, TokenRow, make_tile, plan_tiles

SIDES = ("tidemill", "trl")
SHARED = "shared"
EQUAL = [name for name in CASES if name != SHARED]
"""Cases whose packed tokens are the same for all sides."""
MIB = 1 << 20
DEMO = Path(__file__).parents[1] / "examples/arith"
OFFLINE = {"HF_HUB_OFFLINE": "1"}


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
    variables = {"OMP_NUM_THREADS": str(threads), "MALLOC_ARENA_MAX": "1", **OFFLINE}
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
    pairs: Annotated[int, typer.Option(help="timed steps of each side beside the bare loop")] = 7,
    trl: Annotated[bool, typer.Option(help="compare with TRL too")] = True,
    threads: Annotated[int, typer.Option(help="CPU threads of each side; 0 is every core")] = 0,
    whole: Annotated[bool, typer.Option("--whole", help="whole runs of the demo's task instead")] = False,
    whole_steps: Annotated[int, typer.Option(help="steps of a whole run")] = 45,
) -> None:
    """Measure all sides on every case."""
    if whole:
        compare_whole_runs(whole_steps, rounds)
        return
    threads = threads or len(os.sched_getaffinity(0))
    note = f"{machine()}, {threads} thread(s), micro-batches of {budget} tokens, sides in turns"
    result = _compare_with_trl(budget, steps, rounds, threads, note) if trl else {}
    result |= _compare_with_bare(budget, pairs, threads, note)
    print_result(result | {"tile_ms": round(max(tile_ms("varlen"), tile_ms("block")), 2)})


def _compare_with_trl(budget: int, steps: int, rounds: int, threads: int, note: str) -> dict[str, float]:
    rows: list[tuple[str, ...]] = []
    speed: dict[tuple[str, str], float] = {}
    cpu: dict[tuple[str, str], float] = {}
    peak: dict[tuple[str, str], float] = {}
    for name in EQUAL:
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
    print_table("One GRPO step, given completions", columns, rows, f"{note} x {rounds}.")
    ratio = {name: speed[name, "tidemill"] / speed[name, "trl"] for name in EQUAL}
    return {
        "ratio_equal": round(min(ratio["short"], ratio["long"]), 3),
        "ratio_unequal": round(ratio["unequal"], 3),
        "memory_ratio": round(max(peak[name, "tidemill"] / peak[name, "trl"] for name in EQUAL), 3),
    }


def _compare_with_bare(budget: int, pairs: int, threads: int, note: str) -> dict[str, float]:
    rows, ratios, cpu_ratios = [], {}, {}
    for name in CASES:
        print(f"running: {name}, bare loop and tidemill", flush=True)
        result = measure("bare", name, budget, pairs, threads)
        ratios[name], cpu_ratios[name] = result["ratio"], result["cpu_ratio"]
        tokens_s = [f"{result['tokens'] / step_s:,.0f}" for step_s in result["step_s"]]
        rows.append((name, *tokens_s, f"{ratios[name]:.3f}", f"{cpu_ratios[name]:.3f}"))
    columns = ("case", "bare, tokens/s", "tidemill, tokens/s", "ratio", "of CPU s")
    print_table("The same step, beside a bare loop of torch", columns, rows, f"{note} x {pairs}.")
    return {
        "ratio_to_bare": round(min(ratios[name] for name in EQUAL), 3),
        "ratio_to_bare_cpu": round(min(cpu_ratios[name] for name in EQUAL), 3),
        "ratio_shared_prompts": round(ratios[SHARED], 3),
    }


def whole_run_config(folder: Path, steps: int) -> Path:
    """The demo's config without evaluation, and with one checkpoint, at the end."""
    tree = yaml.safe_load((DEMO / "config.yaml").read_text())
    tree["model"]["path"] = str(DEMO / "model")
    tree["data"] = {
        "train": str(DEMO / "train.jsonl"),
        "max_prompt_tokens": tree["data"]["max_prompt_tokens"],
    }
    tree["trainer"] |= {"steps": steps, "checkpoint_every": 0, "evaluation": {"every": 0}}
    tree["rollout"]["num_threads"] = tree["trainer"]["num_threads"] = 1
    del tree["expect"]
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def _whole_run_s(side: str, steps: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        words = [str(whole_run_config(Path(name), steps))]
        if side == "tidemill":
            words = ["tidemill.services.console", "up", *words, "--no-live", "--runs-dir", name]
        else:
            words = ["benchmarks.trainer_trl", *words]
        command, variables = [sys.executable, "-m", *words], os.environ | OFFLINE
        started = time.perf_counter()
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        took_s = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(f"{side} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")
    return took_s


def compare_whole_runs(steps: int, rounds: int) -> None:
    """Wall time of whole processes, in turns; the fastest of each side counts."""
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            print(f"running: the whole run, {side}", flush=True)
            seconds[side].append(_whole_run_s(side, steps))
    best = {side: min(times) for side, times in seconds.items()}
    rows = [(side, f"{best[side]:.1f}", f"{best['trl'] / best[side]:.2f}") for side in SIDES]
    print_table(
        f"The demo's task, {steps} steps, from process start", ("", "seconds", "speed"), rows, machine()
    )
    print_result({"ratio_whole": round(best["trl"] / best["tidemill"], 3), "steps": steps, "seconds": best})


def tile_ms(layout: Layout, tokens: int = 16_384) -> float:
    """Milliseconds to plan and lay out so many tokens in sequences of 200 to 800: the median."""
    rng, rows, times = np.random.default_rng(0), [], []
    while (room := tokens - sum(map(len, rows))) > 0:
        ids = rng.integers(3, 1000, min(room, int(rng.integers(200, 800)))).astype(np.int32)
        places = np.arange(len(ids), dtype=np.int32)
        rows.append(TokenRow(len(rows), ids, places, ids, places))
    for _ in range(21):
        started = time.perf_counter()
        # Lines of the block layout have a little room left at their ends.
        for lines in plan_tiles(rows, layout, tokens * 2):
            make_tile(lines, layout)
        times.append((time.perf_counter() - started) * 1000)
    return median(times)


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
