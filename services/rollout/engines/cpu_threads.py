"""How many CPU threads an engine takes, and how they wait: it never has the machine to itself.

Trainer, reward functions and other rollout workers run beside it. OpenMP's threads spin while they wait
for each other, and on cores that are shared this is ten to a hundred times slower than sleeping.
"""

import os

from common.config.rollout import RolloutConfig


def share_cores(rollout: RolloutConfig) -> int:
    """Set what OpenMP reads when it is loaded, so call this before torch is imported.

    Returns the number of threads: as configured, or an even share of the cores for each of this
    machine's workers, less one core for everything else. The user's own environment wins over the share.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if rollout.num_threads:
        os.environ["OMP_NUM_THREADS"] = str(rollout.num_threads)
    else:
        share = max(1, (len(os.sched_getaffinity(0)) - 1) // rollout.workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(share))
    return int(os.environ["OMP_NUM_THREADS"].split(",")[0])
