"""Every command of `tidemill`: its help, and the one function that does it.

Each imports what it needs when it is called, so that `--help` and a bad config are answered at once.
"""

import typer

from tidemill.common.errors import ConfigError
from tidemill.services.console.options import (
    ArchiveOptions,
    CheckOptions,
    ConvertOptions,
    DeadChoice,
    DiffOptions,
    DropOptions,
    EntryOptions,
    ExportOptions,
    GrepOptions,
    ReplayOptions,
    RescoreOptions,
    ShowDeadOptions,
    StatusOptions,
    StepOptions,
    TailOptions,
    TimelineOptions,
    TraceOptions,
    UpOptions,
    WebOptions,
    WeightsOptions,
    command,
)

app = typer.Typer(
    name="tidemill",
    help="Reinforcement learning for language models: rollout, reward and trainer as processes of their own "
    "that meet in Redis Streams.\n\n"
    "Begin with: tidemill check CONFIG, then: tidemill up CONFIG",
    epilog="Example: tidemill up examples/arith/config.yaml --set trainer.steps=20",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
streams = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
dead = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")


@command(app, "Example: tidemill check examples/arith/config.yaml --set trainer.max_staleness=0")
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
    if options.config is None:
        raise ConfigError("tidemill check needs a config file, or --fields.")
    from tidemill.services.console.check.explain import explain, print_findings
    from tidemill.services.console.check.memory import machine_named, print_memory
    from tidemill.services.console.check.preflight import examine

    machine = machine_named(options.gpus, options.gpu_gib, options.host_gib)
    if options.memory:
        print_memory(options.config, options.overrides, machine)
        return
    findings = examine(options.config, options.overrides, options.calls_reward, machine)
    if options.as_json:
        print_findings(findings)
    else:
        explain(findings, with_preset=options.explains)


@command(app, "Example: tidemill convert run_grpo.sh data.train_batch_size=256 -o config.yaml")
def convert(options: ConvertOptions) -> None:
    """Make a config from one of verl, TRL or prime-rl, with a list of what does not carry over.

    Reads verl's YAML or a shell script that starts it; TRL's GRPOConfig as YAML, JSON, arguments in a script
    or a call in a Python file; prime-rl's TOML. Runs nothing of it. Exits with 1 where what came out is
    refused.
    """
    from tidemill.services.console.convert.command import run_convert

    raise typer.Exit(run_convert(options))


@command(app, "Example: tidemill up examples/arith/config.yaml --set trainer.steps=20 --run-id try-1")
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


@command(app, "Example: tidemill status arith-1 --watch")
def status(options: StatusOptions) -> None:
    """Say how a run is doing; a finished run shows its summary.

    Finds the run's Redis by itself on the machine of `tidemill up`, elsewhere through TIDEMILL_REDIS_URL, and
    touches nothing. `--watch` shows the live view of `up`. `--report` is for a run whose end no `tidemill up`
    has seen: it computes the summary from the commits and writes summary.json and reward.png into the run's
    folder; it exits with 1 if anything was lost, trained twice, or not as the config expects it.
    """
    if options.watch and (options.report or options.as_json):
        raise ConfigError("--watch goes with neither --report nor --json.")
    if options.fails_on_warning and not options.report:
        raise ConfigError("--fail-on-warning goes with --report.")
    if options.watch:
        from tidemill.services.console.status.dashboard import watch

        watch(options)
    elif options.report:
        from tidemill.services.console.status.report import show_report

        raise typer.Exit(show_report(options))
    else:
        from tidemill.services.console.status.dashboard import show_status

        show_status(options)


@command(app, "Example: tidemill export arith-20260131-120000 --version best -o my-model")
def export(options: ExportOptions) -> None:
    """Write a version of a run as a Hugging Face folder: config, tokenizer and safetensors.

    Done by a worker of the run (`python -m tidemill.services.jobs RUN_ID`) where there is one, and here
    otherwise.
    """
    from tidemill.services.console.exports.export import export as export_version

    export_version(options)


@command(app, "Example: tidemill diff arith-1 arith-2")
def diff(options: DiffOptions) -> None:
    """Find the first step at which two runs differ, and why: data, versions, tokens, rewards, numerics.

    Compares step by step what both were trained on and what came out, and stops at the first step that
    differs by more than rounding. Exits with 0 when there is none, and 1 when there is.
    """
    from tidemill.services.console.compare.diff import show_diff

    raise typer.Exit(show_diff(options))


@command(app, "Example: tidemill archive arith-20260131-120000 --check")
def archive(options: ArchiveOptions) -> None:
    """Write what a run's streams hold now into its archive: Parquet files in the run's folder.

    `tidemill up` does this at the end of a run by itself; this is for runs whose services were started one by
    one, or whose end was cut short. What is archived already is skipped.
    """
    from tidemill.services.console.exports.archive import archive as archive_run

    raise typer.Exit(archive_run(options))


@command(app, "Example: tidemill weights arith-20260131-120000 --verify")
def weights(options: WeightsOptions) -> None:
    """List a run's versions on the disk: full ones, and deltas with what they change.

    With `--verify`, exits with 1 where one is not whole.
    """
    from tidemill.services.console.exports.weights import list_versions

    is_whole = list_versions(options)
    raise typer.Exit(0 if is_whole or not options.verify else 1)


@command(app, "Example: tidemill rescore arith-1 --reward my.py:fn --from-step 10 --to-step 20")
def rescore(options: RescoreOptions) -> None:
    """Score a run's history with another reward, and say how the two agree.

    Nothing is generated again and nothing of the run changes: real reward workers score its trajectories into
    a scores stream of their own, in a sandbox run. The report has agreement, rank correlation, the groups
    that would have had another best completion, and what it cost.
    """
    from tidemill.services.console.rescore.commands import rescore as rescore_run

    rescore_run(options)


@command(app, "Example: tidemill replay 412 arith-1")
def replay(options: ReplayOptions) -> None:
    """Train a committed step again, and compare it bit by bit with what was recorded.

    Restores the newest checkpoint before the step, replays the commits after it, and computes the step from
    the run's own records in the recorded micro-batches. Changes nothing of the run.

    Exits with 0 when loss, gradient norm, every other metric and the digest come out the same, else with 1.
    """
    from tidemill.services.console.compare.replay import replay_steps

    raise typer.Exit(replay_steps(options))


@command(app, "Examples: tidemill trace 412  ·  tidemill trace 412.3 arith-1")
def trace(options: TraceOptions) -> None:
    """Follow a ticket, or one sample, through the run: prompt, generation, reward, training, version.

    Who generated it with which version, every attempt at its score, its group, advantages, and the step and
    micro-batch that trained on it, or why none did.
    """
    from tidemill.services.console.records.trace import show_trace

    show_trace(options)


@command(app, "Example: tidemill step 412 arith-1 --full")
def step(options: StepOptions) -> None:
    """Show one step: what went in, in which micro-batches, where the time went, and what came out.

    Step N turned version N into version N + 1.
    """
    from tidemill.services.console.records.step import show_step

    show_step(options)


@command(app, "Example: tidemill timeline --from-step 40 --to-step 45 -o trace.json")
def timeline(options: TimelineOptions) -> None:
    """Write a stretch of a run for Perfetto: every sample from its queue to its training.

    Open the file at https://ui.perfetto.dev.
    """
    from tidemill.services.console.records.timeline import write_timeline

    write_timeline(options)


@command(app, "Example: tidemill web arith-20260131-120000")
def web(options: WebOptions) -> None:
    """Look at runs in a browser: curves, runs compared, groups, completions token by token, steps, logs.

    Pages need nothing from the network, and write nothing. They listen on this machine alone, unless --host
    says otherwise; then, or with --token, browsers ask for a password: the token that is printed, or that in
    TIDEMILL_WEB_TOKEN.
    """
    from tidemill.services.console.web.server import serve

    serve(options)


@command(streams, "Example: tidemill streams tail trajectories --reward 0.9.. --step 40..45 -n 20")
def tail(options: TailOptions) -> None:
    """Show the newest entries of a stream, or of a part of it.

    Ranges hold both ends; `A..` and `..B` are open, `A` is one number.
    """
    from tidemill.services.console.records.streams import show_tail

    show_tail(options)


@command(streams, "Examples: tidemill streams show  ·  tidemill streams show trajectories 412.3", "show")
def show_entry(options: EntryOptions) -> None:
    """Show everything that one entry holds; without one, list the streams.

    The list says how much there is of each and where, from when, and how far its readers are.
    """
    from tidemill.services.console.records.streams import show_entries, show_list

    if not options.stream:
        show_list(options)
    elif not options.entry:
        raise ConfigError(
            f"which entry of {options.stream}? Give its ID; "
            f"`tidemill streams tail {options.stream}` shows the newest."
        )
    else:
        show_entries(options)


@command(streams, "Example: tidemill streams grep 'as an AI' --ignore-case --reward 0.8.. -n 20")
def grep(options: GrepOptions) -> None:
    """Find text in prompts and completions, in judges' words and in errors; shown as it is found.

    Exits with 1 where nothing was found.
    """
    from tidemill.services.console.records.streams import show_hits

    raise typer.Exit(0 if show_hits(options) else 1)


@command(
    dead, "Examples: tidemill dead show --error schema  ·  tidemill dead show 1790000000000-0 --hex", "show"
)
def show_dead(options: ShowDeadOptions) -> None:
    """List the dead letters: when, from where, which sample, why; with an ID, all of that one.

    One letter is shown with the message that died, decoded where that is possible.
    """
    from tidemill.services.console.dead_letters import show_dead as show

    if len(options.ids) > 1:
        raise ConfigError("one letter is shown at a time; without an ID all are listed.")
    show(options)


@command(dead, "Example: tidemill dead requeue --all --stream prompts:eval")
def requeue(options: DeadChoice) -> None:
    """Put messages back where they belong, each exactly once.

    Refuses, with the reason, what can no longer matter: the trainer replaces the group of a dead ticket or
    trajectory by a fresh one. Exits with 1 when a letter that was named could not be put back.
    """
    from tidemill.services.console.dead_letters import change_entries

    raise typer.Exit(change_entries(options))


@command(dead, "Example: tidemill dead drop --all --error 'schema 2' --yes")
def drop(options: DropOptions) -> None:
    """Remove dead letters for good, after asking. Those that the trainer has yet to act on are kept."""
    from tidemill.services.console.dead_letters import change_entries

    raise typer.Exit(change_entries(options))


app.add_typer(streams, name="streams", help="What a run has written: show, follow, search.")
app.add_typer(dead, name="dead", help="Messages that could not be processed: show, put back, drop.")
