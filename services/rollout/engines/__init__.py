"""The engines, and the factory that builds one from a run's config.

Nothing heavy is imported here: torch, transformers and vllm load when an engine starts, so that a
simulated run needs none of them.
"""

from importlib import import_module

from tidemill.common.config.run import RunConfig
from tidemill.services.rollout.engines.engine import Engine


def build_engine(config: RunConfig, worker: str = "") -> Engine:
    """Build the engine that `rollout.engine` names in `ENGINES`; `start` loads the model.

    `worker` is the name of this rollout worker. Engines with random numbers of their own sample differently
    in workers with different names.
    """
    module, _, name = config.rollout.engine_traits.class_name.partition(":")
    engine: Engine = getattr(import_module(f"{__name__}.{module}"), name)(config, worker)
    turn_s = config.shared_turn_s
    if turn_s is not None:
        from tidemill.services.rollout.engines.gpu_sharing import GpuSharingEngine

        return GpuSharingEngine(engine, turn_s, config.rollout.stall_s)
    return engine
