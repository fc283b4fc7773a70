"""The commands about a run as a whole. Each imports what it needs when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from tidemill.common.errors import ConfigError
from tidemill.services.console.options import (
    CheckOptions,
    ConvertOptions,
    DiffOptions,
    FailOnWarning,
    Json,
    ReplayOptions,
    RescoreOptions,
    RunId,
    RunsDir,
    UpOptions,
    WebOptions,
    flag,
    grouped,
    naming_the_run,
)


@grouped
def check(options: CheckOptions) -> None:
    """Find every mistake of a run before it starts, and say what the run will do.

    Reads the config, all rows of the datasets and the model folder, calls the reward functions once, and
    tries Redis if TIDEMILL_REDIS_URL is set. Where there are GPUs, or --gpus and --gpu-gib say which,
    computes what the run takes of them and of hosts, and what to set where it does not fit. Starts nothing.
    Exits with 2 where something is wrong.
    """
    if options.fields:
        from tidemill.services.console.check.fields import print_fields

        print_fields(str(options.config or ""))
        return
    from tidemill.services.console.check.explain import explain, print_findings
    from tidemill.services.console.check.memory import machine_named, print_memory
    from tidemill.services.console.check.preflight import examine

    if options.config is None:
        raise ConfigError("tidemill check needs a config file, or --fields.")
    machine = machine_named(options.gpus, options.gpu_gib, options.host_gib)
    if options.memory:
        print_memory(options.config, options.overrides, machine)
        return
    findings = examine(options.config, options.overrides, options.calls_reward, machine)
    if options.as_json:
        print_findings(findings)
    else:
        explain(findings, with_preset=options.explains)


@grouped
def convert(options: ConvertOptions) -> None:
    """Make a config from one of verl, TRL or prime-rl, with a list of what does not carry over.

    Reads verl's YAML or a shell script that starts it; TRL's GRPOConfig as YAML, JSON, arguments in a script
    or a call in a Python file; prime-rl's TOML. Runs nothing of it. Exits with 1 where what came out is
    refused.
    """
    from tidemill.services.console.convert.command import run_convert

    raise typer.Exit(run_convert(options))


@grouped
def up(options: UpOptions) -> None:
    """Do a whole run on this machine: Redis, trainer, rollout and reward workers, and a live view.

    Uses the server at TIDEMILL_REDIS_URL if that is set, and otherwise starts a private Redis whose data
    stays in the run's folder. Processes that die are started again. Ctrl-C stops the run so that it can be
    resumed.

    Exits with 0 when the run did what it should, 1 when it did not, 2 for a mistake in what it was given, and
    130 when it was stopped.
    """
    from tidemill.services.console.launch.up import run_up

    raise typer.Exit(run_up(options))


def status(run_id: RunId = None, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """Say once how a run is doing; a finished run shows its summary.

    Finds the run's Redis by itself on the machine of `tidemill up`, elsewhere through TIDEMILL_REDIS_URL.
    """
    from tidemill.services.console.status.attach import show_status

    show_status(run_id, as_json, runs_dir)


def report(
    run_id: RunId = None,
    as_json: Json = False,
    fails_on_warning: FailOnWarning = False,
    runs_dir: RunsDir = None,
) -> None:
    """Say what a finished run came to, from its commits: where `tidemill up` has not seen it to its end.

    Writes summary.json and reward.png into the run's folder. Exits with 1 if anything was lost, trained
    twice, or not as the config expects it.
    """
    from tidemill.services.console.status.report import show_report

    raise typer.Exit(show_report(run_id, as_json, runs_dir, fails_on_warning))


def top(run_id: RunId = None, runs_dir: RunsDir = None) -> None:
    """Watch a run live, from this machine or another, without touching it. Ctrl-C ends the watching only."""
    from tidemill.services.console.status.attach import watch

    watch(run_id, runs_dir)


def export(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="A new folder.", show_default=False)
    ],
    run_id: RunId = None,
    version: Annotated[
        str, typer.Option("--version", metavar="N|best|last", help="Which version of the run.")
    ] = "last",
    now: Annotated[bool, flag("--now", "Do it here, without asking for a worker.")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Write a version of a run as a Hugging Face folder: config, tokenizer and safetensors.

    Done by a worker of the run (`python -m tidemill.services.jobs RUN_ID`) where there is one, and here
    otherwise.
    """
    from tidemill.services.console.exports.export import export as export_version

    export_version(run_id, version, output, now, runs_dir)


def archive(
    run_id: RunId = None,
    check: Annotated[
        bool, flag("--check", "Archive nothing; read every file and compare its checksum.")
    ] = False,
    as_json: Json = False,
    runs_dir: RunsDir = None,
) -> None:
    """Write what a run's streams hold now into its archive: Parquet files in the run's folder.

    `tidemill up` does this at the end of a run by itself; this is for runs whose services were started one by
    one, or whose end was cut short. What is archived already is passed over.
    """
    from tidemill.services.console.exports.archive import archive as archive_run

    raise typer.Exit(archive_run(run_id, runs_dir, check, as_json))


@grouped
def web(options: WebOptions) -> None:
    """Look at runs in a browser: curves, runs compared, groups, completions token by token, steps, logs.

    Pages need nothing from the network, and write nothing. They listen on this machine alone, unless --host
    says otherwise; then, or with --token, browsers ask for a password: the token that is printed, or that in
    TIDEMILL_WEB_TOKEN.
    """
    from tidemill.services.console.web.server import serve

    serve(options)


app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")


@grouped
def rescore(options: RescoreOptions) -> None:
    """Score a run's history with another reward, and say how the two agree.

    Nothing is generated again and nothing of the run changes: real reward workers score its trajectories into
    a scores stream of their own, in a sandbox run. The report has agreement, rank correlation, the groups
    that would have had another best completion, and what it cost.
    """
    from tidemill.services.console.rescore.commands import rescore as rescore_run

    rescore_run(options)


@app.command(epilog="Example: tidemill replay step 412 arith-1")
@naming_the_run
@grouped
def step(options: ReplayOptions) -> None:
    """Train a committed step again, and compare it bit by bit with what was recorded.

    Restores the newest checkpoint before the step, replays the commits after it, and computes the step from
    the run's own records in the recorded micro-batches. Changes nothing of the run.

    Exits with 0 when loss, gradient norm, every other metric and the digest come out the same, else with 1.
    """
    from tidemill.services.console.compare.replay import replay_steps

    raise typer.Exit(replay_steps(options))


@grouped
def diff(options: DiffOptions) -> None:
    """Find the first step at which two runs differ, and why: data, versions, tokens, rewards, numerics.

    Compares step by step what both were trained on and what came out, and stops at the first step that
    differs by more than rounding. Exits with 0 when there is none, and 1 when there is.
    """
    from tidemill.services.console.compare.commands import show_diff

    raise typer.Exit(show_diff(options))
