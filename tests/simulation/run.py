"""Runs one schedule from its start to its verdict."""

import asyncio
import atexit
import contextlib
import contextvars
import gc
import itertools
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from tests.simulation import costs
from tests.simulation.faults import Injector
from tests.simulation.fleet import Fleet, names
from tests.simulation.history import Record
from tests.simulation.install import installed
from tests.simulation.invariants import Judge
from tests.simulation.schedule import Schedule
from tests.simulation.script_check import ScriptCheck, heard_by
from tests.simulation.watch import Watch
from tests.simulation.world import World
from tidemill.common.run.state import FINISHED
from tidemill.services.console.run.folder import RunFolder

PATIENCE_S = 400.0
"""Virtual time after the last fault in which a run has to reach its end."""
NUM_ROWS = 40
COLLECT_EVERY = 10
"""Schedules between two garbage collections: one takes as long as a short schedule."""
_COUNTER = itertools.count(1)


@dataclass
class Verdict:
    """The result of a schedule, which is good where `problem` is empty."""

    schedule: Schedule
    outcome: str = ""
    digest: str = ""
    violations: list[str] = field(default_factory=list)
    stall: str = ""
    faults: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    num_commands: int = 0
    trace: list[str] = field(default_factory=list)

    @property
    def problem(self) -> str:
        """The first thing that is wrong; empty where nothing is."""
        return self.violations[0] if self.violations else self.stall


def run(schedule: Schedule, is_traced: bool = False) -> Verdict:
    """Run a schedule in a folder of its own; the folder and unfinished tasks are gone afterwards."""
    with _folder() as folder, _without_complaints():
        verdict = Verdict(schedule)
        _freeze()
        _live(schedule, folder, verdict, is_traced)
        is_long = verdict.outcome == FINISHED and verdict.virtual_s > costs.allowed_s(schedule, 0.0)
        if is_long and schedule.faults and not verdict.problem:
            verdict.violations += _lateness(verdict, _undisturbed_s(replace(schedule, faults=())))
        if next(_COUNTER) % COLLECT_EVERY == 0:
            gc.collect()
    return verdict


def _lateness(verdict: Verdict, undisturbed_s: float) -> list[str]:
    allowed_s = costs.allowed_s(verdict.schedule, undisturbed_s)
    if verdict.virtual_s <= allowed_s:
        return []
    return [
        f"slow: the run took {verdict.virtual_s:.0f} s, {undisturbed_s:.0f} s without faults; "
        f"with them at most {allowed_s:.0f} s"
    ]


def _undisturbed_s(schedule: Schedule) -> float:
    """Virtual seconds that the run takes without faults; computed only where that can matter."""
    with _folder() as folder:
        verdict = Verdict(schedule)
        _live(schedule, folder, verdict, is_traced=False)
    return verdict.virtual_s


def _live(schedule: Schedule, folder: Path, verdict: Verdict, is_traced: bool) -> None:
    world = World(schedule.seed, folder, is_traced=is_traced, kept_commits=schedule.setup.kept_commits)
    world.cluster.shares_lines = schedule.setup.shares_lines
    if schedule.setup.parts:
        world.part_tokens = 2
    try:
        watch = Watch(world)
        with installed(world, watch):
            fleet = Fleet(world)
            _run(watch, fleet, schedule, verdict)
            fleet.outcome = fleet.outcome or "over"
            _end(world)
    finally:
        verdict.trace = world.trace


def _end(world: World) -> None:
    running = asyncio.events._get_running_loop()
    asyncio.events._set_running_loop(world.loop)
    try:
        world.loop.end(world.processes)
    finally:
        asyncio.events._set_running_loop(running)
    for process in world.processes:
        for task in process.tasks:
            task._log_destroy_pending = False


def _run(watch: Watch, fleet: Fleet, schedule: Schedule, verdict: Verdict) -> None:
    world = watch.world
    config = schedule.setup.config(inputs(), world.run_id, schedule.seed)
    judge = Judge(watch, config, schedule)
    scripts = ScriptCheck(world, watch.broken)

    def appended(record: Record) -> None:
        judge.see(record)
        scripts.see(record)

    world.on_append = appended
    world.cluster.sends = watch.sends
    world.cluster.watch = heard_by(watch.arrives, scripts.arrives)
    injector = Injector(world, fleet, config, schedule)
    RunFolder(world.folder, world.run_id).create(config)  # as `tidemill up` does, before Redis has the config
    world.cluster.server.apply([[b"SET", world.keys.config.encode(), config.model_dump_json().encode()]])
    context = contextvars.Context()
    for name, role in names(config):
        context.run(fleet.add, name, role)
    injector.arm()
    end_s = injector.quiet_at_s + PATIENCE_S
    world.loop.run(lambda: bool(fleet.outcome), end_s)
    verdict.outcome = fleet.outcome
    verdict.faults = injector.done
    verdict.faults["resumed"] += watch.num_resumed
    verdict.virtual_s = world.loop.now - 1000
    verdict.num_commands = len(world.cluster.server.log)
    judge.judge(fleet, injector, verdict)
    verdict.violations += scripts.judge()
    if not fleet.outcome:
        verdict.stall = f"stall: {judge.standing()}"
    elif fleet.outcome != FINISHED and not judge.may_end(fleet.outcome, injector.num_torn):
        verdict.stall = f"ended: {fleet.outcome}"
    verdict.digest = world.digest


@contextlib.contextmanager
def _without_complaints() -> Iterator[None]:
    """Suppress the warnings of coroutines that never ended when they are destroyed."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = hook


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A temporary folder, on a disk in memory where there is one."""
    memory = Path("/dev/shm")
    parent = str(memory) if memory.is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="tidemill-simulation-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@cache
def _freeze() -> None:
    """Leave objects of before out of garbage collections, and suppress warnings of unfinished coroutines."""
    atexit.register(setattr, sys, "unraisablehook", lambda _: None)
    gc.collect()
    gc.freeze()


@cache
def inputs() -> Path:
    """Data and tokenizer that all schedules of this process share."""
    from tests.support.models import write_tokenizer

    folder = Path(tempfile.mkdtemp(prefix="tidemill-simulation-inputs-"))
    (folder / "model").mkdir()
    write_tokenizer(folder / "model")
    for name, count in (("train", NUM_ROWS), ("many", 4), ("few", 2), ("eval", 3)):
        rows = [
            {"prompt": f"w{i % 29} w{i // 29}", "reward_model": {"ground_truth": str(i)}}
            for i in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
