"""Profiles calls of a policy with torch.profiler. It only watches: what is computed has the same bits."""

import os
from pathlib import Path

import structlog
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

log = structlog.get_logger(__name__)


class Profiled:
    """The part of a policy that is profiled; where several ranks train, all make the call."""

    _profiler: profile | None = None

    def profile(self, folder: Path | None) -> None:
        """Profile the calls of this thread from here on; with None, write operators and kernels as
        `rank-<n>.json.gz` into the folder it was begun with. Where that fails, the run goes on."""
        try:
            self._begin(folder) if folder is not None else self._write()
        except (OSError, RuntimeError) as error:
            log.warning("a step is not profiled", reason=str(error))

    def _begin(self, folder: Path) -> None:
        kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
        profiler = profile(activities=kinds)
        profiler.start()
        self._profiler, self._folder = profiler, folder

    def _write(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels that still run would be cut off
        profiler.stop()
        name = f"rank-{dist.get_rank() if dist.is_initialized() else 0}.json.gz"
        part = self._folder / f".part-{name}"  # torch compresses by the suffix
        profiler.export_chrome_trace(str(part))
        os.replace(part, self._folder / name)
