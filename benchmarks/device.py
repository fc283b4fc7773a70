"""The device that torch computes on, a clock that waits for it, and samples of random tokens."""

import gc
import time

import numpy as np
import torch

from tests.support.training import sample_of
from tidemill.services.trainer.groups.samples import Sample


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


def random_sample(
    rng: np.random.Generator, key: tuple[int, int], vocab_size: int, num_prompt: int, num_completion: int
) -> Sample:
    """A prompt and a completion of random tokens, as of a uniform policy."""
    prompt, completion = (rng.integers(3, vocab_size, count) for count in (num_prompt, num_completion))
    logprobs = np.full(num_completion, -np.log(vocab_size))
    return sample_of(key, prompt, completion, logprobs, advantage=float(rng.normal()))
