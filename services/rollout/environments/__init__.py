"""Environments, and the sessions that are played with them.

Heavy modules and users' code are not imported here, but when the player starts.
"""

from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from tidemill.common.config.environment import AGENT, OPENENV, SINGLE_TURN, TOOLS, EnvironmentConfig
from tidemill.common.config.run import RunConfig
from tidemill.services.rollout.sessions import template_chat
from tidemill.services.rollout.sessions.player import Decode, OpenChat, Player, Read

if TYPE_CHECKING:
    from tidemill.services.rollout.environments.environment import Design, Stage

PLAYER = f"{__name__}.player:EnvironmentPlayer"
OBJECT = (PLAYER, f"{__name__}.objects:object_design")
"""For any other `use`: a user's class or factory."""
ENVIRONMENTS = {
    SINGLE_TURN: ("tidemill.services.rollout.sessions.player:SingleTurn", ""),
    TOOLS: (PLAYER, f"{__name__}.objects:tools_design"),
    OPENENV: (PLAYER, f"{__name__}.openenv:OpenEnvStage"),
    AGENT: (f"{__name__}.agent:AgentPlayer", ""),
}
"""`rollout.environment.use` -> class of the player, and loader of its `Design` or `Stage`."""


def build_player(
    config: RunConfig,
    decode: Decode,
    read: Read | None = None,
    open_chat: OpenChat | None = None,
    run_dir: Path | None = None,
) -> Player:
    """The player of one worker; its `start` loads the environment. `decode` and `read` are the engine's;
    `open_chat` is for another chat format than the model's. In `run_dir` are the pictures of a run that has
    some.

    Raises:
        ConfigError: the model's processor of pictures cannot be loaded, or their store not be opened.
    """
    player, _ = _row(config.rollout.environment)
    open_format = open_chat or partial(template_chat.open_chat, config)
    pictures = None
    if config.images is not None and run_dir is not None and not config.rollout.environment.is_single_turn:
        from tidemill.services.rollout.sessions.pictures import SessionPictures

        pictures = SessionPictures.of_run(config, run_dir)
    built: Player = resolve_name(player)(config, decode, open_format, read, pictures)
    return built


def load(config: EnvironmentConfig) -> "Design | Stage":
    """The design or stage that makes the environments.

    Raises:
        ConfigError: it does not exist, cannot be imported, or is no environment.
    """
    _, loader = _row(config)
    loaded: Design | Stage = resolve_name(loader)(config)
    return loaded


def _row(config: EnvironmentConfig) -> tuple[str, str]:
    return ENVIRONMENTS.get(OPENENV if config.use.startswith(OPENENV) else config.use, OBJECT)
