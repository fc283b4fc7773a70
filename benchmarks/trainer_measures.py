"""What both sides of the trainer benchmark are measured with, and the settings they share."""

import resource
import time

import psutil
import torch

LR = 1e-6
MAX_GRAD_NORM = 1.0


class Peak:
    """Peak memory above what was held when this was made, in bytes: of the GPU where there is one."""

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
        else:
            self.base = psutil.Process().memory_info().rss

    def above_base(self) -> int:
        """Bytes."""
        if torch.cuda.is_available():
            return torch.cuda.max_memory_allocated() - self.base
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - self.base


def now_s() -> float:
    """Seconds on a clock that never goes back, once the GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
