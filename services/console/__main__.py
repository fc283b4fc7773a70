"""The `tidemill` command line. Wiring only: every command imports what it needs when it is called."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from common.errors import ConfigError, TidemillError
from services.console.cli.operations import app as dead
from services.console.cli.operations import archive, plan, web
from services.console.cli.options import ConfigFile, Json, Overrides, RunId, RunsDir
from services.console.cli.records import app as streams
from services.console.cli.records import step, timeline, trace
from services.console.cli.replays import app as replay
from services.console.cli.replays import diff, rescore

app = typer.Typer(
    name="tidemill",
    help="Reinforcement learning for language models: rollout, reward and trainer as processes of their own "
    "that meet in Redis Streams.\n\n"
    "Begin with: tidemill check CONFIG, then: tidemill up CONFIG",
    epilog="Example: tidemill up examples/arith/config.yaml --set trainer.steps=20",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command(epilog="Example: tidemill check examples/arith/config.yaml --set trainer.max_staleness=0")
def check(
    config: Annotated[
        Path | None, typer.Argument(help="The run's YAML file; with --fields, a section.", show_default=False)
    ] = None,
    overrides: Overrides = None,
    calls_reward: Annotated[
        bool, typer.Option("--call-reward", help="Also call the reward functions once, with the first row.")
    ] = False,
    fields: Annotated[
        bool, typer.Option("--fields", help="List all fields of a config instead, or of one SECTION.")
    ] = False,
) -> None:
    """Find every mistake of a run before it starts, and say what the run will do.

    Reads the config, all rows of the datasets, the model folder and the reward function, and tries Redis if
    TIDEMILL_REDIS_URL is set. Starts nothing. Exits with 2 where something is wrong.
    """
    from services.console.check.explain import explain
    from services.console.check.preflight import examine

    if fields:
        from services.console.reference.fields import print_fields

        print_fields(str(config or ""))
        return
    if config is None:
        raise ConfigError("tidemill check needs a config file, or --fields.")
    explain(examine(config, overrides or [], calls_reward))


@app.command(epilog="Example: tidemill up examples/arith/config.yaml --set trainer.steps=20 --run-id try-1")
def up(
    config: ConfigFile,
    overrides: Overrides = None,
    run_id: Annotated[
        str,
        typer.Option(
            "--run-id",
            metavar="ID",
            help="Name of the run. Without it: run_id of the config, else the config's folder and the time.",
            show_default=False,
        ),
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run that was stopped. Needs its id.")
    ] = False,
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="Live view; otherwise one line for each step.")
    ] = True,
    runs_dir: RunsDir = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port",
            metavar="PORT",
            min=0,
            max=65535,
            help="Also export the whole run for Prometheus on this port: /metrics, and /sd to find the rest.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Do a whole run on this machine: Redis, trainer, rollout and reward workers, and a live view.

    Uses the server at TIDEMILL_REDIS_URL if that is set, and otherwise starts a private Redis whose data
    stays in the run's folder. Processes that die are started again. Ctrl-C stops the run so that it can be
    resumed.

    Exits with 0 when the run did what it should, 1 when it did not, 2 for a mistake in what it was given, and
    130 when it was stopped.
    """
    from services.console.launch.up import UpOptions, run_up

    options = UpOptions(config, tuple(overrides or ()), run_id, resume, live, runs_dir, metrics_port)
    raise typer.Exit(run_up(options))


@app.command(epilog="Example: tidemill status --json")
def status(run_id: RunId = None, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """Say once how a run is doing; a finished run shows its summary.

    Finds the run's Redis by itself on the machine of `tidemill up`, elsewhere through TIDEMILL_REDIS_URL.
    """
    from services.console.status.attach import show_status

    show_status(run_id, as_json, runs_dir)


@app.command(epilog="Example: tidemill report arith-1 --json")
def report(run_id: RunId = None, as_json: Json = False, runs_dir: RunsDir = None) -> None:
    """Say what a finished run came to, from its commits: where `tidemill up` has not seen it to its end.

    Writes summary.json and reward.png into the run's folder. Exits with 1 if anything was lost, trained
    twice, or not as the config expects it.
    """
    from services.console.status.report import show_report

    raise typer.Exit(show_report(run_id, as_json, runs_dir))


@app.command(epilog="Example: tidemill top arith-20260131-120000")
def top(run_id: RunId = None, runs_dir: RunsDir = None) -> None:
    """Watch a run live, from this machine or another, without touching it. Ctrl-C ends the watching only."""
    from services.console.status.attach import watch

    watch(run_id, runs_dir)


@app.command(epilog="Example: tidemill export arith-20260131-120000 --version best -o my-model")
def export(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="A new folder.", show_default=False)
    ],
    run_id: RunId = None,
    version: Annotated[
        str, typer.Option("--version", metavar="N|best|last", help="Which version of the run.")
    ] = "last",
    now: Annotated[bool, typer.Option("--now", help="Do it here, without asking for a worker.")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Write a version of a run as a Hugging Face folder: config, tokenizer and safetensors.

    Done by a worker of the run (`python -m services.jobs RUN_ID`) where there is one, and here otherwise.
    """
    from services.console.exports.export import export as export_version

    export_version(run_id, version, output, now, runs_dir)


app.command(epilog="Example: tidemill diff arith-1 arith-2")(diff)
app.command(epilog="Example: tidemill plan examples/arith/config.yaml --run arith-1")(plan)
app.command(epilog="Example: tidemill archive arith-20260131-120000 --check")(archive)
app.command(epilog="Example: tidemill rescore arith-1 --reward my.py:fn --from-step 10 --to-step 20")(rescore)
app.command(epilog="Examples: tidemill trace 412  ·  tidemill trace 412.3 arith-1")(trace)
app.command(epilog="Example: tidemill step 412 arith-1 --full")(step)
app.command(epilog="Example: tidemill timeline --from-step 40 --to-step 45 -o trace.json")(timeline)

app.add_typer(
    replay,
    name="replay",
    help="Do again what was recorded: a step, or a stretch of trajectories.",
    no_args_is_help=True,
)
app.command(epilog="Example: tidemill web arith-20260131-120000")(web)
app.add_typer(
    dead,
    name="dead",
    help="Messages that nobody could process: list, show, put back, drop.",
    no_args_is_help=True,
)
app.add_typer(
    streams,
    name="streams",
    help="What a run has written: list, follow, show, search; from Redis or the archive.",
    no_args_is_help=True,
)


def main() -> None:
    """Run the command; mistakes of the user are answered in plain words."""
    try:
        app()
    except TidemillError as error:
        print(f"tidemill: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
