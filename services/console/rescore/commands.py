"""`tidemill rescore`: score history with another reward, and say how the two agree.

Guarantees: nothing is generated again, and nothing is written to the run whose history it is: the new scores
are the scores stream of a sandbox run, computed by the same reward service that training uses.
"""

import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tidemill.common.errors import ConfigError
from tidemill.common.files import write_atomically
from tidemill.common.history import Selection, StreamName
from tidemill.common.process.heartbeats import Heartbeat
from tidemill.common.process.programs import run_main
from tidemill.common.wire.messages import Lane, Score, TrajectoryKey
from tidemill.services.console.options import RescoreOptions
from tidemill.services.console.rescore.agreement import compare, rescore_tree
from tidemill.services.console.rescore.emission import Emission, Flow, shown
from tidemill.services.console.rescore.options import require_history, sandbox_config, sandbox_folder
from tidemill.services.console.rescore.sandbox_run import SandboxRun
from tidemill.services.console.run.folder import log_to_file, nearest
from tidemill.services.console.run.history import open_history
from tidemill.services.console.text.tree import note, part, print_tree

REPORT_FILE = "rescore.json"
"""Below the sandbox's folder."""


def rescore(options: RescoreOptions) -> None:
    """Do it, write the report into the sandbox's folder, and print it.

    Raises:
        ConfigError: there is no such run or history, or the reward cannot be used.
    """
    console = Console(stderr=options.as_json, highlight=False)
    report, path = run_main(rescore_report(options, console))
    if options.as_json:
        print(json.dumps(report))
        return
    where = note(f"the new scores are run {report['sandbox']}; the report is in {nearest(path)}")
    print_tree(console, part("", rescore_tree(report), where))


async def rescore_report(options: RescoreOptions, console: Console) -> tuple[dict[str, Any], Path]:
    """Score history with another reward; the report, and the file it was written into.

    Raises:
        ConfigError: there is no such run or history, or the reward cannot be used.
    """
    started, lane = time.monotonic(), Lane(options.lane)
    first, last = options.first, options.last
    if first is not None and last is not None and first > last:
        raise ConfigError(f"--from-step {first} is after --to-step {last}")
    selection = Selection() if first is last is None else Selection(steps=(first, last))
    async with open_history(options.run_id, options.runs_dir) as source:
        folder = sandbox_folder(options, source.folder)
        config = sandbox_config(options, source, folder.run_id)
        await require_history(source.history, selection, lane)
        sandbox = SandboxRun(config, folder, options.redis, lambda text: console.print(text, style="yellow"))
        async with sandbox.running(source.run_id):
            log_to_file(folder.logs / "console.log")
            await sandbox.until_ready()
            emission = Emission(
                sandbox.broker, sandbox.keys, source.history, selection, lane, options.keeps_pace
            )
            with shown(console) as progress:
                flow = await emission.run(progress)
            # Heartbeats come every two seconds; what judges charged is complete in the last ones.
            beats = await sandbox.final_heartbeats()
        before: dict[TrajectoryKey, Score] = {}
        async for score in source.history.messages(StreamName.SCORES.of(lane), Score, selection):
            before.setdefault(score.key, score)
    report = {
        "run": source.run_id,
        "sandbox": folder.run_id,
        "lane": options.lane,
        "reward": sorted(config.reward.named),
        "agreement": asdict(compare(before, flow.scores)),
        "cost": _cost_of(flow, beats, time.monotonic() - started),
    }
    path = folder.path / REPORT_FILE
    write_atomically(path, json.dumps(report, indent=1) + "\n")
    return report, path


def _cost_of(flow: Flow, beats: list[Heartbeat], wall_s: float) -> dict[str, Any]:
    """What the re-scoring took. `wall_s` has the starting of processes in it, `scoring_s` has not."""
    scores = list(flow.scores.values())
    latencies = [score.latency_s for score in scores] or [0.0]
    tokens: Counter[str] = Counter()
    for beat in beats:
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
        "wait_p50_s": float(np.quantile(flow.waits_s or [0.0], 0.5)),
        "wait_p95_s": float(np.quantile(flow.waits_s or [0.0], 0.95)),
        "tokens": dict(tokens),
    }
