"""The engines, and the factory that builds one from a run's config.

Nothing heavy is imported here: torch, transformers and vllm load when an engine starts, so that a
simulated run needs none of them.
"""

from common.config.run import RunConfig
from services.rollout.engine import Engine


def build_engine(config: RunConfig, worker: str = "") -> Engine:
    """Build the engine that `rollout.engine` names; `start` loads the model.

    `worker` is the name of this rollout worker. Where an engine's randomness is its own, workers with
    different names sample differently.
    """
    if config.rollout.engine == "simulated":
        from services.rollout.engines.simulated import SimulatedEngine

        return SimulatedEngine(config)
    if config.rollout.engine == "transformers":
        from services.rollout.engines.transformers import TransformersEngine

        return TransformersEngine(config)
    from services.rollout.engines.vllm import VllmEngine

    return VllmEngine(config, worker)
