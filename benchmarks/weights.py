"""What a version costs beside a full one: bytes, the policy's thread, writing, applying, and memory.

    python -m benchmarks.weights --parameters 1e9

* synthetic: tensors of `--parameters` values in all (10^9 need 7 GB of memory), float32 as masters, of which
  a given share is changed. Encoded and written by the trainer's own store; applied to a copy of the base as a
  worker does that holds it, with the bytes staged first. `pause` is the overwriting alone.
* real: steps of GRPO in bfloat16 with a small Llama at `--lr`, with random samples: how much a step changes,
  and what its policy's thread pays for it.

Memory is the most that the process has held while a version was encoded and written, above what it held
before: masters, shadow and gradients are below that. Comparing, and its share of a step, are processor time,
which other work on the machine does not lengthen. The last line holds the figures at 1 % changed.
"""

import argparse
import ctypes
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from benchmarks.report import machine, print_result, print_table
from benchmarks.trainer_sides import CASES, CPU_SHAPE, GROUP_SIZE, Shape, make_batch, make_model
from tidemill.common.config.trainer import TrainerConfig
from tidemill.common.run.weight_files import verified_files
from tidemill.common.weights.bits import Bits, read_safetensors
from tidemill.common.weights.delta import read_delta
from tidemill.common.weights.digest import DigestSum
from tidemill.common.wire.messages import WeightFile, WeightManifest
from tidemill.services.trainer.groups.samples import form_micro_batches
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy
from tidemill.services.trainer.weights.peers import Alone
from tidemill.services.trainer.weights.shard_writer import ShardWriter
from tidemill.services.trainer.weights.store import WeightState, WeightStore

WIDTH = 4096
POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Measured:
    """One version."""

    share: float
    kind: str
    num_bytes: int
    full_bytes: int
    compare_s: float
    write_s: float
    apply_s: float
    pause_s: float
    host_bytes: int


class Synthetic:
    """A model of square tensors, which a store can write."""

    def __init__(self, parameters: int) -> None:
        generator = torch.Generator().manual_seed(0)
        count = max(1, parameters // (WIDTH * WIDTH))
        self.tensors = {
            f"layer.{i}.weight": torch.randn(WIDTH, WIDTH, generator=generator).mul_(0.02)
            for i in range(count)
        }
        model: Any = SimpleNamespace(_weight_conversions=[], config=None)
        self.writer = ShardWriter(model, self.tensors, torch.bfloat16, Alone(), max_share=0.3)

    def change(self, share: float, seed: int) -> None:
        """Give about `share` of all values others."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors.values():
            for rows in tensor.split(512):
                rows[torch.rand(rows.shape, generator=generator) < share] *= 1.02

    def compare_weights(self) -> WeightState:
        """As a policy does."""
        found = self.writer.compare(self.tensors)
        before = str(found.before) if found.before else ""
        return WeightState(str(found.digest), str(found.digest), before, found.share_changed, found.num_bytes)

    def begin_writing(self, folder: Path, version: int, parent: int) -> Future[tuple[WeightFile, ...]]:
        """As a policy does."""
        return self.writer.begin(folder, version, parent)


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """The list gets the most bytes that this process held within the block, above those before it."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is taken now
    process, peak, is_over = psutil.Process(), [0], threading.Event()
    start = process.memory_info().rss

    def watch() -> None:
        while not is_over.wait(POLL_S):
            peak[0] = max(peak[0], process.memory_info().rss - start)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def synthetic(parameters: int, shares: list[float], folder: Path) -> list[Measured]:
    """A full version, then one for each share, each a delta where the store finds that one pays."""
    source, store = Synthetic(parameters), WeightStore(folder)
    store.max_chain_share = 10.0
    rows = [_written(store, source, 0, 1.0, {})]
    held: dict[str, Bits] = {
        info.name: bits.copy()
        for info, bits in read_safetensors(folder / "weights/v00000000/model.safetensors")
    }
    for version, share in enumerate(shares, 1):
        source.change(share, version)
        rows.append(_written(store, source, version, share, held))
    return rows


def _written(
    store: WeightStore, source: Synthetic, version: int, share: float, held: dict[str, Bits]
) -> Measured:
    with peak_memory() as peak:
        start = time.process_time()
        state = source.compare_weights()
        compare_s = time.process_time() - start
        compared = time.perf_counter()
        manifest = store.finish(store.begin(version, source, state))
        written = time.perf_counter()
    apply_s, pause_s = _applied(store.run_dir, manifest, held) if held else (0.0, 0.0)
    kind = "delta" if manifest.is_delta else "full"
    times = compare_s, written - compared, apply_s, pause_s
    return Measured(share, kind, manifest.num_bytes, state.num_bytes, *times, peak[0])


def _applied(run: Path, manifest: WeightManifest, held: dict[str, Bits]) -> tuple[float, float]:
    """Seconds to check, stage and apply, and of them those in which generation stands still."""
    start = time.perf_counter()
    paths = verified_files(run, manifest)
    if not manifest.is_delta:
        for path in paths:
            paused = time.perf_counter()
            for info, bits in read_safetensors(path):
                held[info.name][:] = bits
        return time.perf_counter() - start, time.perf_counter() - paused
    patches = [record.patch() for record in read_delta(paths[0])]
    paused = time.perf_counter()
    old = [held[patch.info.name][patch.all_positions()] for patch in patches]
    for patch in patches:
        patch.apply(held[patch.info.name])
    pause_s = time.perf_counter() - paused
    digest = DigestSum()
    for patch, values in zip(patches, old, strict=True):
        digest.add_change(patch.info, patch.all_positions(), values, patch.values)
    digest.read()
    return time.perf_counter() - start, pause_s


@dataclass(frozen=True, slots=True)
class RealStep:
    """One step of GRPO."""

    share_changed: float
    bytes_share: float
    thread_share: float


def real(steps: int, lr: float, shape: Shape, folder: Path) -> list[RealStep]:
    """Steps of a policy in bfloat16, each written as a version."""
    config = TrainerConfig.model_validate({"optimizer": {"lr": lr}, "steps": steps})
    policy = TransformersPolicy(
        make_model(shape, 1024), config, dtype=torch.bfloat16, temperature=1.0, max_completion_tokens=64
    )
    store, found = WeightStore(folder), []
    store.max_chain_share = 10.0
    store.write(0, policy)
    for step in range(steps):
        start = time.process_time()
        samples = make_batch(CASES["short"], shape.vocabulary, seed=step)[: 4 * GROUP_SIZE]
        batches = form_micro_batches(samples, 2048)
        sums = [policy.accumulate(batch) for batch in batches]
        policy.update(sum(part.denominator for part in sums))
        trained = time.process_time()
        state = policy.compare_weights()
        compared_s = time.process_time() - trained
        manifest = store.finish(store.begin(step + 1, policy, state))
        step_s = trained - start + compared_s
        found.append(RealStep(state.share_changed, manifest.num_bytes / state.num_bytes, compared_s / step_s))
    return found


def main() -> None:
    """Measure, print two tables, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description="What a version of the weights costs.")
    parser.add_argument("--parameters", type=float, default=2.5e8, help="of the synthetic model")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.001, 0.01, 0.1, 0.5])
    parser.add_argument("--steps", type=int, default=3, help="of GRPO")
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--hidden", type=int, default=CPU_SHAPE.hidden, help="width of the trained model")
    parser.add_argument("--folder", type=Path, help="where versions are written; default: a temporary one")
    options = parser.parse_args()
    shape = Shape(options.hidden, 4, 6, 4 * options.hidden, CPU_SHAPE.vocabulary)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = synthetic(int(options.parameters), options.shares, Path(folder) / "synthetic")
        steps = real(options.steps, options.lr, shape, Path(folder) / "real")
    _report(rows, steps, options)


def _report(rows: list[Measured], steps: list[RealStep], options: argparse.Namespace) -> None:
    cells = [
        [
            f"{row.share:.1%}",
            row.kind,
            f"{row.num_bytes / 1e6:.0f} MB",
            f"{row.num_bytes / row.full_bytes:.2%}",
            *(f"{seconds:.2f} s" for seconds in (row.compare_s, row.write_s, row.apply_s)),
            f"{row.pause_s * 1e3:.0f} ms",
            f"{row.host_bytes / 1e6:.0f} MB",
        ]
        for row in rows
    ]
    titles = ["changed", "kind", "bytes", "of full", "compare", "write", "apply", "pause", "memory above"]
    print_table(f"{rows[0].full_bytes / 2:.2g} parameters", titles, cells, machine())
    real_cells = [
        [str(i), f"{s.share_changed:.2%}", f"{s.bytes_share:.2%}", f"{s.thread_share:.2%}"]
        for i, s in enumerate(steps, 1)
    ]
    columns = ["step", "changed", "of full", "of the step, in the policy's thread"]
    print_table(f"GRPO at lr {options.lr:g}, groups of {GROUP_SIZE}", columns, real_cells)
    at_1pct = min(rows[1:], key=lambda row: abs(row.share - 0.01))
    print_result(
        {
            "bytes_share_at_1pct": at_1pct.num_bytes / at_1pct.full_bytes,
            "bytes_share_real": sum(step.bytes_share for step in steps) / len(steps),
            "policy_thread_share": sum(step.thread_share for step in steps) / len(steps),
            "pause_ms": at_1pct.pause_s * 1e3,
            "host_bytes_over_shard": at_1pct.host_bytes,
            "parameters": rows[0].full_bytes // 2,
        }
    )


if __name__ == "__main__":
    main()
