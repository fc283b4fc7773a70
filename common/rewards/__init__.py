"""Checks a run's reward before anything is started, without importing a user's code into this process."""

import json
import subprocess

from common.config import RewardConfig
from common.dataset import Row
from common.errors import ConfigError
from common.own_modules import run_own

CHECK_MODULE = "services.reward.check"
CHECK_TIMEOUT_S = 120.0
CALLED = "tidemill-called: "
"""Begins the lines of the check's output that tell of a call; a user's module may print others."""


def check_reward(config: RewardConfig, row: Row | None = None) -> list[str]:
    """Have a process of the reward service load every reward, as its workers will.

    With a row, every reward that is a function is called once, with that row and an empty completion; returns
    what came of it, a line each.

    Raises:
        ConfigError: it cannot be imported, or does not take what it will be given.
    """
    command = run_own(CHECK_MODULE, config.model_dump_json())
    if row is not None:
        command.append(
            json.dumps({"data_source": row.data_source, "ground_truth": row.ground_truth, "extra": row.extra})
        )
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"reward {_named(config)}: importing or calling it took longer than {CHECK_TIMEOUT_S:g} s"
        ) from None
    if result.returncode == 0:
        return [line.removeprefix(CALLED) for line in result.stdout.splitlines() if line.startswith(CALLED)]
    # The reason is the last line: the module may have written lines of its own.
    reason = (result.stderr.strip().splitlines() or [""])[-1]
    if result.returncode != ConfigError.exit_code:
        reason = f"reward {_named(config)}: its import ended Python: {reason or 'no reason given'}"
    raise ConfigError(reason)


def _named(config: RewardConfig) -> str:
    return ", ".join(reward.function or name for name, reward in config.named.items())
