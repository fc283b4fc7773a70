"""Prints a plan: the times of the stages, the formulas with their numbers, and what the run needs."""

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tidemill.common.config import RunConfig, load_config
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.process.programs import run_main
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.run.prompt_lengths import with_steps
from tidemill.common.run.state import CONFIG_FILE
from tidemill.services.console.check.model_folder import inspect_model
from tidemill.services.console.launch.up import run_up
from tidemill.services.console.options import PlanOptions, UpOptions
from tidemill.services.console.plan.sizing import (
    HEAD_ROOM,
    Plan,
    Workers,
    archive_backlog,
    commits_held,
    disk_bytes,
    least_step,
    limit_of_scores,
    needed_reward,
    needed_rollout,
    records_held,
    redis_bytes,
    slowest_other,
    step_time,
    time_for_scores,
)
from tidemill.services.console.plan.stage_times import StageTimes, assumed_times, measured_times
from tidemill.services.console.run.folder import RunFolder, find_run, folder_of_runs, log_nothing, nearest
from tidemill.services.console.status.attach import look
from tidemill.services.console.status.bottleneck import Bottleneck
from tidemill.services.console.status.snapshot import RunSnapshot, read_folder
from tidemill.services.console.text.formats import NOTHING, plural, short, size
from tidemill.services.console.text.tables import listing


def print_plan(console: Console, plan: Plan) -> None:
    """For people."""
    console.print(Text.assemble(("times  ", "bold"), plan.times.source), soft_wrap=True)
    console.print()
    console.print(_stages(plan))
    console.print(_verdict(plan), soft_wrap=True)
    console.print()
    needs = Table.grid(padding=(0, 2))
    needs.add_column(style="bold", no_wrap=True)
    needs.add_column(overflow="fold")
    for name, text in _needs(plan):
        needs.add_row(name, text)
    console.print(needs)


def _stages(plan: Plan) -> Table:
    now, needed, more = plan.step(plan.now), plan.step(plan.needed), plan.one_more
    titles = ("stage", "workers", "seconds", "needed", "seconds", "step with one more")
    table = listing(titles, titles[1:])
    for role in ("rollout", "reward"):
        table.add_row(
            role,
            str(getattr(plan.now, role)),
            short(getattr(now, f"{role}_s")),
            str(getattr(plan.needed, role)),
            short(getattr(needed, f"{role}_s")),
            f"{short(more[role].step_s)} s",
        )
    table.add_row("trainer", "1", short(now.trainer_s), "1", short(needed.trainer_s), NOTHING)
    table.add_row("Redis", "1", short(now.redis_s), "1", short(needed.redis_s), NOTHING)
    table.add_row("staleness", "", short(now.way_s), "", short(needed.way_s), NOTHING)
    table.add_row(Text("a step", "bold"), "", short(now.step_s), "", short(needed.step_s), NOTHING)
    if plan.times.step_s:
        table.add_row("  as measured", "", short(plan.times.step_s), "", "", "")
    return table


def _verdict(plan: Plan) -> Text:
    if plan.verdict is not None:
        return Text.assemble(("slowest  ", "bold magenta"), f"{plan.verdict.text}. {plan.verdict.advice}")
    words = {
        "staleness": "no stage is: tickets take longer on their way than max_staleness allows. Raise "
        "trainer.max_staleness, or make generation or scores faster",
        "trainer": "the trainer; more workers would not help",
    }
    return Text.assemble(("slowest  ", "bold magenta"), words.get(plan.bottleneck, plan.bottleneck))


def _needs(plan: Plan) -> list[tuple[str, str]]:
    config, times = plan.config, plan.times
    lines = [("rollout", _rollout(plan)), ("reward", _reward(plan))]
    if limit := _limit(plan):
        lines.append(("", limit))
    lines.append(("staleness", _staleness(plan)))
    step = plan.step(plan.now)
    lines.append(("idle", f"trainer {step.trainer_idle:.0%}, rollout {step.rollout_idle:.0%} of a step"))
    memory = redis_bytes(config, times.record_bytes)
    waiting = archive_backlog(config, times.record_bytes)
    backlog = f"; {size(waiting)} that wait for the archive" if waiting else ""
    each = f"{size(times.record_bytes)} each" if times.record_bytes else "of full length"
    lines.append(
        (
            "Redis",
            f"{size(memory)}: {records_held(config):,} trajectories and scores, {each}, and the commits of "
            f"{commits_held(config):,} steps{backlog}. maxmemory of at least {size(2 * memory)}",
        )
    )
    disk = disk_bytes(config, times, plan.model_bytes)
    parts = ", ".join(f"{name} {size(count)}" for name, count in disk.items() if count)
    lines.append(("disk", f"{size(sum(disk.values()))}: {parts}" if parts else "not known before a run"))
    return lines


def _rollout(plan: Plan) -> str:
    times, least_s = plan.times, least_step(plan.config, plan.times)
    work = f"{times.completions:,.0f} completions x {times.completion_tokens:,.0f} tokens"
    speed = f"{times.rollout_tokens_per_s:,.0f} tok/s x {short(least_s)} s that a step takes anyhow"
    return f"{plural(plan.needed.rollout, 'worker')}: {work} / ({speed})"


def _reward(plan: Plan) -> str:
    config, times, now = plan.config, plan.times, plan.now.rollout
    speed = f"{short(times.scores_per_s)} scores/s x {short(time_for_scores(config, times, now))} s"
    tail = f"mean {short(times.score_s)} s, 95 % below {short(times.score_p95_s)} s"
    return (
        f"{plural(plan.needed.reward, 'worker')}: {times.completions:,.0f} scores / ({speed}), where the "
        f"slowest other takes {short(slowest_other(config, times, now))} s, less {HEAD_ROOM:.0%} head room "
        f"and the tail of scores ({tail})"
    )


def _limit(plan: Plan) -> str:
    """Where the run's limits allow fewer scores than are needed: workers cannot help."""
    name, per_s = limit_of_scores(plan.config, plan.times)
    wanted = plan.times.completions / max(1e-9, slowest_other(plan.config, plan.times, plan.now.rollout))
    if not name or per_s >= wanted:
        return ""
    return (
        f"the limits of {name} allow {per_s:.3g} scores/s, {wanted:.3g} are needed: raise them "
        f"(reward.rewards.{name}.{plan.config.reward.named[name].kind}.limits); more workers would not help"
    )


def _staleness(plan: Plan) -> str:
    k, times = plan.config.trainer.max_staleness, plan.times
    if k == 0:
        alone = step_time(plan.config, times, Workers(max(1, plan.now.rollout), max(1, plan.now.reward)))
        overlapped_s = max(alone.rollout_s, alone.reward_s, times.trainer_s + times.redis_s)
        return (
            f"max_staleness 0: the stages take turns. With 1 they overlap, and a step would take "
            f"{short(overlapped_s)} s at best"
        )
    way_s = times.generation_s + times.score_p95_s + times.trainer_s + times.redis_s
    return (
        f"max_staleness {k}: a ticket's way of {short(way_s)} s over {1 + k} steps: none is shorter than "
        f"{short(way_s / (1 + k))} s"
    )


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
    config = with_steps(load_config(options.config, options.overrides))
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
        "trainer": [trainer.policy, trainer.groups_per_step, trainer.group_size],
        "updates": [trainer.mini_batches, trainer.passes],
        "algorithm": trainer.algorithm.model_dump(mode="json"),
        "policy": [trainer.simulated.model_dump(), trainer.num_ranks, trainer.device],
    }


def measure(options: PlanOptions, folder: Path) -> RunFolder:
    """Do a few steps as `tidemill up` does, on a Redis of their own.

    Raises:
        ConfigError: the run failed; its own output has said why.
    """
    short = (
        "trainer.epochs=null",
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
