"""The commands about a run as a whole. Each imports what it needs when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from common.errors import ConfigError
from services.console.options import (
    CheckOptions,
    Json,
    PlanOptions,
    RunId,
    RunsDir,
    UpOptions,
    WebOptions,
    flag,
    grouped,
)


@grouped
def check(options: CheckOptions) -> None:
    """Find every mistake of a run before it starts, and say what the run will do.

    Reads the config, all rows of the datasets, the model folder and the reward function, and tries Redis if
    TIDEMILL_REDIS_URL is set. Starts nothing. Exits with 2 where something is wrong.
    """
    if options.fields:
        from services.console.reference.fields import print_fields

        print_fields(str(options.config or ""))
        return
    from services.console.check.preflight import examine
    from services.console.plan.explain import explain

    if options.config is None:
        raise ConfigError("tidemill check needs a config file, or --fields.")
    explain(examine(options.config, options.overrides, options.calls_reward))


@grouped
def up(options: UpOptions) -> None:
    """Do a whole run on this machine: Redis, trainer, rollout and reward workers, and a live view.

    Uses the server at TIDEMILL_REDIS_URL if that is set, and otherwise starts a private Redis whose data
    stays in the run's folder. Processes that die are started again. Ctrl-C stops the run so that it can be
    resumed.

    Exits with 0 when the run did what it should, 1 when it did not, 2 for a mistake in what it was given, and
    130 when it was stopped.
    """
    from services.console.launch.up import run_up

    raise typer.Exit(run_up(options))


def status(run_id: RunId = None, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """Say once how a run is doing; a finished run shows its summary.

    Finds the run's Redis by itself on the machine of `tidemill up`, elsewhere through TIDEMILL_REDIS_URL.
    """
    from services.console.status.attach import show_status

    show_status(run_id, as_json, runs_dir)


def report(run_id: RunId = None, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """Say what a finished run came to, from its commits: where `tidemill up` has not seen it to its end.

    Writes summary.json and reward.png into the run's folder. Exits with 1 if anything was lost, trained
    twice, or not as the config expects it.
    """
    from services.console.status.report import show_report

    raise typer.Exit(show_report(run_id, as_json, runs_dir))


def top(run_id: RunId = None, runs_dir: RunsDir = None) -> None:
    """Watch a run live, from this machine or another, without touching it. Ctrl-C ends the watching only."""
    from services.console.status.attach import watch

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

    Done by a worker of the run (`python -m services.jobs RUN_ID`) where there is one, and here otherwise.
    """
    from services.console.exports.export import export as export_version

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
    from services.console.exports.archive import archive as archive_run

    raise typer.Exit(archive_run(run_id, runs_dir, check, as_json))


@grouped
def plan(options: PlanOptions) -> None:
    """Say how many workers, how much memory and disk a run needs, from the times of its stages.

    The times are those of the newest run with this config, unless told otherwise. The formulas are in
    docs/operations/sizing.md; each is shown with its numbers.
    """
    from services.console.plan.plan import plan as print_plan

    print_plan(options)


@grouped
def web(options: WebOptions) -> None:
    """Look at runs in a browser: curves, groups, completions token by token, steps, dead letters.

    Pages are read only, and need nothing from the network. They listen on this machine alone, unless --host
    says otherwise; then the printed address carries a token that browsers must show.
    """
    from services.console.web.server import serve

    serve(options)
