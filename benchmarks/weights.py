"""What a version costs beside a full one: bytes, the policy's thread, writing, applying, and memory.

    python -m benchmarks.weights --parameters 1e9

Tensors of `--parameters` values in all (10^9 need 7 GB of memory), float32 as masters, of which a given
share is changed. Encoded and written by the trainer's own store; applied to a copy of the base as a worker
does that holds it, with the bytes staged first. `pause` is the overwriting alone.

Memory is the most that the process has held while a version was encoded and written, above what it held
before: masters, shadow and gradients are below that. Comparing is processor time, which other work on the
machine does not lengthen. The last line holds the figures at 1 % changed.
"""

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
from typing import Annotated, Any

import psutil
import torch
import typer

from benchmarks.report import machine, print_result, print_table
from tidemill.common.run.weight_files import verified_files
from tidemill.common.weights.bits import Bits, read_safetensors
from tidemill.common.weights.delta import read_delta
from tidemill.common.weights.digest import DigestSum
from tidemill.common.wire.messages import WeightFile, WeightManifest
from tidemill.services.trainer.weights.peers import Alone
from tidemill.services.trainer.weights.shard_writer import ShardWriter
from tidemill.services.trainer.weights.store import WeightState, WeightStore

WIDTH = 4096
POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of one version."""

    share: float
    kind: str
    num_bytes: int
    full_bytes: int
    compare_s: float
    write_s: float
    apply_s: float
    pause_s: float
    host_bytes: int


class MadeUpModel:
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
        """Change about `share` of all values."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.tensors.values():
            for rows in tensor.split(512):
                rows[torch.rand(rows.shape, generator=generator) < share] *= 1.02

    def compare_weights(self) -> WeightState:
        """Like a policy."""
        found = self.writer.compare(self.tensors)
        before = str(found.before) if found.before else ""
        return WeightState(str(found.digest), str(found.digest), before, found.share_changed, found.num_bytes)

    def begin_writing(self, folder: Path, version: int, parent: int) -> Future[tuple[WeightFile, ...]]:
        """Like a policy."""
        return self.writer.begin(lambda: self.tensors, folder, version, parent)


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


def measure(parameters: int, shares: list[float], folder: Path) -> list[Measured]:
    """A full version, then one for each share, each a delta where the store finds that one pays."""
    source, store = MadeUpModel(parameters), WeightStore(folder)
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
    store: WeightStore, source: MadeUpModel, version: int, share: float, held: dict[str, Bits]
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
    """Seconds to check, stage and apply, and of them those in which generation pauses."""
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


def main(
    parameters: Annotated[float, typer.Option(help="of the made-up model")] = 2.5e8,
    shares: Annotated[str, typer.Option(help="shares of the values that change")] = "0.001,0.01,0.1,0.5",
) -> None:
    """Measure what versions of the weights cost."""
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(int(parameters), [float(share) for share in shares.split(",")], Path(folder))
    cells = [
        (
            f"{row.share:.1%}",
            row.kind,
            f"{row.num_bytes / 1e6:.0f} MB",
            f"{row.num_bytes / row.full_bytes:.2%}",
            *(f"{seconds:.2f} s" for seconds in (row.compare_s, row.write_s, row.apply_s)),
            f"{row.pause_s * 1e3:.0f} ms",
            f"{row.host_bytes / 1e6:.0f} MB",
        )
        for row in rows
    ]
    titles = ("changed", "kind", "bytes", "of full", "compare", "write", "apply", "pause", "memory above")
    print_table(f"{rows[0].full_bytes / 2:.2g} parameters", titles, cells, machine())
    at_1pct = min(rows[1:], key=lambda row: abs(row.share - 0.01))
    print_result(
        {
            "bytes_share_at_1pct": at_1pct.num_bytes / at_1pct.full_bytes,
            "pause_ms": at_1pct.pause_s * 1e3,
            "host_bytes_over_shard": at_1pct.host_bytes,
            "parameters": rows[0].full_bytes // 2,
        }
    )


if __name__ == "__main__":
    typer.run(main)
