"""`tidemill up`: checks and names a run on this machine, before anything of it is started.

`prepare` finds everything that can be wrong first; the `LocalRun` that it returns does the rest
(`local_run.py`).
"""

import os
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tidemill.common.command_line import command_line
from tidemill.common.config import RunConfig
from tidemill.common.config.changes import FieldChange, changed_fields
from tidemill.common.data.prompt_lengths import with_steps
from tidemill.common.errors import ConfigError
from tidemill.common.process.gpus import count_gpus
from tidemill.common.process.privacy import hide_memory
from tidemill.common.process.programs import run_main
from tidemill.common.process.service import METRICS_HOST_VARIABLE
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.run.hub import check_model_on_hub
from tidemill.common.run.state import (
    CONFIG_FILE,
    FAILED,
    FINISHED,
    METRICS_FILE,
    RUNNING,
    STEP,
    STOPPED,
    read_records,
    run_exists,
)
from tidemill.common.run.weight_files import folder_versions
from tidemill.common.wire.keys import Keys
from tidemill.services.console.check.placement import gpus_here, place
from tidemill.services.console.check.preflight import examine
from tidemill.services.console.commands import UpOptions
from tidemill.services.console.look.report import read_report
from tidemill.services.console.look.snapshot import CHECKPOINTS_FOLDER
from tidemill.services.console.run.end import RunEnd, read_end
from tidemill.services.console.run.folder import (
    LATEST,
    RunFolder,
    connected,
    folder_of_runs,
    nearest,
    new_run_id,
)
from tidemill.services.console.up.forks import ForkServer
from tidemill.services.console.up.local_run import LocalRun
from tidemill.services.console.up.specs import ServiceSpec, exporter_spec, service_specs
from tidemill.services.console.up.views import View


def run_up(
    options: UpOptions,
    specs_of: Callable[[RunConfig], Sequence[ServiceSpec]] = service_specs,
    server: ForkServer | None = None,
) -> int:
    """Do a run from its checks to its report; returns the exit code.

    `specs_of` gives the services to start: all of the config's, except in tests. Those that load torch are
    forked from `server`, where there is one.
    """
    hide_memory()  # its environment has the secrets of all services
    run = prepare(options, Console(highlight=False), specs_of)
    if any(spec.loads_torch for spec in run.specs):
        run.server = server
    elif server is not None:
        # It holds torch in memory, which nobody needs.
        server.close()
    code = run_main(run.go())
    if code or not options.fails_on_warning:
        return code
    report = read_report(run.folder) or {}
    if report.get("warnings"):
        print("tidemill up: a metric left its healthy range (--fail-on-warning)", file=sys.stderr)
        return 1
    return code


def prepare(
    options: UpOptions,
    console: Console,
    specs_of: Callable[[RunConfig], Sequence[ServiceSpec]] = service_specs,
    config: RunConfig | None = None,
    view: View | None = None,
) -> LocalRun:
    """The run, checked and ready to go; `config` takes the place of the file that the options name.

    Raises:
        TidemillError: it cannot start as it is. Nothing was started, and no folder made.
    """
    runs = folder_of_runs(options.runs_dir)
    if options.run_id:
        # At once, since what follows takes seconds; and again below, for the id that is not given here.
        _check_id(options, RunFolder(runs, Keys(options.run_id).run_id))
    findings = examine(config or options.config, options.overrides)
    is_simulated = findings.config.trainer.policy == "simulated"
    if findings.model is not None and findings.model.is_remote and not is_simulated:
        # Before anything has the run's id. The trainer is on this machine, and needs it here.
        check_model_on_hub(findings.config.model.path)
    # What is still open in the config: `trainer.steps` from epochs, GPUs, and the run's id.
    config = with_steps(findings.config)
    config, placement = place(config, gpus_here(count_gpus()))
    config = config.model_copy(update={"run_id": _name_run(options, config, runs)})
    folder = RunFolder(runs, Keys(config.run_id).run_id)
    replaces = _check_id(options, folder)
    changes = _check_changes(options, config, folder)
    is_finished = options.resume and _has_finished(folder, config.trainer.steps)
    specs = list(specs_of(config))
    if options.metrics_port is not None:
        if not is_finished:  # else nothing is started
            _check_port(options.metrics_port)
        specs.append(exporter_spec(config, options.metrics_port))
    resume_command = options.command(config.run_id, resume=True)
    is_live = options.live and console.is_terminal and not is_finished
    if not is_finished:
        for line in placement:
            console.print(Text(line), soft_wrap=True)
        for warning in config.warnings:
            console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    for change in changes:
        console.print(Text(f"changed  {change}"), style="yellow", soft_wrap=True)
    if replaces:
        console.print("begins again: the run with this id ended before its first step", soft_wrap=True)
    console.print(f"run [bold cyan]{config.run_id}[/]  in {nearest(folder.path)}", soft_wrap=True)
    return LocalRun(
        config,
        folder,
        specs,
        console,
        is_live=is_live,
        resume_command=resume_command,
        view=view,
        is_finished=is_finished,
        replaces=replaces,
    )


def _name_run(options: UpOptions, config: RunConfig, runs: Path) -> str:
    run_id = options.run_id or config.run_id
    if run_id:
        return run_id
    if options.resume:
        latest = runs / LATEST
        if not latest.is_symlink():
            raise ConfigError(
                f"--resume needs to know which run, and {nearest(runs)} has none. Give its id with --run-id, "
                "and its folder of runs with --runs-dir."
            )
        name = os.readlink(latest)
        raise ConfigError(
            f"--resume needs to know which run; the latest is {name}:\n  {options.command(name, resume=True)}"
        )
    return new_run_id(options.config)


def _check_id(options: UpOptions, folder: RunFolder) -> bool:
    """A new run needs an id that no other has, and a resumed one an id that a run has which is over.

    Returns whether a new run replaces the one with this id, which ended before its first step.
    """
    is_in_redis = _is_in_redis(folder)
    exists = folder.path.exists() or is_in_redis
    end = read_end(folder)
    if exists:
        _refuse_running(options, folder, end)
    if options.resume:
        if not exists:
            raise ConfigError(
                f"there is no run {folder.run_id} to resume: {nearest(folder.path)} does not exist. "
                f"Start it with\n  {options.command(folder.run_id, resume=False)}"
            )
        return False
    if not is_in_redis and _has_no_step(folder, end):
        return True
    if exists:
        where = f"{nearest(folder.path)}" if folder.path.exists() else f"the Redis at {URL_VARIABLE}"
        raise ConfigError(
            f"run {folder.run_id} exists already, in {where}. To continue it, say so:\n"
            f"  {options.command(folder.run_id, resume=True)}\n"
            "or give the new run another id with --run-id."
        )
    return False


def _is_in_redis(folder: RunFolder) -> bool:
    """Whether the Redis that the environment names has the run; a Redis of the run's own is in its folder."""

    async def exists_at(url: str) -> bool:
        async with connected(url) as broker:
            return await run_exists(broker, Keys(folder.run_id))

    url = os.environ.get(URL_VARIABLE)
    return run_main(exists_at(url)) if url else False


def _refuse_running(options: UpOptions, folder: RunFolder, end: RunEnd) -> None:
    """Raises ConfigError: another process of this machine does the run now."""
    # Of a launcher on another machine nothing is certain: it may have died right after it wrote `running`.
    is_here = end.host == socket.gethostname() and end.pid != os.getpid()
    if end.status == RUNNING and is_here:
        watch = command_line("status", folder.run_id, "--watch", *_runs_dir_words(options))
        raise ConfigError(
            f"run {folder.run_id} is {end.lines[0]}. Watch it with\n  {watch}\n"
            f"Stop it with Ctrl-C in its terminal, or with kill -TERM {end.pid}; it can be resumed then. "
            "A new run needs another id (--run-id)."
        )


def _runs_dir_words(options: UpOptions) -> list[str]:
    return ["--runs-dir", str(options.runs_dir)] if options.runs_dir else []


def _has_no_step(folder: RunFolder, end: RunEnd) -> bool:
    """Whether a run ended in order before its first step: nothing is lost with it."""
    # Without a launcher's process nobody has written how it ended: `read_end` has guessed.
    has_ended_in_order = end.status in (FAILED, STOPPED) and end.pid != 0
    if not has_ended_in_order or end.steps:
        return False
    # What the trainer has left counts too: `steps` is only what the launcher saw last. A checkpoint of
    # version 0 has no step.
    has_record = any(record["kind"] == STEP for record in read_records(folder.path / METRICS_FILE))
    has_checkpoint = any(version > 0 for version in folder_versions(folder.path / CHECKPOINTS_FOLDER))
    return not has_record and not has_checkpoint


def _has_finished(folder: RunFolder, steps: int) -> bool:
    """Whether a run has done so many steps, evaluations included, and has its summary."""
    report = read_report(folder)
    return report is not None and read_end(folder).status == FINISHED and int(report.get("steps", 0)) >= steps


def _check_changes(options: UpOptions, config: RunConfig, folder: RunFolder) -> list[FieldChange]:
    """The fields that a resumed run has other values of from now on.

    Raises:
        ConfigError: a run cannot change one of them, or has more steps than it shall have.
    """
    before = folder.config() if options.resume else None
    if before is None:
        return []
    changes = changed_fields(before, config)
    refused = [change for change in changes if change.refusal]
    if refused:
        lines = "\n".join(f"  {change} ({change.refusal})" for change in refused)
        raise ConfigError(
            f"run {folder.run_id} cannot be resumed with other values of {len(refused)} field(s):\n{lines}\n"
            f"Resume it with the values it was started with ({nearest(folder.path / CONFIG_FILE)}), or start "
            "a new run."
        )
    done = sum(record["kind"] == STEP for record in read_records(folder.path / METRICS_FILE))
    if config.trainer.steps < done:
        raise ConfigError(
            f"run {folder.run_id} has {done} committed steps, more than trainer.steps = "
            f"{config.trainer.steps}: steps cannot be taken back. Give at least as many, or start a new run."
        )
    return changes


def _check_port(port: int) -> None:
    """Find the exporter's port in use before anything starts."""
    host = os.environ.get(METRICS_HOST_VARIABLE, "127.0.0.1")
    try:
        # Closed at once: if another process takes it before the exporter starts, that is found only then.
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise ConfigError(
            f"the exporter cannot serve metrics on {host}:{port}: {error.strerror}. Set --metrics-port to a "
            "free port, or to 0 to take any."
        ) from None
