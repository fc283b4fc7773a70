"""The device that torch computes on, a clock that waits for it, and samples of random tokens."""

import gc
import time

import numpy as np
import torch

from tidemill.services.trainer.groups.samples import Sample


def is_gpu() -> bool:
    """Whether torch sees one."""
    return torch.cuda.is_available()


def free() -> None:
    """Give back what nobody refers to any more: models are parts of cycles."""
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
    """A prompt and a completion that is trained in full, as of a uniform policy."""
    return Sample(
        key=key,
        prompt_ids=rng.integers(3, vocab_size, num_prompt).astype(np.int32),
        completion_ids=rng.integers(3, vocab_size, num_completion).astype(np.int32),
        rollout_logprobs=np.full(num_completion, -np.log(vocab_size), dtype=np.float32),
        mask=np.ones(num_completion, dtype=np.bool_),
        advantage=float(rng.normal()),
        reward=0.0,
    )
