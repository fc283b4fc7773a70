"""`tidemill plan`: how large a run has to be, from stage times that were measured or are assumed."""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from common.config import RunConfig, load_config
from common.errors import ConfigError, TidemillError
from common.process.programs import run_main
from common.redis.client import URL_VARIABLE
from common.run.state import CONFIG_FILE
from services.console.check.model_folder import inspect_model
from services.console.launch.up import run_up
from services.console.options import PlanOptions, UpOptions
from services.console.plan.sizing import (
    Plan,
    Workers,
    needed_reward,
    needed_rollout,
)
from services.console.plan.stage_times import StageTimes, assumed_times, measured_times
from services.console.plan.view import print_plan
from services.console.run.connection import log_nothing
from services.console.run.folder import RunFolder, find_run, folder_of_runs, nearest
from services.console.status.attach import look
from services.console.status.bottleneck import Bottleneck
from services.console.status.folder_snapshot import read_folder
from services.console.status.snapshot import RunSnapshot

MEASURED_STEPS = 5
MEASUREMENT = "measurement"
WORKER_FIELDS = ("workers", "gpus", "metrics_port")
"""Of the sections `rollout` and `reward`: how many, not how fast each is."""


def plan(options: PlanOptions) -> None:
    """Print the plan.

    Raises:
        ConfigError: config or options are wrong, or nothing was measured yet.
    """
    log_nothing()
    if sum((options.run is not None, bool(options.assume), options.measure)) > 1:
        raise ConfigError("give one of --run, --measure and --assume: each says where the times come from.")
    config = load_config(options.config, options.overrides)
    found = make_plan(config, options)
    if options.as_json:
        print(json.dumps(found.as_dict(), indent=2))
    else:
        print_plan(Console(highlight=False), found)


def make_plan(config: RunConfig, options: PlanOptions) -> Plan:
    """The plan for a config, with the times that the options name."""
    model_bytes = inspect_model(config.model, needs_weights=False).weight_bytes
    workers = Workers(config.rollout.workers, config.reward.workers)
    if options.assume:
        return _plan(config, assumed_times(options.assume, config), workers, None, model_bytes)
    if options.measure:
        with tempfile.TemporaryDirectory(prefix="tidemill-plan-") as folder:
            run = measure(options, Path(folder))
            return _plan_from(config, run, model_bytes)
    runs = folder_of_runs(options.runs_dir)
    if options.run is not None:
        return _plan_from(config, find_run(options.run, runs), model_bytes)
    return _plan_from(config, latest_like(config, runs, options.config), model_bytes)


def _plan_from(config: RunConfig, run: RunFolder, model_bytes: int) -> Plan:
    snapshot = _snapshot(run)
    metrics = [point.metrics for point in snapshot.points if point.step > 0]
    evidence, steps = snapshot.evidence, [point.step + 1 for point in snapshot.points if point.step > 0]
    source = f"run {run.run_id}, steps {steps[0]} to {steps[-1]}" if steps else ""
    times = measured_times(metrics, evidence, run.path, source)
    if times is None:
        raise ConfigError(
            f"run {run.run_id} has no step yet that tells how long its stages take: the first step warms up. "
            "Wait for its second step, or give times with --assume."
        )
    now = Workers(evidence.num_workers.get("rollout", 0), evidence.num_workers.get("reward", 0))
    return _plan(config, times.scaled_to(config), now, snapshot.bottleneck, model_bytes)


def _plan(
    config: RunConfig, times: StageTimes, now: Workers, verdict: Bottleneck | None, model_bytes: int
) -> Plan:
    rollout = needed_rollout(config, times)
    # Rollout workers cost GPUs: reward workers are counted for those that there are.
    reward = needed_reward(config, times, now.rollout)
    return Plan(config, times, now, Workers(rollout, reward), verdict, model_bytes)


def _snapshot(run: RunFolder) -> RunSnapshot:
    """From the run's Redis, and where that is gone from its folder."""
    try:
        return run_main(look(run))
    except TidemillError:
        if run.config() is None:
            raise
        return read_folder(run)[0]


def latest_like(config: RunConfig, runs: Path, file: Path) -> RunFolder:
    """The newest run whose stages take as long as this config's would.

    Raises:
        ConfigError: there is none.
    """
    folders = sorted(runs.glob(f"*/{CONFIG_FILE}"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in folders:
        if path.parent.is_symlink():
            continue
        run = RunFolder(runs, path.parent.name)
        try:
            known = run.config()
        except ConfigError:
            continue  # of a release that knew other fields
        if known is not None and what_times_rest_on(known) == what_times_rest_on(config):
            return run
    raise ConfigError(
        f"no run in {nearest(runs)} was done with this config, so nothing was measured yet. Choose one:\n"
        f"  tidemill plan {file} --measure              does {MEASURED_STEPS} steps now, in a folder that is "
        "thrown away\n"
        f"  tidemill plan {file} --run RUN_ID           takes the times of another run\n"
        f"  tidemill plan {file} --assume reward=5s,rollout=2000tok/s,trainer=30s"
    )


def what_times_rest_on(config: RunConfig) -> dict[str, Any]:
    """The part of a config that says how long a step's work takes; how many share it is left out."""
    tree = config.model_dump(mode="json", include={"model", "data", "rollout", "reward"})
    for section in ("rollout", "reward"):
        for name in WORKER_FIELDS:
            tree[section].pop(name, None)
    trainer = config.trainer
    return tree | {
        "trainer": [trainer.policy, trainer.groups_per_step, trainer.group_size, trainer.mini_batches],
        "algorithm": trainer.algorithm.model_dump(mode="json"),
        "policy": [trainer.simulated.model_dump(), trainer.num_ranks, trainer.device],
    }


def measure(options: PlanOptions, folder: Path) -> RunFolder:
    """Do a few steps as `tidemill up` does, on a Redis of their own.

    Raises:
        ConfigError: the run failed; its own output has said why.
    """
    short = (
        f"trainer.steps={MEASURED_STEPS}",
        "trainer.evaluation.at_start=false",
        "trainer.evaluation.at_end=false",
        "trainer.evaluation.every=0",
        "trainer.tensorboard=false",
        "trainer.loggers=[]",
        "expect.eval_gain=null",
    )
    up = UpOptions(options.config, [*options.overrides, *short], MEASUREMENT, live=False, runs_dir=folder)
    address = os.environ.pop(URL_VARIABLE, None)  # nothing of it may stay on a server that others use
    try:
        with contextlib.redirect_stdout(sys.stderr):  # the plan alone goes to the output
            code = run_up(up)
    finally:
        if address is not None:
            os.environ[URL_VARIABLE] = address
    if code:
        raise ConfigError(f"the measurement did not end well (exit code {code}); see what it printed above.")
    return RunFolder(folder, MEASUREMENT)
