"""Profiles of a policy's calls: operators and kernels of a step, a file for each rank. They change no bit of
what is computed."""

import os
from pathlib import Path

import structlog
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

log = structlog.get_logger(__name__)


class CallProfiler:
    """Profiles a policy's calls; where several ranks train, each has one."""

    def __init__(self) -> None:
        self._profiler: profile | None = None
        self._folder = Path()

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
        self._profiler = profiler
        self._folder = folder

    def _write(self) -> None:
        profiler = self._profiler
        self._profiler = None
        if profiler is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels that still run would be cut off
        profiler.stop()
        name = f"rank-{dist.get_rank() if dist.is_initialized() else 0}.json.gz"
        unfinished = self._folder / f".part-{name}"  # with the same suffix: by it torch compresses
        profiler.export_chrome_trace(str(unfinished))
        os.replace(unfinished, self._folder / name)
