"""`python -m tidemill.services.trainer.replay --run ID --run-dir DIR --steps 3,17`: trains steps again.

A process of its own for `tidemill replay`: it reads the run's folder, and its streams where
TIDEMILL_REDIS_URL is set or the folder has an archive. It prints one JSON value a line on stdout: `start` for
a restored version, `step` for every step that was trained, `result` for those that were asked for, `error`
where it ends without. Exits with 0 when all results are equal to what was recorded, with 1 or 2 otherwise.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from tidemill.common.config import RunConfig, load_recorded
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.history import History, StreamName
from tidemill.common.process.privacy import hide_memory
from tidemill.common.process.programs import run_main
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.run.state import read_config
from tidemill.common.telemetry.logs import LEVEL_VARIABLE, configure_logs
from tidemill.common.wire.messages import Commit


async def check_committed(history: History, steps: Sequence[int]) -> None:
    """Make sure that the run has made these steps. Raises ConfigError: it has no commit of one of them."""
    for step in steps:
        if await history.commit(step) is None:
            last = await anext(history.messages(StreamName.COMMITS, Commit, newest_first=True), None)
            has = f"its commits end with step {last.step}" if last else "it has no commits"
            raise ConfigError(f"run {history.run_id} has no commit of step {step}: {has}.")


def main() -> int:
    """Replay and print the results; returns the exit code."""
    hide_memory()  # it may have the password of Redis, and runs the losses of users
    parser = argparse.ArgumentParser(prog="python -m tidemill.services.trainer.replay", description=__doc__)
    parser.add_argument("--run", required=True, metavar="RUN_ID")
    parser.add_argument("--run-dir", required=True, type=Path, help="the run's folder")
    parser.add_argument("--steps", required=True, help="numbers with commas between them")
    options = parser.parse_args()
    # What a user's own loss prints must not stand between the lines of this protocol.
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ.setdefault(LEVEL_VARIABLE, "WARNING")
    configure_logs("replay")
    try:
        return 0 if run_main(_replay(options, lines)) else 1
    except TidemillError as error:
        _print(lines, {"kind": "error", "message": str(error), "exit_code": error.exit_code})
        return error.exit_code


async def _replay(options: argparse.Namespace, lines: TextIO) -> bool:
    broker = await Broker.connect() if os.environ.get(URL_VARIABLE) else None
    try:
        if broker is not None:
            broker.is_stopping = True  # a person is waiting: an outage ends the replay after seconds
        history = History(options.run, options.run_dir, broker)
        config = await _config(options.run_dir, history)
        steps = [int(number) for number in options.steps.split(",")]
        await check_committed(history, steps)
        from tidemill.services.trainer.replay.steps import replay_steps

        return await replay_steps(history, config, options.run_dir, steps, lambda event: _print(lines, event))
    finally:
        if broker is not None:
            await broker.close()


async def _config(run_dir: Path, history: History) -> RunConfig:
    path = run_dir / "config.yaml"
    if path.is_file():
        return load_recorded(path)
    if history.broker is None:
        raise ConfigError(f"{run_dir} has no config.yaml, and no Redis is there to have the run's config.")
    return await read_config(history.broker, history.keys)


def _print(lines: TextIO, event: dict[str, Any]) -> None:
    print(json.dumps(event), file=lines, flush=True)


if __name__ == "__main__":
    sys.exit(main())
