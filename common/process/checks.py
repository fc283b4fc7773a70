"""Checks of users' code by a process of the service that uses it; this process never imports such code."""

import json
import secrets
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.config.algorithm import AlgorithmConfig, is_users_own
from tidemill.common.config.environment import NO_CONTAINERS
from tidemill.common.data.dataset import Row
from tidemill.common.errors import ConfigError, ConfigErrors
from tidemill.common.process.programs import Program, run_own
from tidemill.common.waiting import said_while_waiting

TIMEOUT_S = 300.0
"""Limit on a check; importing torch on a busy machine may take minutes."""
FIRST_LINE_S = 5.0
"""A check that takes longer says so."""
ORACLE_TIMEOUT_S = 1800.0
"""The same for sessions in containers, whose images may have to be fetched."""
REMOVAL_TIMEOUT_S = 180.0
MACHINE_TIMEOUT_S = 120.0
ANSWER = "tidemill-answer: "
"""Prefix of the line with a program's answer; a user's module may print other lines."""
PROBLEMS = "tidemill-problems: "
"""Prefix of the line with a list of mistakes, which stands in the place of an answer."""
BYTES = "hexadecimal bytes"
"""The only key of an object that stands for bytes in a request."""

Answer = dict[str, Any]


def answer_check(answer: Callable[[Any], Answer]) -> int:
    """Main function of a checking program: reads a request in JSON from its argument, else from its input,
    and prints the answer as a line, or as another one the mistakes that a ConfigError names. Returns the exit
    code."""
    text = sys.argv[1] if len(sys.argv) > 1 else sys.stdin.read()
    code = 0
    try:
        line = ANSWER + json.dumps(answer(json.loads(text, object_hook=_decode_bytes)))
    except ConfigErrors as errors:
        line = PROBLEMS + json.dumps(errors.problems)
        code = errors.exit_code
    except ConfigError as error:
        line = PROBLEMS + json.dumps([" ".join(str(error).splitlines())])
        code = error.exit_code
    # A user's module may have printed the beginning of a line.
    print(f"\n{line}")
    return code


def check_algorithm(algorithm: AlgorithmConfig) -> None:
    """Have a process of the trainer load and try the user's own advantage and loss, as the trainer will.

    Raises:
        ConfigError: one cannot be imported, or does not fit what it will be given.
    """
    advantage = algorithm.advantage
    loss = algorithm.loss
    if is_users_own(advantage) or is_users_own(loss):
        subject = f"trainer.algorithm: advantage {advantage} or loss {loss}"
        _ask(Program.TRAINER_CHECK, algorithm.model_dump(mode="json"), subject)


def check_reward(
    config: RunConfig, row: Row | None = None, calls: bool = False, columns: Collection[str] = ()
) -> Answer:
    """Have a process of the reward service load every reward, as its workers will. `columns` are those that
    some training row has.

    With a row, the answer's `reads` has what judges and reward models would read of it, by their names, and
    `gets` lines on functions that get text or chats, as the row's prompt is; with `calls` too, every reward
    that is a function is called with that row, if it has the columns that the function requires: for an empty
    completion, for its ground truth and for its prompt as completion. `called` has a line on each result.

    Raises:
        ConfigError: one cannot be imported, or does not take what it will be given; a `ConfigErrors` where
            this is so of several.
    """
    request = {
        "config": config.model_dump(mode="json"),
        "row": _fields(row),
        "calls": calls,
        "columns": sorted(columns),
    }
    named = ", ".join(reward.function or name for name, reward in config.reward.named.items())
    return _ask(Program.REWARD_CHECK, request, f"reward {named}")


def check_environment(config: RunConfig, rows: Sequence[Row] = (), plays_oracle: bool = False) -> list[str]:
    """Have a process of the rollout service load the environment, as its workers will, and with rows play
    one session with a script in place of the model; returns lines that describe it. With `plays_oracle`, play
    each row as `rollout.environment.oracle` says, and once with nothing.

    Raises:
        ConfigError: it cannot be imported or used, or it fails; rows whose reward is not as expected.
    """
    section = config.rollout.environment
    if section.is_single_turn:
        return []
    request = {
        "config": config.model_dump(mode="json"),
        "rows": [_fields(row) for row in rows],
        "oracle_uid": "",
    }
    if not plays_oracle:
        answer = _ask(Program.ROLLOUT_CHECK, request, f"rollout.environment.use {section.use}")
        return list(answer["played"])
    uid = secrets.token_hex(4)
    request["oracle_uid"] = uid
    subject = f"rollout.environment.oracle {section.oracle}, played with use {section.use}"
    try:
        answer = _ask(Program.ROLLOUT_CHECK, request, subject, ORACLE_TIMEOUT_S)
    except BaseException:
        # Ctrl-C and the time limit kill that process, which then removes nothing.
        if section.containers != NO_CONTAINERS:
            _remove_containers(section.containers, uid)
        raise
    return list(answer["played"])


def _remove_containers(command: str, uid: str) -> None:
    """Remove what a check's sessions have left; says so where it cannot."""
    remove = run_own(Program.CONTAINERS, "--uid", uid, "--command", command)
    try:
        subprocess.run(remove, stdout=sys.stderr, timeout=REMOVAL_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"containers of the check may be left on this node: {error}", file=sys.stderr)


def compute_memory(config: RunConfig, machine: Mapping[str, Any]) -> Answer:
    """Have a process of the trainer compute the run's memory on `machine` (`gpus`, `gpu_bytes`,
    `host_bytes`), from the model's config.json alone: the fields of a `Fit`.

    Raises:
        ConfigError: the model cannot be measured.
    """
    request = {"config": config.model_dump(mode="json"), "machine": dict(machine)}
    return _ask(Program.TRAINER_MEMORY, request, f"model.path {config.model.path}")


def most_picture_tokens(config: RunConfig) -> int:
    """Have a process of the trainer load the image processor; returns a bound on the tokens of a picture.

    Raises:
        ConfigError: the processor cannot be loaded.
    """
    subject = f"the image processor of {config.model.path}"
    return int(_ask(Program.TRAINER_PICTURES, config.model_dump(mode="json"), subject)["most_tokens"])


def gib(value: float) -> str:
    return f"{value / (1 << 30):.1f}"


def listed(parts: Mapping[str, float]) -> str:
    """Sizes in GiB, the largest first; those below a hundredth of the sum are left out."""
    total = sum(parts.values())
    largest = sorted(((value, name) for name, value in parts.items() if value >= total / 100), reverse=True)
    return ", ".join(f"{name} {gib(value)}" for value, name in largest)


def examine_machine(config: RunConfig, runs: Path) -> list[dict[str, Any]]:
    """Have a process of the trainer look at this machine and measure it: facts, as maps of `what`, `text`,
    `remedy` and `is_problem`.

    Raises:
        ConfigError: it did not end within a minute or two.
    """
    request = {"config": config.model_dump(mode="json"), "runs": str(runs)}
    return list(_ask(Program.TRAINER_MACHINE, request, "--gpu", MACHINE_TIMEOUT_S)["facts"])


def _fields(row: Row | None) -> dict[str, Any] | None:
    names = ("prompt", "data_source", "ground_truth", "extra", "source", "origin")
    if row is None:
        return None
    return {name: getattr(row, name) for name in names} | {"num_images": len(row.images)}


def _encode(value: Any) -> Any:
    """JSON's form of a value that JSON does not have."""
    return {BYTES: value.hex()} if isinstance(value, bytes) else str(value)


def _decode_bytes(tree: dict[str, Any]) -> Any:
    return bytes.fromhex(tree[BYTES]) if tree.keys() == {BYTES} else tree


def _ask(program: Program, request: Any, subject: str, timeout_s: float = TIMEOUT_S) -> Answer:
    # As input: an argument may have 128 KiB at most, and a row may be longer.
    text = json.dumps(request, default=_encode)

    def line(waited_s: float) -> str:
        return f"{subject}: still being checked after {waited_s:g} s"

    try:
        with said_while_waiting(line, FIRST_LINE_S):
            result = subprocess.run(
                run_own(program), input=text, capture_output=True, text=True, timeout=timeout_s
            )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{subject}: importing or calling it took longer than {timeout_s:g} s") from None
    for printed in result.stdout.splitlines():
        if printed.startswith(ANSWER) and result.returncode == 0:
            answer: Answer = json.loads(printed.removeprefix(ANSWER))
            return answer
        if printed.startswith(PROBLEMS):
            problems = json.loads(printed.removeprefix(PROBLEMS))
            raise ConfigErrors(problems) if len(problems) > 1 else ConfigError(problems[0])
    reason = (result.stderr.strip().splitlines() or ["no reason given"])[-1]
    raise ConfigError(f"{subject}: its import ended Python: {reason}")
