"""The device that torch computes on: a clock that waits for it, its memory, and samples of random tokens."""

import ctypes
import gc
import re
import time
from pathlib import Path

import numpy as np
import psutil
import torch

from tests.support.samples import sample_of
from tidemill.services.trainer.groups.sample import Sample


def is_gpu() -> bool:
    """Whether torch sees one."""
    return torch.cuda.is_available()


def free() -> None:
    """Free what is no longer referenced: models are parts of reference cycles."""
    gc.collect()
    if is_gpu():
        torch.cuda.empty_cache()


def now_s() -> float:
    """Seconds on a clock that never goes back, once the GPU has done what it was given."""
    if is_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


class Peak:
    """Peak memory above what was held when this was made, in bytes: of the GPU where there is one."""

    def __init__(self) -> None:
        if is_gpu():
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
            return
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not hide what is taken now
        Path("/proc/self/clear_refs").write_text("5")  # this process's peak is what it holds now
        self.base = psutil.Process().memory_info().rss

    def above_base(self) -> int:
        if is_gpu():
            return torch.cuda.max_memory_allocated() - self.base
        (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        return (int(peak) << 10) - self.base


def random_sample(
    rng: np.random.Generator, key: tuple[int, int], vocab_size: int, num_prompt: int, num_completion: int
) -> Sample:
    """A prompt and a completion of random tokens, as of a uniform policy."""
    prompt = rng.integers(3, vocab_size, num_prompt)
    completion = rng.integers(3, vocab_size, num_completion)
    logprobs = np.full(num_completion, -np.log(vocab_size))
    return sample_of(key, prompt, completion, logprobs, advantage=float(rng.normal()))
