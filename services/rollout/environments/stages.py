"""Where a run's environments are set up: on the worker's loop, or in processes."""

from tidemill.common.config.environment import OPENENV, EnvironmentConfig
from tidemill.services.rollout.environments.environment import Stage
from tidemill.services.rollout.environments.loading import load_design
from tidemill.services.rollout.environments.local import LocalStage
from tidemill.services.rollout.environments.openenv import OpenEnvStage
from tidemill.services.rollout.environments.processes import ProcessStage


def build_stage(config: EnvironmentConfig) -> Stage:
    """Load the environment, and choose where it runs: blocking ones never block the worker's loop.

    Raises:
        ConfigError: it cannot be loaded, or a tool cannot be described.
    """
    if config.use.startswith(OPENENV):
        return OpenEnvStage(config.use, config.options, config.call_timeout_s, config.session_timeout_s)
    design = load_design(config)
    design.kinds()
    if design.is_async:
        return LocalStage(design, config.call_timeout_s)
    return ProcessStage(design, config)
