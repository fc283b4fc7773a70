"""What answers the model: environments, and the sessions that are played with them.

Nothing heavy is imported here, and no code of a user's: both wait until the player starts.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from tidemill.common.config.environment import AGENT, OPENENV, SINGLE_TURN, TOOLS, EnvironmentConfig
from tidemill.common.config.run import RunConfig
from tidemill.services.rollout.sessions.player import Decode, Player
from tidemill.services.rollout.sessions.template_chat import open_chat

if TYPE_CHECKING:
    from tidemill.services.rollout.environments.environment import Design, Stage

PLAYER = f"{__name__}.player:EnvironmentPlayer"
OBJECT = (PLAYER, f"{__name__}.objects:object_design")
"""Any other `use`: a class or factory of a user's."""
ENVIRONMENTS = {
    SINGLE_TURN: ("tidemill.services.rollout.sessions.player:SingleTurn", ""),
    TOOLS: (PLAYER, f"{__name__}.objects:tools_design"),
    OPENENV: (PLAYER, f"{__name__}.openenv:OpenEnvStage"),
    AGENT: (f"{__name__}.agent:AgentPlayer", ""),
}
"""By `rollout.environment.use`: what plays the samples, and what it plays with, a `Design` or a `Stage`. Both
are imported when they are used."""


def build_player(config: RunConfig, decode: Decode) -> Player:
    """What plays the samples of one worker; `start` loads the environment. `decode` is the engine's."""
    player, _ = _row(config.rollout.environment)
    built: Player = resolve_name(player)(config, decode, lambda: open_chat(config))
    return built


def load(config: EnvironmentConfig) -> "Design | Stage":
    """What makes the environments.

    Raises:
        ConfigError: it does not exist, cannot be imported, or is no environment.
    """
    _, loader = _row(config)
    loaded: Design | Stage = resolve_name(loader)(config)
    return loaded


def _row(config: EnvironmentConfig) -> tuple[str, str]:
    return ENVIRONMENTS.get(OPENENV if config.use.startswith(OPENENV) else config.use, OBJECT)
