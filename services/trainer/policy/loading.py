"""The policy that a run's config asks for: a model on one rank or several, or delays."""

import os
from collections.abc import Callable
from pathlib import Path

import structlog

from tidemill.common.config import RunConfig
from tidemill.services.trainer.policy.model_loading import pick_device
from tidemill.services.trainer.policy.policy import Policy
from tidemill.services.trainer.weights.peers import pack

log = structlog.get_logger(__name__)


def open_policy(config: RunConfig, folder: Path | None = None, run_dir: Path | None = None) -> Policy:
    """The policy as it is at version 0; `folder` is the run's, where sizes of passes are chosen and kept, and
    so is `run_dir`, where pictures are, if it is not the same. A `ShardedPolicy` has to be closed; the others
    need nothing. Raises ConfigError: the model or the device cannot be used."""
    if config.trainer.policy == "simulated":
        from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy

        return SimulatedPolicy(config)
    if pick_device(config.trainer.device).type == "cuda":
        from tidemill.services.trainer.policy.memory.fit import with_fitting_passes

        if config.model.dtype == "float32":
            log.warning("training and generating in float32 is slow on GPUs; model.dtype: bfloat16 is faster")
        config = with_fitting_passes(config, folder)
    is_one_of_several = int(os.environ.get("WORLD_SIZE", "0")) > 1
    if config.trainer.num_ranks > 1 or is_one_of_several:
        return _open_sharded_policy(config, run_dir or folder)
    from tidemill.services.trainer.policy.transformers_policy import load_policy

    return load_policy(config, run_dir or folder)


def _open_sharded_policy(config: RunConfig, run_dir: Path | None) -> Policy:
    """Raises ConfigError: torchrun started another number of ranks than the config has."""
    from tidemill.services.trainer.policy.fsdp.ranks import lead_ranks
    from tidemill.services.trainer.policy.fsdp.sharded_policy import ShardedPolicy

    ranks = lead_ranks(config.trainer)
    assert ranks is not None, "there are several"
    # The other ranks have been started: they import this while this one does.
    from tidemill.services.trainer.policy.fsdp.rank_policy import load_rank_policy

    ranks.broadcast(pack((config.model_dump_json(), run_dir)))
    return ShardedPolicy(load_rank_policy(config, ranks, run_dir), ranks)


def closer_of(policy: Policy) -> Callable[[], None] | None:
    """What ends a policy over several ranks; None for the others, which need nothing."""
    close: Callable[[], None] | None = getattr(policy, "close", None)
    return close
