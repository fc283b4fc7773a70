"""What a version costs beside a full one: bytes, the policy's thread, writing, applying, and memory.

    python -m benchmarks.weights --parameters 1e9

Square tensors of `--parameters` values in all (10^9 need 12 GB of memory), float32 as masters, of which a
share is changed. The trainer's own store encodes and writes a version; what a rollout worker does with its
bytes is done to tensors in bfloat16. `compare` is what the policy's thread pays, in processor time, which
other work on the machine does not lengthen. `pause` is the time in which generation stands still.

Memory is the most that the process has held while a version was encoded and written, above what it held
before: masters, shadow and gradients are below that. The last line holds the figures at 1 % changed.
"""

import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import typer

from benchmarks.device import Peak
from benchmarks.report import machine, print_result, print_table
from tidemill.common.run.weight_files import verified_files
from tidemill.common.weights.bits import read_safetensors
from tidemill.common.wire.messages import WeightFile, WeightManifest
from tidemill.services.rollout.engines.held_weights import (
    HeldWeights,
    HostMemory,
    StagedVersion,
    apply,
    as_tensor,
    trace,
)
from tidemill.services.trainer.weights.peers import Alone
from tidemill.services.trainer.weights.shard_writer import ShardWriter
from tidemill.services.trainer.weights.store import WeightState, WeightStore

WIDTH = 4096
SHARES = (1.0, 0.001, 0.01, 0.1, 0.5)


class MadeUpModel:
    """A model of square tensors, which a store can write: its methods are those of a policy."""

    def __init__(self, parameters: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tensors = {
            f"layer.{i}.weight": torch.randn(WIDTH, WIDTH, generator=generator).mul_(0.02)
            for i in range(max(1, parameters // WIDTH**2))
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
        comparison = self.writer.compare(self.tensors)
        before = str(comparison.before) if comparison.before else ""
        return WeightState(
            str(comparison.digest),
            str(comparison.digest),
            before,
            comparison.share_changed,
            comparison.num_bytes,
        )

    def begin_writing(self, folder: Path, version: int, parent: int) -> Future[tuple[WeightFile, ...]]:
        return self.writer.begin(lambda: self.tensors, folder, version, parent)


def hold(files: list[Path]) -> HeldWeights:
    """A rollout worker's parameters, with the values of a version."""
    weights = {
        info.name: as_tensor(info, bits.copy()) for path in files for info, bits in read_safetensors(path)
    }
    infos = [info for path in files for info, _ in read_safetensors(path)]
    return trace(lambda tensors: [weights[name].copy_(tensor) for name, tensor in tensors], infos)[0]


def take(run: Path, manifest: WeightManifest, held: HeldWeights) -> tuple[float, float]:
    """Seconds to check, stage and write a version, and of them those of the pause."""
    started = time.perf_counter()
    files = verified_files(run, manifest)
    if manifest.is_delta:
        changes = held.stage([files])[1]
        paused = time.perf_counter()
        assert apply(changes) == 0
    else:
        tensors = (
            (info.name, as_tensor(info, bits)) for path in files for info, bits in read_safetensors(path)
        )
        version = StagedVersion(held, tensors, HostMemory())
        paused = time.perf_counter()
        assert version.write()
    return time.perf_counter() - started, time.perf_counter() - paused


def main(parameters: float = 2.5e8) -> None:
    """A full version, then one for each share, each a delta where the store finds that one pays."""
    rows = []
    result = dict[str, float]()
    held = HeldWeights(())
    with tempfile.TemporaryDirectory() as folder:
        model = MadeUpModel(int(parameters))
        store = WeightStore(Path(folder))
        store.max_chain_share = 10.0
        for version, share in enumerate(SHARES):
            if version:
                model.change(share, version)
            peak = Peak()
            started = time.process_time()
            state = model.compare_weights()
            compare_s = time.process_time() - started
            compared = time.perf_counter()
            manifest = store.finish(store.begin(version, model, state))
            write_s = time.perf_counter() - compared
            host_bytes = peak.above_base()
            if version == 0:
                held = hold(verified_files(store.run_dir, manifest))
            apply_s, pause_s = take(store.run_dir, manifest, held)
            of_full = manifest.num_bytes / state.num_bytes
            times = (f"{seconds:.2f} s" for seconds in (compare_s, write_s, apply_s))
            cells = f"{manifest.num_bytes / 1e6:.0f} MB", f"{of_full:.2%}", *times, f"{pause_s * 1e3:.0f} ms"
            kind = "delta" if manifest.is_delta else "full"
            rows.append((f"{share:.1%}", kind, *cells, f"{host_bytes / 1e6:.0f} MB"))
            if share == 0.01:
                figures = of_full, pause_s * 1e3, host_bytes, state.num_bytes // 2
                names = "bytes_share_at_1pct", "pause_ms", "host_bytes_over_shard", "parameters"
                result = dict(zip(names, figures, strict=True))
    columns = "changed,kind,bytes,of full,compare,write,apply,pause,memory above"
    print_table(f"{result['parameters']:.2g} parameters", columns, rows, machine())
    print_result(result)


if __name__ == "__main__":
    typer.run(main)
