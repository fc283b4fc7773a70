"""The engines, and the factory that builds one from a run's config.

Nothing heavy is imported here: torch, transformers and vllm load when an engine starts, so that a
simulated run needs none of them.
"""

from typing import TYPE_CHECKING

from tidemill.common.config.run import RunConfig
from tidemill.services.rollout.engines.engine import Engine

if TYPE_CHECKING:
    from tidemill.services.rollout.engines.gpu_sharing import SleepingEngine


def build_engine(config: RunConfig, worker: str = "") -> Engine:
    """Build the engine that `rollout.engine` names; `start` loads the model.

    `worker` is the name of this rollout worker. Where an engine's randomness is its own, workers with
    different names sample differently.
    """
    if (turn_s := config.shared_turn_s) is not None:
        from tidemill.services.rollout.engines.gpu_sharing import GpuSharingEngine

        return GpuSharingEngine(_engine(config, worker), turn_s, config.rollout.stall_s)
    return _engine(config, worker)


def _engine(config: RunConfig, worker: str) -> "SleepingEngine":
    if config.rollout.engine == "transformers":
        from tidemill.services.rollout.engines.transformers import TransformersEngine

        return TransformersEngine(config)
    if config.rollout.engine == "simulated":
        from tidemill.services.rollout.engines.simulated import SimulatedEngine

        return SimulatedEngine(config)
    from tidemill.services.rollout.engines.vllm import VllmEngine

    return VllmEngine(config, worker)
