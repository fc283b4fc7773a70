"""What a checkpoint costs: the time on the policy's thread, in the step and beside it.

A random Llama of about `--parameters` parameters in float32 with AdamW's moments (12 bytes a parameter on the
disk, and once more in memory for the copy) takes one step, and is saved `--rounds` times each way, in turns:
written where the policy trains (how it was before there was a copy), and copied there and written beside.
The first copy makes the buffers that later ones fill. Wall time, as training sees it, and processor time of
the thread, which other work on the machine does not lengthen. A step beside a write tells what the write
takes from training on the same cores. The last line holds medians and their ratios.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from benchmarks.report import machine, print_result, print_table
from benchmarks.trainer_cases import CASES, Shape, make_batch, make_model
from tidemill.common.config.trainer import TrainerConfig
from tidemill.services.trainer.durable.checkpoint import CheckpointStore, TrainerState
from tidemill.services.trainer.groups.samples import MicroBatch
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

HIDDEN = 768
ROWS = {
    "in step": "written in the policy's thread",
    "first copy": "copied there, into new buffers",
    "copy": "copied there, later",
    "write": "  and written beside a step",
    "step": "a step alone",
    "step beside": "a step beside a write",
}


def make_policy(parameters: int) -> TransformersPolicy:
    """As many layers as give about so many parameters."""
    layers = max(1, round((parameters - 8192 * HIDDEN) / (HIDDEN * HIDDEN * 14.4)))
    model = make_model(Shape(HIDDEN, layers, 12, 4 * HIDDEN, 8192), 1024)
    return TransformersPolicy(
        model, TrainerConfig(), dtype=torch.float32, temperature=1.0, max_completion_tokens=64
    )


def step(policy: TransformersPolicy) -> None:
    """A small one."""
    samples = tuple(make_batch(CASES["short"], 8192)[:2])
    policy.update(policy.accumulate(MicroBatch(samples)).denominator)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """That it takes, and of them those of the processor in this thread."""
    start, busy = time.perf_counter(), time.thread_time()
    work()
    return time.perf_counter() - start, time.thread_time() - busy


def measure(policy: TransformersPolicy, rounds: int, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each part, a round in each place."""
    store, beside = CheckpointStore(folder, keep=1), ThreadPoolExecutor(1)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ROWS}

    def write_copied(version: int) -> None:
        store.save(TrainerState(version=version), lambda path: policy.begin_saving(path).result())

    for version in range(0, 2 * rounds, 2):
        state = TrainerState(version=version)
        found["in step"].append(seconds(partial(store.save, state, lambda path: policy.state().write(path))))
        found["step"].append(seconds(partial(step, policy)))
        found["copy" if version else "first copy"].append(seconds(policy.stage_state))
        writing = beside.submit(seconds, partial(write_copied, version + 1))
        found["step beside"].append(seconds(partial(step, policy)))
        found["write"].append(writing.result())
    return found


def main() -> None:
    """Measure, print a table, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description="What a checkpoint costs the policy's thread.")
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--rounds", type=int, default=4, help="at least 2")
    parser.add_argument("--folder", type=Path, help="where it is written; default: a temporary one")
    options = parser.parse_args()
    policy = make_policy(int(options.parameters))
    step(policy)  # moments exist from the first update on
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(policy, options.rounds, Path(folder))
    num_bytes = sum(tensor.nbytes for tensor in policy.state().tensors.values())
    medians, busy = (
        {name: statistics.median(pair[part] for pair in pairs) for name, pairs in found.items()}
        for part in (0, 1)
    )
    cells = [
        [
            words,
            f"{medians[name]:.2f} s",
            f"{busy[name]:.2f} s",
            ", ".join(f"{wall:.2f}" for wall, _ in found[name]),
        ]
        for name, words in ROWS.items()
    ]
    title = f"{num_bytes / 12e6:.0f} million parameters, {num_bytes / 1e9:.2f} GB"
    print_table(title, ["", "median", "processor", "rounds"], cells, machine())
    print_result(
        {
            "in_step_s": medians["in step"],
            "copy_s": medians["copy"],
            "first_copy_s": medians["first copy"],
            "write_beside_s": medians["write"],
            "copy_over_in_step": medians["copy"] / medians["in step"],
            "copy_over_in_step_busy": busy["copy"] / busy["in step"],
            "step_slowed_by": medians["step beside"] / medians["step"],
            "bytes": num_bytes,
        }
    )


if __name__ == "__main__":
    main()
