"""Checks a run's reward before anything is started, without importing a user's code into this process."""

import subprocess
import sys

from common.config import RewardConfig
from common.errors import ConfigError

CHECK_MODULE = "services.reward.check"
CHECK_TIMEOUT_S = 120.0


def check_reward(config: RewardConfig) -> None:
    """Have a process of the reward service load every reward, as its workers will.

    Raises:
        ConfigError: it cannot be imported, or does not take what it will be given.
    """
    command = [sys.executable, "-m", CHECK_MODULE, config.model_dump_json()]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"reward {_named(config)}: importing it took longer than {CHECK_TIMEOUT_S:g} s"
        ) from None
    if result.returncode == 0:
        return
    # The reason is the last line: the module may have written lines of its own.
    reason = (result.stderr.strip().splitlines() or [""])[-1]
    if result.returncode != ConfigError.exit_code:
        reason = f"reward {_named(config)}: its import ended Python: {reason or 'no reason given'}"
    raise ConfigError(reason)


def _named(config: RewardConfig) -> str:
    return ", ".join(reward.function or name for name, reward in config.named.items())
