"""The policy that a run's config asks for: a model on one rank or several, or delays."""

from pathlib import Path

import structlog

from tidemill.common.config import RunConfig
from tidemill.services.trainer.policy.fsdp.ranks import lead_ranks
from tidemill.services.trainer.policy.fsdp.sharded_policy import ShardedPolicy
from tidemill.services.trainer.policy.memory.fit import with_fitting_passes
from tidemill.services.trainer.policy.model_loading import pick_device
from tidemill.services.trainer.policy.policy import Policy

log = structlog.get_logger(__name__)


def open_policy(config: RunConfig, folder: Path | None = None) -> Policy:
    """The policy as it is at version 0; `folder` is the run's. A `ShardedPolicy` has to be closed; the others
    need nothing. Raises ConfigError: the model or the device cannot be used."""
    if config.trainer.policy == "simulated":
        from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy

        return SimulatedPolicy(config)
    if pick_device(config.trainer.device).type == "cuda" and config.model.dtype == "float32":
        log.warning("training and generating in float32 is slow on GPUs; model.dtype: bfloat16 is faster")
    config = with_fitting_passes(config, folder)
    ranks = lead_ranks(config.trainer)
    if ranks is not None:
        from tidemill.services.trainer.policy.fsdp.rank_policy import load_rank_policy

        ranks.broadcast(config.model_dump_json().encode())
        return ShardedPolicy(load_rank_policy(config, ranks), ranks)
    from tidemill.services.trainer.policy.transformers_policy import load_policy

    return load_policy(config)
