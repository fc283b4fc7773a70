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

from tidemill.common.errors import ConfigError
from tidemill.common.files import write_atomically
from tidemill.common.history import Selection, StreamName
from tidemill.common.process.heartbeats import Heartbeat
from tidemill.common.process.programs import run_main
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.run.state import RUNS_DIR_VARIABLE
from tidemill.common.wire.messages import Lane, Score, ScoreStatus, TrajectoryKey
from tidemill.services.console.options import SandboxOptions
from tidemill.services.console.rescore.agreement import compare, replay_table, rescore_tables
from tidemill.services.console.rescore.emission import Emission, Flow, Pace, shown
from tidemill.services.console.rescore.options import (
    require_history,
    sandbox_config,
    sandbox_folder,
    stretch,
)
from tidemill.services.console.rescore.sandbox_run import SandboxRun
from tidemill.services.console.run.folder import RunFolder, log_to_file, nearest
from tidemill.services.console.run.history import open_history

REPORT_FILE = "rescore.json"
"""Below the sandbox's folder."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A stretch of history that was scored again in a sandbox run."""

    source: str
    sandbox: RunFolder
    rewards: list[str]
    flow: Flow
    beats: list[Heartbeat]
    """The last words of the workers."""
    before: dict[TrajectoryKey, Score]
    """What the run recorded itself."""


def rescore(options: SandboxOptions, first: str | None, last: str | None) -> None:
    """Do it, write the report into the sandbox's folder, and print it.

    Raises:
        ConfigError: there is no such run or history, or the reward cannot be used.
    """
    console = Console(stderr=options.as_json, highlight=False)
    report, path = run_main(rescore_report(options, first, last, console))
    if options.as_json:
        print(json.dumps(report))
        return
    for table in rescore_tables(report):
        console.print(table)
    console.print(
        f"the new scores are run {report['sandbox']}; the report is in {nearest(path)}", soft_wrap=True
    )


async def rescore_report(
    options: SandboxOptions, first: str | None, last: str | None, console: Console
) -> tuple[dict[str, Any], Path]:
    """Score history with another reward; the report, and the file it was written into.

    Raises:
        ConfigError: there is no such run or history, or the reward cannot be used.
    """
    started = time.monotonic()
    scored = await _score(options, "rescore", stretch(first, last), Pace(), console)
    path = scored.sandbox.path / REPORT_FILE
    report = {
        "run": scored.source,
        "sandbox": scored.sandbox.run_id,
        "lane": options.lane,
        "reward": scored.rewards,
        "agreement": asdict(compare(scored.before, scored.flow.scores)),
        "cost": _cost_of(scored, time.monotonic() - started),
    }
    write_atomically(path, json.dumps(report, indent=1) + "\n")
    return report, path


def replay_trajectories(
    options: SandboxOptions, first: str | None, last: str | None, speed: str, max_backlog: int
) -> None:
    """Do it and print what came of it.

    Raises:
        ConfigError: there is no such run or history, or the reward cannot be used.
    """
    pace = Pace(parse_speed(speed), max_backlog)
    console = Console(stderr=options.as_json, highlight=False)
    scored = run_main(_score(options, "replay", stretch(first, last), pace, console))
    names = {"speed": speed, "run": scored.source, "sandbox": scored.sandbox.run_id}
    summary = {**names, **_summary_of(scored.flow)}
    if options.as_json:
        print(json.dumps(summary))
    else:
        console.print(replay_table(summary))


async def _score(
    options: SandboxOptions, kind: str, selection: Selection, pace: Pace, console: Console
) -> Scored:
    """Feed the stretch to reward workers in a sandbox run of its own."""
    lane = Lane(options.lane)
    async with open_history(options.run_id, options.runs_dir) as source:
        folder = sandbox_folder(options, source.folder, kind)
        config = sandbox_config(options, source, folder.run_id)
        await require_history(source.history, selection, lane)
        sandbox = SandboxRun(config, folder, options.redis, lambda text: console.print(text, style="yellow"))
        async with sandbox.running(kind, source.run_id):
            log_to_file(folder.logs / "console.log")
            if kind == "replay":
                _say_how_to_join(console, sandbox)
            await sandbox.until_ready()
            emission = Emission(sandbox.broker, sandbox.keys, source.history, selection, lane, pace)
            with shown(console, "scored") as progress:
                flow = await emission.run(progress)
            # Workers speak every two seconds: what judges charged is known with their last word.
            beats = await sandbox.last_words() if kind == "rescore" else []
        before: dict[TrajectoryKey, Score] = {}
        if kind == "rescore":  # scores come later than what they are for: a stretch of time is not theirs
            recorded = Selection(steps=selection.steps)
            async for score in source.history.messages(StreamName.SCORES.of(lane), Score, recorded):
                before.setdefault(score.key, score)
    return Scored(source.run_id, folder, sorted(config.reward.named), flow, beats, before)


def _cost_of(scored: Scored, wall_s: float) -> dict[str, Any]:
    """What the re-scoring took. `wall_s` has the starting of processes in it, `scoring_s` has not."""
    flow, scores = scored.flow, list(scored.flow.scores.values())
    latencies = [score.latency_s for score in scores] or [0.0]
    tokens: Counter[str] = Counter()
    for beat in scored.beats:
        for name, count in beat.counts.items():
            reward, _, what = name.rpartition("/")
            if what == "tokens" and beat.role == "reward":
                tokens[reward] += int(count)
    return {
        "trajectories": len(scores),
        "wall_s": round(wall_s, 3),
        "scoring_s": round(flow.seconds, 3),
        "scores_per_s": round(len(scores) / flow.seconds, 1),
        "attempts": sum(score.attempts for score in scores),
        "latency_p50_s": float(np.quantile(latencies, 0.5)),
        "latency_p95_s": float(np.quantile(latencies, 0.95)),
        "tokens": dict(tokens),
    }


def _summary_of(flow: Flow) -> dict[str, Any]:
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


def _say_how_to_join(console: Console, sandbox: SandboxRun) -> None:
    workers = sandbox.config.reward.workers
    what = f"{workers} reward worker(s) of its own score it" if workers else "no reward worker was started"
    address = f"{URL_VARIABLE}={shlex.quote(sandbox.url or '')} {RUNS_DIR_VARIABLE}={sandbox.folder.runs}"
    command = f"{address} python -m tidemill.services.reward --run {sandbox.folder.run_id}"
    console.print(f"sandbox {sandbox.folder.run_id}: {what}; another joins with\n  {command}", soft_wrap=True)


def _quantiles(values: list[float]) -> dict[str, float]:
    found = np.quantile(np.array(values or [0.0]), [0.5, 0.95, 0.99])
    return dict(zip(("p50", "p95", "p99"), map(float, found), strict=True))
