"""`tidemill rescore`: score history with another reward, and say how the two agree.

Guarantees: nothing is generated again, and nothing is written to the run whose history it is: the new scores
are the scores stream of a sandbox run, computed by the same reward service that training uses. Pictures are
read where that run has them.
"""

import itertools
import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tidemill.common.config import RunConfig, load_config, override_config
from tidemill.common.errors import ConfigError
from tidemill.common.files import write_atomically
from tidemill.common.history import Selection, StreamName
from tidemill.common.images.store import IMAGES_FOLDER
from tidemill.common.process.heartbeats import Heartbeat
from tidemill.common.process.programs import run_main
from tidemill.common.run.state import PICTURES_OF, folder_with_pictures, read_state
from tidemill.common.streams.code_errors import CodeErrors
from tidemill.common.streams.entries import Entry
from tidemill.common.wire.keys import RUN_ID
from tidemill.common.wire.messages import Lane, Score, Trajectory, TrajectoryKey
from tidemill.services.console.commands import RescoreOptions
from tidemill.services.console.compare.agreement import compare, rescore_tree
from tidemill.services.console.compare.emission import Emission, shown
from tidemill.services.console.run.folder import RunFolder, log_to_file, nearest
from tidemill.services.console.run.history import RunAccess, open_history
from tidemill.services.console.text.tree import note, part, print_tree
from tidemill.services.console.up.reward_run import RewardRun

REPORT_FILE = "rescore.json"
"""In the sandbox's folder."""


def rescore(options: RescoreOptions) -> None:
    console = Console(stderr=options.as_json, highlight=False)
    report, path = run_main(rescore_report(options, console))
    if options.as_json:
        print(json.dumps(report))
        return
    where = note(f"the new scores are run {report['sandbox']}; the report is in {nearest(path)}")
    scored = RunFolder(path.parent.parent, report["run"])
    print_tree(console, part("", rescore_tree(report, scored), where))


async def rescore_report(options: RescoreOptions, console: Console) -> tuple[dict[str, Any], Path]:
    """Score history with another reward; the report, and the file it was written into."""
    started = time.monotonic()
    lane = Lane(options.lane)
    first = options.first
    last = options.last
    if first is not None and last is not None and first > last:
        raise ConfigError(f"--from-step {first} is after --to-step {last}")
    selection = Selection() if first is last is None else Selection(steps=(first, last))
    async with open_history(options.run_id, options.runs_dir) as source:
        folder = _sandbox_folder(options, source.folder)
        config = _sandbox_config(options, source, folder.run_id)
        # Not always the source's own: it may be a sandbox, which scored another run's history.
        run_with_pictures = folder_with_pictures(source.folder.path, await _state_of(source))
        await _check_history(source, lane, selection, _missing_folder(run_with_pictures, config))
        sandbox = RewardRun(config, folder, options.redis, lambda text: console.print(text, style="yellow"))
        state = {"kind": "rescore", "source": source.run_id, PICTURES_OF: run_with_pictures.name}
        async with sandbox.running(**state) as broker:
            emission = Emission(
                broker,
                sandbox.keys,
                source.history,
                selection,
                lane,
                options.keeps_pace,
                CodeErrors.of_rescoring(config),
            )
            log_to_file(folder.logs / "console.log")
            await sandbox.until_ready(broker)
            with shown(console) as progress:
                await emission.run(progress)
            # Heartbeats come every two seconds; what judges charged is complete in the last ones.
            beats = await sandbox.final_heartbeats(broker)
        before: dict[TrajectoryKey, Score] = {}
        async for score in source.history.messages(StreamName.SCORES.of(lane), Score, selection):
            before.setdefault(score.key, score)
    report = {
        "run": source.run_id,
        "sandbox": folder.run_id,
        "lane": options.lane,
        "reward": sorted(config.reward.named),
        "agreement": asdict(compare(before, emission.scores)),
        "cost": _cost_of(emission, beats, time.monotonic() - started),
    }
    path = folder.path / REPORT_FILE
    write_atomically(path, json.dumps(report, indent=1) + "\n")
    return report, path


def _sandbox_folder(options: RescoreOptions, source: RunFolder) -> RunFolder:
    """The sandbox's folder: the name that was given, else the first that is free."""
    names = [options.into] if options.into else (f"{source.run_id}.rescore-{n}" for n in itertools.count(1))
    for name in names:
        if not RUN_ID.fullmatch(name):
            raise ConfigError(
                f"--into {name!r} must be 1 to 100 letters, digits, '.', '_' or '-', beginning with a "
                "letter or digit"
            )
        folder = RunFolder(source.runs, name)
        if not folder.path.exists():
            return folder
    raise ConfigError(f"{folder.path} is there already; give the sandbox another name with --into.")


async def _state_of(run: RunAccess) -> dict[str, Any]:
    """The run's state; empty where only its archive is left."""
    history = run.history
    return {} if history.broker is None else await read_state(history.broker, history.keys)


async def _check_history(
    source: RunAccess, lane: Lane, selection: Selection, missing_folder: Path | None
) -> None:
    """Check before anything is started that there is something to score. `missing_folder` is that of its
    pictures, where it is not there.

    Raises:
        ConfigError: there are no trajectories, or one has pictures, for which workers would wait.
    """
    has_any = False
    async for entry in source.history.scan(StreamName.TRAJECTORIES.of(lane), selection):
        has_any = True
        if missing_folder is None:
            break
        # Of all of them: rows with pictures may stand behind rows of text.
        if isinstance(entry, Entry) and isinstance(entry.message, Trajectory) and entry.message.images:
            raise ConfigError(
                f"the pictures of run {missing_folder.parent.name} are not in {missing_folder}: put them "
                "back there, from the run's machine or its copy."
            )
    if not has_any:
        raise ConfigError(
            f"run {source.run_id} has no {lane} trajectories in that stretch. "
            f"`{source.folder.command('streams', 'show')}` shows what there is."
        )


def _missing_folder(run_dir: Path, config: RunConfig) -> Path | None:
    """The folder of the run's pictures, where the run has some and it is not there; else None."""
    if config.images is None or config.streams.claim_check_url:
        return None
    pictures = run_dir / IMAGES_FOLDER
    return None if pictures.is_dir() else pictures


def _sandbox_config(options: RescoreOptions, source: RunAccess, run_id: str) -> RunConfig:
    """The run's config with another reward, by `--reward`, `--config` or `--set`."""
    config = source.config
    if config is None:
        raise ConfigError(f"the config of run {source.run_id} is neither in Redis nor in its folder.")
    if options.reward and options.config:
        raise ConfigError("give either --reward, for a function, or --config, for a whole reward section")
    reward = config.reward
    servers = config.servers
    if options.config:
        another_config = load_config(options.config)
        reward = another_config.reward
        servers = servers | another_config.servers
    elif options.reward:
        file, colon, name = options.reward.rpartition(":")
        is_file = ".py:" in options.reward
        path = f"{Path(file).resolve()}{colon}{name}" if is_file else options.reward
        kept = ("timeout_s", "max_attempts", "backoff_s", "max_in_flight", "processes", "workers")
        reward = type(reward).model_validate(
            {"function": path, **{name: getattr(reward, name) for name in kept}}
        )
    # A run whose reward workers are started apart has none in its config; a sandbox needs one of its own.
    reward = reward.model_copy(update={"workers": options.workers or max(1, reward.workers)})
    config = config.model_copy(update={"run_id": run_id, "reward": reward, "servers": servers})
    return override_config(config, options.overrides)


def _cost_of(emission: Emission, beats: list[Heartbeat], wall_s: float) -> dict[str, Any]:
    """What the re-scoring took. `wall_s` has the starting of processes in it, `scoring_s` has not."""
    scores = list(emission.scores.values())
    latencies = np.quantile([score.latency_s for score in scores] or [0.0], (0.5, 0.95)).tolist()
    waits = np.quantile(emission.waits_s or [0.0], (0.5, 0.95)).tolist()
    tokens: Counter[str] = Counter()
    for beat in beats:
        for name, count in beat.counts.items():
            reward, _, quantity = name.rpartition("/")
            if quantity == "tokens" and beat.role == "reward":
                tokens[reward] += int(count)
    return {
        "trajectories": len(scores),
        "wall_s": round(wall_s, 3),
        "scoring_s": round(emission.seconds, 3),
        "scores_per_s": round(len(scores) / emission.seconds, 1),
        "attempts": sum(score.attempts for score in scores),
        **dict(zip(("latency_p50_s", "latency_p95_s"), latencies, strict=True)),
        **dict(zip(("wait_p50_s", "wait_p95_s"), waits, strict=True)),
        "tokens": dict(tokens),
    }
