"""Checks a user's own advantage and loss before anything is started, without importing them into this
process."""

import importlib.util
import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

from common.config import RewardConfig
from common.config.algorithm import AlgorithmConfig, is_users_own
from common.errors import ConfigError
from common.process.programs import Program, run_own
from common.run.dataset import Row

CHECK_TIMEOUT_S = 180.0
"""Importing torch on a busy machine takes its time."""


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Have a process of the trainer load and try what is the user's own, as the trainer will.

    Raises:
        ConfigError: it cannot be imported, or does not fit what it will be given.
    """
    if not (is_users_own(algorithm.advantage) or is_users_own(algorithm.loss)):
        return
    command = run_own(Program.TRAINER_CHECK, algorithm.model_dump_json())
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


def check_loggers(names: Sequence[str]) -> None:
    """Say which are missing and how to install them.

    Raises:
        ConfigError: at least one is not installed.
    """
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"trainer.loggers names {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not "
            f"installed here: pip install 'tidemill[{','.join(missing)}]', or leave it out."
        )


REWARD_CHECK_TIMEOUT_S = 120.0
CALLED, READS = "tidemill-called: ", "tidemill-reads: "
"""Begin the lines of the check's output that tell of a call, and of what is read; a user's module may print
others."""


@dataclass(frozen=True, slots=True)
class RewardFindings:
    """What the check saw."""

    called: list[str] = field(default_factory=list)
    """What came of calling the functions, a line each."""
    reads: dict[str, str] = field(default_factory=dict)
    """By the names of judges and reward models, what they will read of the row."""


def check_reward(config: RewardConfig, row: Row | None = None, calls: bool = False) -> RewardFindings:
    """Have a process of the reward service load every reward, as its workers will.

    With a row, judges and reward models tell what they would read of it; with `calls` too, every reward that
    is a function is called once, with that row and an empty completion.

    Raises:
        ConfigError: it cannot be imported, or does not take what it will be given.
    """
    command = run_own(Program.REWARD_CHECK, config.model_dump_json())
    if row is not None:
        names = ("prompt", "data_source", "ground_truth", "extra")
        command.append(json.dumps({name: getattr(row, name) for name in names}, default=str))
        command += ["call"] if calls else []
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=REWARD_CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"reward {_named(config)}: importing or calling it took longer than {REWARD_CHECK_TIMEOUT_S:g} s"
        ) from None
    if result.returncode == 0:
        return _findings(result.stdout.splitlines())
    # The reason is the last line: the module may have written lines of its own.
    reason = (result.stderr.strip().splitlines() or [""])[-1]
    if result.returncode != ConfigError.exit_code:
        reason = f"reward {_named(config)}: its import ended Python: {reason or 'no reason given'}"
    raise ConfigError(reason)


def _findings(lines: list[str]) -> RewardFindings:
    reads: dict[str, str] = {}
    for line in lines:
        if line.startswith(READS):
            reads |= json.loads(line.removeprefix(READS))
    return RewardFindings([line.removeprefix(CALLED) for line in lines if line.startswith(CALLED)], reads)


def _named(config: RewardConfig) -> str:
    return ", ".join(reward.function or name for name, reward in config.named.items())
