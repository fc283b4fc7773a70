"""What answers the model: environments, and the sessions that are played with them.

Nothing heavy is imported here, and no code of a user's: both wait until the player starts.
"""

from collections.abc import Callable, Sequence

from common.config.environment import AGENT
from common.config.run import RunConfig
from common.errors import ConfigError
from services.rollout.environments.single_turn import SingleTurn
from services.rollout.sessions.player import Player


def build_player(config: RunConfig, decode: Callable[[Sequence[int]], str]) -> Player:
    """What plays the samples of one worker; `start` loads the environment. `decode` is the engine's.

    Raises:
        ConfigError: there is no such player.
    """
    section = config.rollout.environment
    if section.is_single_turn:
        return SingleTurn(decode)
    if section.use == AGENT:
        raise ConfigError("rollout.environment.use: agent is not there yet")
    from services.rollout.environments.budget import Budget
    from services.rollout.environments.player import EnvironmentPlayer
    from services.rollout.environments.stages import build_stage
    from services.rollout.sessions.template_chat import open_chat

    return EnvironmentPlayer(
        lambda: build_stage(section), lambda: open_chat(config), decode, Budget.of(config), config.data
    )
