"""Has a service's own process check what is the user's code, which is never imported into this one."""

import importlib.util
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.config.algorithm import AlgorithmConfig, is_users_own
from tidemill.common.errors import ConfigError
from tidemill.common.process.programs import Program, run_own
from tidemill.common.run.dataset import Row

TIMEOUT_S = {
    Program.TRAINER_CHECK: 180.0,
    Program.TRAINER_MEMORY: 300.0,
    Program.REWARD_CHECK: 120.0,
    Program.ROLLOUT_CHECK: 180.0,
}
"""Importing torch on a busy machine takes its time."""
CALLED, READS, PLAYED = "tidemill-called: ", "tidemill-reads: ", "tidemill-played: "
"""Begin the lines of a check's output that tell of a call, of what is read, and of a session; a user's module
may print others."""


@dataclass(frozen=True, slots=True)
class RewardFindings:
    """What the check of the rewards saw."""

    called: list[str] = field(default_factory=list)
    """What came of calling the functions, a line each."""
    reads: dict[str, str] = field(default_factory=dict)
    """By the names of judges and reward models, what they will read of the row."""


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Have a process of the trainer load and try the user's own advantage and loss, as the trainer will.

    Raises:
        ConfigError: one cannot be imported, or does not fit what it will be given.
    """
    advantage, loss = algorithm.advantage, algorithm.loss
    if is_users_own(advantage) or is_users_own(loss):
        what = f"trainer.algorithm: advantage {advantage} or loss {loss}"
        _run(Program.TRAINER_CHECK, [algorithm.model_dump_json()], what)


def check_reward(config: RunConfig, row: Row | None = None, calls: bool = False) -> RewardFindings:
    """Have a process of the reward service load every reward, as its workers will.

    With a row, judges and reward models tell what they would read of it; with `calls` too, every reward that
    is a function is called once, with that row and an empty completion.

    Raises:
        ConfigError: one cannot be imported, or does not take what it will be given.
    """
    arguments = [config.model_dump_json()]
    if row is not None:
        arguments.append(_row_json(row))
        arguments += ["call"] if calls else []
    named = ", ".join(reward.function or name for name, reward in config.reward.named.items())
    lines = _run(Program.REWARD_CHECK, arguments, f"reward {named}").splitlines()
    reads: dict[str, str] = {}
    for line in lines:
        if line.startswith(READS):
            reads |= json.loads(line.removeprefix(READS))
    return RewardFindings([line.removeprefix(CALLED) for line in lines if line.startswith(CALLED)], reads)


def check_environment(config: RunConfig, row: Row | None = None) -> list[str]:
    """Have a process of the rollout service load the environment, as its workers will, and with a row play
    one session with a script in place of the model; returns what came of it, a line each.

    Raises:
        ConfigError: it cannot be imported or used, or it fails.
    """
    section = config.rollout.environment
    if section.is_single_turn:
        return []
    arguments = [config.model_dump_json()]
    if row is not None:
        arguments.append(_row_json(row))
    lines = _run(Program.ROLLOUT_CHECK, arguments, f"rollout.environment.use {section.use}").splitlines()
    return [line.removeprefix(PLAYED) for line in lines if line.startswith(PLAYED)]


def compute_memory(
    config: RunConfig, machines: Sequence[Mapping[str, Any]], finds: bool = False
) -> list[dict[str, Any]]:
    """Have a process of the trainer compute what the run takes of machines (`gpus`, `gpu_bytes`,
    `host_bytes`), from the model's config.json alone: a map for each. With `finds`, settings that fit take
    the place of the config's.

    Raises:
        ConfigError: the model cannot be measured.
    """
    tree = config.model_dump(mode="json")
    request = json.dumps({"config": tree, "machines": list(machines), "finds": finds})
    output = _run(Program.TRAINER_MEMORY, [request], f"model.path {config.model.path}")
    fits: list[dict[str, Any]] = json.loads(output.splitlines()[-1])["fits"]
    return fits


def _row_json(row: Row) -> str:
    names = ("prompt", "data_source", "ground_truth", "extra", "source")
    return json.dumps({name: getattr(row, name) for name in names}, default=str)


def _run(program: Program, arguments: list[str], what: str) -> str:
    """The output of a check of `what`."""
    timeout_s = TIMEOUT_S[program]
    try:
        result = subprocess.run(
            run_own(program, *arguments), capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{what}: importing or calling it took longer than {timeout_s:g} s") from None
    if result.returncode == 0:
        return result.stdout
    # The reason is the last line: the module may have written lines of its own.
    reason = (result.stderr.strip().splitlines() or [""])[-1]
    if result.returncode != ConfigError.exit_code:
        reason = f"{what}: its import ended Python: {reason or 'no reason given'}"
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
