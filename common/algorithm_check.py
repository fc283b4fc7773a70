"""Checks a user's own advantage and loss before anything is started, without importing them into this
process."""

import subprocess

from common.config.algorithm import AlgorithmConfig, is_users_own
from common.errors import ConfigError
from common.own_modules import run_own

CHECK_MODULE = "services.trainer.check"
CHECK_TIMEOUT_S = 180.0
"""Importing torch on a busy machine takes its time."""


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Have a process of the trainer load and try what is the user's own, as the trainer will.

    Raises:
        ConfigError: it cannot be imported, or does not fit what it will be given.
    """
    if not (is_users_own(algorithm.advantage) or is_users_own(algorithm.loss)):
        return
    command = run_own(CHECK_MODULE, algorithm.model_dump_json())
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"trainer.algorithm: importing advantage {algorithm.advantage} or loss {algorithm.loss} took "
            f"longer than {CHECK_TIMEOUT_S:g} s"
        ) from None
    if result.returncode == 0:
        return
    # The reason is the last line: the module may have written lines of its own.
    reason = (result.stderr.strip().splitlines() or [""])[-1]
    if result.returncode != ConfigError.exit_code:
        reason = f"trainer.algorithm: the import of a user's own ended Python: {reason or 'no reason given'}"
    raise ConfigError(reason)
