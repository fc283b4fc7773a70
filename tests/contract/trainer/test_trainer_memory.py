"""A run of hours does not grow: what a trainer holds after a thousand steps is what it held before."""

import ctypes
import gc

import psutil
import pytest

from tests.conftest import SERVERS
from tests.support.whole_trainer import GROUPS
from tidemill.services.trainer.service import serve
from tidemill.services.trainer.trainer import Trainer

WARM_UP = 500
STEPS = 1000
"""Until then the pools of threads fill, and each allocator's arena reaches its size: jumps of 4 MB, the last
one near step 450."""
MOST_OBJECTS_PER_STEP = 0.5
"""One forgotten list, dict, message or task a step would be 1 or more."""
MOST_BYTES = 6 << 20
"""Of the whole process; 500 steps see 2,000 trajectories and write 500 versions."""


@pytest.mark.timeout(1800)  # a thousand steps, on a busy machine
@pytest.mark.parametrize("redis_server", sorted(SERVERS)[:1], indirect=True)
async def test_memory_is_flat_over_a_thousand_steps(make, broker, keys, answers, monkeypatch):
    step = Trainer._step
    seen = {}

    async def measured(trainer, number):
        if number in (WARM_UP, STEPS - 1):
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what is free is no growth, wherever the allocator keeps it
            gc.freeze()  # counts without a reference to each: another thread may be building a tuple
            seen[number] = (gc.get_freeze_count(), psutil.Process().memory_info().rss)
            gc.unfreeze()
        await step(trainer, number)

    monkeypatch.setattr(Trainer, "_step", measured)
    context = make(STEPS, trims=True, checkpoint_every=50, mini_batches=GROUPS)
    await serve(context)
    (objects, rss) = seen[WARM_UP]
    (objects_later, rss_later) = seen[STEPS - 1]
    num_steps = STEPS - 1 - WARM_UP
    assert (objects_later - objects) / num_steps < MOST_OBJECTS_PER_STEP
    assert rss_later - rss < MOST_BYTES
    most_versions = context.config.trainer.keep_weights + context.config.weights.base_every
    assert len(list((context.run_dir / "weights").iterdir())) <= most_versions
