"""`tidemill replay trajectories`: yesterday's traffic for today's reward service.

Guarantees: recorded trajectories enter a sandbox run in their order and at their old pace, a multiple of it,
or as fast as they are scored; the run that they come from is only read.
"""

import json
import shlex
from typing import Any

import numpy as np
from rich.console import Console

from common.errors import ConfigError
from common.main_task import run_main
from common.messages import ScoreStatus
from common.redis_client import URL_VARIABLE
from common.run_paths import RUNS_DIR_VARIABLE
from services.console.console_log import log_to_file
from services.console.history_access import open_history
from services.console.sandbox_runs.emission import Emission, Flow, Pace
from services.console.sandbox_runs.options import SandboxOptions, require_history
from services.console.sandbox_runs.progress import shown
from services.console.sandbox_runs.sandbox_run import SandboxRun
from services.console.sandbox_runs.tables import replay_table

MAX_SPEED = 1e6


def parse_speed(text: str) -> float | None:
    """`10x`, `10` or `0.5x` as a number; `max` is None.

    Raises:
        ConfigError: it is none of these.
    """
    if text == "max":
        return None
    try:
        speed = float(text.removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not 0.0 < speed <= MAX_SPEED:
        raise ConfigError(f"--speed {text!r} must be max, or a number of times such as 1x, 10x or 0.5x")
    return speed


def replay_trajectories(options: SandboxOptions, speed: str, max_backlog: int, as_json: bool) -> None:
    """Do it and print what came of it.

    Raises:
        ConfigError: there is no such run or history, or the reward cannot be used.
    """
    pace = Pace(parse_speed(speed), max_backlog)
    console = Console(stderr=as_json, highlight=False)
    summary = {"speed": speed, **run_main(_replay(options, pace, console))}
    if as_json:
        print(json.dumps(summary))
    else:
        console.print(replay_table(summary))


async def _replay(options: SandboxOptions, pace: Pace, console: Console) -> dict[str, Any]:
    selection, lane = options.selection(), options.lane
    async with open_history(options.run_id, options.runs_dir) as source:
        folder = options.sandbox_folder(source.folder, "replay")
        config = options.sandbox_config(source, folder.run_id)
        await require_history(source.history, selection, lane)
        sandbox = SandboxRun(config, folder, options.redis, lambda text: console.print(text, style="yellow"))
        async with sandbox.running("replay", source.run_id):
            log_to_file(folder.logs / "console.log")
            _say_how_to_join(console, sandbox)
            await sandbox.until_ready()
            emission = Emission(sandbox.broker, sandbox.keys, source.history, selection, lane, pace)
            with shown(console, "scored") as progress:
                flow = await emission.run(progress)
    return {"run": source.run_id, "sandbox": folder.run_id, **summary_of(flow)}


def summary_of(flow: Flow) -> dict[str, Any]:
    """Numbers of a flow that has ended."""
    return {
        "emitted": flow.emitted,
        "scored": flow.scored,
        "failed": sum(score.status is not ScoreStatus.OK for score in flow.scores.values()),
        "seconds": flow.seconds,
        "scores_per_s": flow.scored / flow.seconds,
        "wait_s": _quantiles(flow.waits_s),
        "latency_s": _quantiles([score.latency_s for score in flow.scores.values()]),
        "max_backlog": flow.max_backlog,
        "behind_s": flow.behind_s,
    }


def _say_how_to_join(console: Console, sandbox: SandboxRun) -> None:
    workers = sandbox.config.reward.workers
    what = f"{workers} reward worker(s) of its own score it" if workers else "no reward worker was started"
    address = f"{URL_VARIABLE}={shlex.quote(sandbox.url or '')} {RUNS_DIR_VARIABLE}={sandbox.folder.runs}"
    command = f"{address} python -m services.reward --run {sandbox.folder.run_id}"
    console.print(f"sandbox {sandbox.folder.run_id}: {what}; another joins with\n  {command}", soft_wrap=True)


def _quantiles(values: list[float]) -> dict[str, float]:
    found = np.quantile(np.array(values or [0.0]), [0.5, 0.95, 0.99])
    return dict(zip(("p50", "p95", "p99"), map(float, found), strict=True))
