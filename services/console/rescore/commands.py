"""`tidemill rescore`: score history with another reward, and say how the two agree.

Guarantees: nothing is generated again, and nothing is written to the run whose history it is: the new scores
are the scores stream of a sandbox run, computed by the same reward service that training uses.
"""

import json
import shlex
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from common.errors import ConfigError
from common.files import write_atomically
from common.history import History, Selection, StreamName
from common.process.heartbeats import Heartbeat
from common.process.programs import run_main
from common.redis.client import URL_VARIABLE
from common.run.state import RUNS_DIR_VARIABLE
from common.wire.messages import Lane, Score, ScoreStatus, TrajectoryKey
from services.console.options import SandboxOptions
from services.console.rescore.agreement import compare, replay_table, rescore_tables
from services.console.rescore.emission import Emission, Flow, Pace, shown
from services.console.rescore.options import require_history, sandbox_config, sandbox_folder, stretch
from services.console.rescore.sandbox_run import SandboxRun
from services.console.run.connection import log_to_file
from services.console.run.folder import nearest
from services.console.run.history import open_history

REPORT_FILE = "rescore.json"
"""Below the sandbox's folder."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What the re-scoring took."""

    trajectories: int
    wall_s: float
    """From the start of the command's work to its end, starting processes included."""
    scoring_s: float
    """From the moment a worker took the first trajectory to the last score."""
    scores_per_s: float
    attempts: int
    latency_p50_s: float
    latency_p95_s: float
    tokens: dict[str, int]
    """Tokens that judges and reward models charged, by reward."""


def rescore(options: SandboxOptions, first: str | None, last: str | None) -> None:
    """Do it, write the report into the sandbox's folder, and print it.

    Raises:
        ConfigError: there is no such run or history, or the reward cannot be used.
    """
    console = Console(stderr=options.as_json, highlight=False)
    path, report = run_main(_rescore(options, stretch(first, last), console))
    write_atomically(path, json.dumps(report, indent=1) + "\n")
    if options.as_json:
        print(json.dumps(report))
        return
    for table in rescore_tables(report):
        console.print(table)
    console.print(
        f"the new scores are run {report['sandbox']}; the report is in {nearest(path)}", soft_wrap=True
    )


async def _rescore(
    options: SandboxOptions, selection: Selection, console: Console
) -> tuple[Path, dict[str, Any]]:
    """Where the report belongs, and the report."""
    started, lane = time.monotonic(), Lane(options.lane)
    async with open_history(options.run_id, options.runs_dir) as source:
        folder = sandbox_folder(options, source.folder, "rescore")
        config = sandbox_config(options, source, folder.run_id)
        await require_history(source.history, selection, lane)
        sandbox = SandboxRun(config, folder, options.redis, lambda text: console.print(text, style="yellow"))
        async with sandbox.running("rescore", source.run_id):
            log_to_file(folder.logs / "console.log")
            await sandbox.until_ready()
            emission = Emission(sandbox.broker, sandbox.keys, source.history, selection, lane)
            with shown(console, "scored") as progress:
                flow = await emission.run(progress)
            # Workers speak every two seconds: what judges charged is known with their last word.
            beats = await sandbox.last_words()
        before = await scores_of(source.history, selection, lane)
    return folder.path / REPORT_FILE, {
        "run": source.run_id,
        "sandbox": folder.run_id,
        "lane": str(lane),
        "reward": sorted(config.reward.named),
        "agreement": asdict(compare(before, flow.scores)),
        "cost": asdict(cost_of(flow, beats, time.monotonic() - started)),
    }


async def scores_of(history: History, selection: Selection, lane: Lane) -> dict[TrajectoryKey, Score]:
    """The first score of each trajectory that the run recorded."""
    # Scores come later than what they are for: a stretch of time is not theirs.
    scores: dict[TrajectoryKey, Score] = {}
    async for score in history.messages(StreamName.SCORES.of(lane), Score, Selection(steps=selection.steps)):
        scores.setdefault(score.key, score)
    return scores


def cost_of(flow: Flow, beats: list[Heartbeat], wall_s: float) -> Cost:
    """The cost of what flowed."""
    scores = list(flow.scores.values())
    latencies = np.array([score.latency_s for score in scores]) if scores else np.zeros(1)
    tokens: Counter[str] = Counter()
    for beat in beats:
        for name, count in beat.counts.items():
            reward, _, what = name.rpartition("/")
            if what == "tokens" and beat.role == "reward":
                tokens[reward] += int(count)
    return Cost(
        trajectories=len(scores),
        wall_s=round(wall_s, 3),
        scoring_s=round(flow.seconds, 3),
        scores_per_s=round(len(scores) / flow.seconds, 1),
        attempts=sum(score.attempts for score in scores),
        latency_p50_s=float(np.quantile(latencies, 0.5)),
        latency_p95_s=float(np.quantile(latencies, 0.95)),
        tokens=dict(tokens),
    )


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


def replay_trajectories(
    options: SandboxOptions, first: str | None, last: str | None, speed: str, max_backlog: int
) -> None:
    """Do it and print what came of it.

    Raises:
        ConfigError: there is no such run or history, or the reward cannot be used.
    """
    pace = Pace(parse_speed(speed), max_backlog)
    console = Console(stderr=options.as_json, highlight=False)
    summary = {"speed": speed, **run_main(_replay(options, stretch(first, last), pace, console))}
    if options.as_json:
        print(json.dumps(summary))
    else:
        console.print(replay_table(summary))


async def _replay(
    options: SandboxOptions, selection: Selection, pace: Pace, console: Console
) -> dict[str, Any]:
    lane = Lane(options.lane)
    async with open_history(options.run_id, options.runs_dir) as source:
        folder = sandbox_folder(options, source.folder, "replay")
        config = sandbox_config(options, source, folder.run_id)
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
