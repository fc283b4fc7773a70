"""What answers the model: environments, and the sessions that are played with them.

Nothing heavy is imported here, and no code of a user's: both wait until the player starts.
"""

from collections.abc import Callable, Sequence

from tidemill.common.config.environment import AGENT
from tidemill.common.config.run import RunConfig
from tidemill.services.rollout.environments.single_turn import SingleTurn
from tidemill.services.rollout.sessions.player import Player


def build_player(config: RunConfig, decode: Callable[[Sequence[int]], str]) -> Player:
    """What plays the samples of one worker; `start` loads the environment. `decode` is the engine's."""
    section = config.rollout.environment
    if section.is_single_turn:
        return SingleTurn(decode)
    from tidemill.services.rollout.sessions.template_chat import open_chat

    if section.use == AGENT:
        from tidemill.services.rollout.environments.agent import AgentPlayer

        return AgentPlayer(config, lambda: open_chat(config), decode)
    from tidemill.services.rollout.environments.budget import Budget
    from tidemill.services.rollout.environments.player import EnvironmentPlayer
    from tidemill.services.rollout.environments.stages import build_stage

    return EnvironmentPlayer(
        lambda: build_stage(section), lambda: open_chat(config), decode, Budget.of(config), config.data
    )
