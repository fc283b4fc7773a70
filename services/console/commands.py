"""Every command of `tidemill`: a dataclass with its help and its options, and the function that does it.

The function is named, and imported when its command is called, so that `--help` is answered at once: nothing
heavy is imported here. It gets the dataclass, and returns the exit code, or None for 0. What it raises as a
TidemillError is printed, and its exit code is the command's.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field, fields
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, dataclass_transform, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from tidemill.common.command_line import command_line
from tidemill.common.errors import ConfigError

Kind = TypeVar("Kind", bound=type)


class FlagsWithoutValue:
    """Shows flags, `--help` among them, as they are typed; typer writes `<bool>` after them."""

    def get_params(self, ctx: Any) -> Any:
        """The parameters, as the library makes them."""
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return parameters


class Command(FlagsWithoutValue, TyperCommand):
    """A command of ours."""

    def parse_args(self, ctx: Any, args: Any) -> Any:
        """The arguments, as the library parses them; where that fails over the id of a run, the message says
        which option takes it."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # its class is in a private module of the library
            takes_option = any("--run" in parameter.opts for parameter in self.params)
            if takes_option and "--run" not in words and hasattr(error, "message"):
                error.message += self._hint_of_run(words)
            raise

    def _hint_of_run(self, words: list[str]) -> str:
        folders = [word.partition("=")[2] for word in words if word.startswith("--runs-dir=")]
        folders += [folder for word, folder in pairwise(words) if word == "--runs-dir"]
        runs = Path(folders[-1]) if folders else usual_runs()
        return "".join(hint_of_run(word, runs) for word in dict.fromkeys(words) if not word.startswith("-"))


class Group(FlagsWithoutValue, TyperGroup):
    """Commands with a first word in common."""


app = typer.Typer(
    cls=Group,
    name="tidemill",
    help="Reinforcement learning for language models: rollout, reward and trainer as processes of their own "
    "that meet in Redis Streams.\n\n"
    f"Begin with: {command_line('check', 'CONFIG')}, then: {command_line('up', 'CONFIG')}",
    epilog=f"Example: {command_line('up', 'examples/arith/config.yaml')} --set trainer.steps=20",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
GROUPS = {"": app}
"""The typer app of each group, by the first word of its commands; "" has the commands of one word."""
for _name, _help in (
    ("streams", "What a run has written: show, follow, search."),
    ("dead", "Messages that could not be processed: show, put back, drop."),
):
    GROUPS[_name] = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode="markdown")
    app.add_typer(GROUPS[_name], name=_name, help=_help)


def option(name: str, text: str, default: Any = MISSING, metavar: str | None = None, **more: Any) -> Any:
    """A field that is an option; a default that is empty is not shown."""
    is_shown = default is not MISSING and bool(default)
    names = (name, *more.pop("short", ()))
    return _field(typer.Option(*names, help=text, metavar=metavar, show_default=is_shown, **more), default)


def argument(text: str, default: Any = MISSING, metavar: str | None = None, **more: Any) -> Any:
    return _field(typer.Argument(help=text, metavar=metavar, show_default=False, **more), default)


def _field(info: Any, default: Any) -> Any:
    kind = {"default_factory": list} if default == [] else {"default": default}
    return field(**kind, metadata={"typer": info})


@dataclass_transform(frozen_default=True, kw_only_default=True)
def command(name: str, function: str, *examples: str) -> Callable[[Kind], Kind]:
    """Make a class a frozen dataclass, and a command. Where the run is an argument, a hidden `--run` is
    accepted too, as users expect it of every command.

    Args:
        name: name of the command; of two words, the first is its group
        function: `module:name`, the module within the console
        examples: what may follow the name
    """

    def add(kind: Kind) -> Kind:
        dataclass(frozen=True, kw_only=True)(kind)

        def run(**values: Any) -> None:
            named = values.pop("run_option", None)
            run_id = values.get("run_id")
            if named and run_id and named != run_id:
                raise ConfigError(f"two runs are named, {run_id} and --run {named}; give one of them.")
            if named:
                values["run_id"] = named
            module, _, attribute = function.partition(":")
            do = getattr(import_module(f"tidemill.services.console.{module}"), attribute)
            raise typer.Exit(do(kind(**values)) or 0)

        # What has to be given comes first, and the folder of runs, which is rarely given, last.
        parameters = list(_parameters(kind))
        parameters.sort(key=lambda item: (item.default is not item.empty, item.name == "runs_dir"))
        run.__doc__ = kind.__doc__
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        group, _, last = name.rpartition(" ")
        typed = command_line(*name.split())
        lines = "  ·  ".join(f"{typed} {example}" for example in examples)
        GROUPS[group].command(last, cls=Command, epilog=f"Example{'s' * (len(examples) > 1)}: {lines}")(run)
        return kind

    return add


def _parameters(kind: type) -> Iterator[inspect.Parameter]:
    """The fields of a dataclass as typer reads them from a function's signature."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(kind)
    hidden: Any = Annotated[str | None, typer.Option("--run", hidden=True, autocompletion=runs_here)]
    for item in (item for item in fields(kind) if item.init):
        default = inspect.Parameter.empty if item.default is MISSING else item.default
        info = item.metadata["typer"]
        default = [] if item.default_factory is list else default
        yield inspect.Parameter(
            item.name, keyword, default=default, annotation=Annotated[hints[item.name], info]
        )
        if item.name == "run_id" and isinstance(info, typer.models.ArgumentInfo):
            yield inspect.Parameter("run_option", keyword, default=None, annotation=hidden)


def usual_runs() -> Path:
    """The folder of runs where none is given."""
    return Path(os.environ.get("TIDEMILL_RUNS_DIR", "runs"))


def hint_of_run(word: str, runs: Path) -> str:
    """A sentence for a word that is a run, given where a command expects something else; else nothing."""
    is_run = word not in (".", "..") and "/" not in word and (runs / word / "config.yaml").is_file()
    return f" {word} is a run: give it as --run {word}." if is_run else ""


def runs_here(incomplete: str) -> list[str]:
    """Ids of the runs in the folder of runs, for a shell that completes one."""
    runs = usual_runs()
    if not runs.is_dir():
        return []
    folders = (path for path in runs.iterdir() if path.is_dir() and not path.name.startswith("."))
    return sorted(path.name for path in folders if path.name.startswith(incomplete))


_RUN_TEXT = "The run, by its id or folder; without it, TIDEMILL_RUN_ID, else runs/latest."
_RUNS_DIR_TEXT = "Folder of all runs. Without it: TIDEMILL_RUNS_DIR, else ./runs."


def run_argument(text: str = _RUN_TEXT) -> Any:
    return argument(text, None, autocompletion=runs_here)


def run_option() -> Any:
    """The run as an option, for commands whose arguments mean something else."""
    return option("--run", _RUN_TEXT, None, "RUN_ID", autocompletion=runs_here)


def runs_dir_option() -> Any:
    return option("--runs-dir", _RUNS_DIR_TEXT, None, "FOLDER")


def json_flag(text: str = "Print JSON, for programs.") -> Any:
    return option("--json", text, False)


def overrides_option(text: str = "Override one field, such as trainer.steps=20. May be repeated.") -> Any:
    return option("--set", text, [], "FIELD=VALUE")


@dataclass(frozen=True, kw_only=True)
class OfRun:
    """A command on one run.

    Example: `status arith-1 --runs-dir /data/runs` has `run_id` "arith-1" and that folder.
    """

    run_id: str | None = run_argument()
    runs_dir: Path | None = runs_dir_option()  # noqa: RUF009, it makes a field


_GPUS_TEXT = "Number of GPUs of the whole run, to compute its memory. Without it: those of this machine."
_CALL_TEXT = "Call reward functions with the first row; no servers."
_MEMORY_TEXT = "Only compute the memory that the run takes; of the model, config.json is enough."
_MACHINE_TEXT = (
    "Only examine and measure this machine, in a minute: GPUs, ranks, memory, disk; without GPUs its CPU."
)
_GIB: dict[str, Any] = {"default": None, "metavar": "GIB", "min": 1.0}


@command("check", "check.explain:check", "examples/arith/config.yaml --set trainer.max_staleness=0")
class CheckOptions:
    """Find every mistake of a run before it starts, and say what the run will do.

    Reads the config, all rows of the datasets and the model folder, calls the reward functions once, and
    tries Redis if TIDEMILL_REDIS_URL is set. Where there are GPUs, or --gpus and --gpu-gib say which,
    computes the memory that the run takes, and what to set where it does not fit. Starts no service.
    Exits with 2 where something is wrong.
    """

    config: Path | None = argument("The run's YAML file; with --fields, a section.", None)
    overrides: list[str] = overrides_option()
    calls_reward: bool = option("--call-reward/--no-call-reward", _CALL_TEXT, True)
    explains: bool = option(
        "--explain", "Also list what the preset of the algorithm sets, field by field.", False
    )
    memory: bool = option("--memory", _MEMORY_TEXT, False)
    machine: bool = option("--gpu", _MACHINE_TEXT, False)
    gpus: int | None = option("--gpus", _GPUS_TEXT, None, "N", min=1, max=100_000)
    gpu_gib: float | None = option("--gpu-gib", "Memory of each GPU. Without it: this machine's.", **_GIB)
    host_gib: float | None = option("--host-gib", "Memory of each host. Without it: this machine's.", **_GIB)
    fields: bool = option("--fields", "List all fields of a config instead, or of one SECTION.", False)
    as_json: bool = json_flag()


@command("convert", "convert.command:run_convert", "run_grpo.sh data.train_batch_size=256 -o config.yaml")
class ConvertOptions:
    """Make a config from one of verl, TRL or prime-rl, with a list of what does not carry over.

    Reads verl's YAML or a shell script that starts it; TRL's GRPOConfig as YAML, JSON, arguments in a script
    or a call in a Python file; prime-rl's TOML. Runs none of them. Exits with 1 where the new config is
    refused.
    """

    file: Path = argument("A YAML, JSON, TOML or Python file, or a shell script.", metavar="FILE")
    options: list[str] = argument(
        "Further options, which win: key=value; for a script also NAME=value of its variables.",
        [],
        "KEY=VALUE",
    )
    project: Literal["verl", "trl", "prime-rl"] | None = option(
        "--from", "The project that FILE is for. Without it: recognized from the file.", None
    )
    output: Path | None = option("--output", "Write the config here.", None, "FILE", short=["-o"])


_RUN_NAME_TEXT = "Name of the run. Without it: run_id of the config, else the config's folder and the time."
_PORT_TEXT = "Also export the whole run for Prometheus on this port: /metrics, and /sd to find the rest."


@command("up", "up.command:up", "examples/arith/config.yaml --set trainer.steps=20 --run-id try-1")
class UpOptions:
    """Do a whole run on this machine: Redis, trainer, rollout and reward workers, and a live view.

    Uses the server at TIDEMILL_REDIS_URL if that is set, and otherwise starts a private Redis whose data
    stays in the run's folder. Processes that die are started again. Ctrl-C stops the run so that it can be
    resumed.

    Exits with 0 when the run did what it should, 1 when it did not, 2 for a mistake in what it was given, and
    130 when it was stopped.
    """

    config: Path = argument("The run's YAML file.")
    overrides: list[str] = overrides_option()
    run_id: str = option("--run-id", _RUN_NAME_TEXT, "", "ID")
    resume: bool = option("--resume", "Continue a run that was stopped. Needs its id.", False)
    live: bool = option("--live/--no-live", "Live view; otherwise one line for each step.", True)
    runs_dir: Path | None = runs_dir_option()
    metrics_port: int | None = option("--metrics-port", _PORT_TEXT, None, "PORT", min=0, max=65535)
    fails_on_warning: bool = option("--fail-on-warning", "Exit with 1 where a metric left its range.", False)

    def command(self, run_id: str, resume: bool) -> str:
        """The command line that means this run, to be copied."""
        words = ["up", str(self.config)]
        words += [word for override in self.overrides for word in ("--set", override)]
        words += ["--run-id", run_id]
        if self.runs_dir:
            words += ["--runs-dir", str(self.runs_dir)]
        if self.metrics_port is not None:
            words += ["--metrics-port", str(self.metrics_port)]
        if resume:
            words.append("--resume")
        return command_line(*words)


_SERVE_PORT_TEXT = "The adapters' default is 8440; 0 takes a free one."


@command("serve-rewards", "serve.server:serve_rewards", "rewards.yaml --set reward.workers=8")
class ServeRewardsOptions:
    """Serve a config's rewards over HTTP to another trainer: verl, TRL, or your own.

    Samples go through the same streams and reward workers as in a run, with limits, retries, cache and
    failure policy; `status`, `streams`, `dead` and `rescore` work as for any run. Only the sections `reward`,
    `servers`, `streams` and `data` are used; others may be missing. Uses TIDEMILL_REDIS_URL if that is
    set, and a Redis of its own otherwise; more workers may join. Ctrl-C ends it; with the same --run-id it
    goes on.
    """

    config: Path = argument("A YAML file with a section `reward`.")
    overrides: list[str] = overrides_option()
    run_id: str = option("--run-id", _RUN_NAME_TEXT, "", "ID")
    host: str = option(
        "--host", "Address to listen on. Any but this machine's own needs a token.", "127.0.0.1"
    )
    port: int = option("--port", _SERVE_PORT_TEXT, 8440, min=0, max=65535)
    runs_dir: Path | None = runs_dir_option()


_CPU_NODES_TEXT = "Nodes without GPUs for reward workers, in a job of their own that may grow."
_GPUS_PER_NODE_TEXT = "GPUs that each node gives the run."
_TIME_TEXT = "Limit of the job, after which it is put back into the queue and goes on."
_SCRIPT_TEXT = "Folder for the scripts."


@command("slurm", "up.slurm:write_scripts", "config.yaml --nodes 4 --gpus-per-node 8 --cpu-nodes 2")
class SlurmOptions:
    """Write an sbatch script that does a run on the nodes of a Slurm cluster.

    The first node has Redis and the trainer, the others rollout and reward workers; all of them see the
    folder of runs. Where a node fails, is drained, or the time is over, the job is queued again, and the run
    goes on from where it was.
    """

    config: Path = argument("The run's YAML file, on a disk that all nodes see.")
    overrides: list[str] = overrides_option()
    nodes: int = option("--nodes", "Nodes of the job, at least 2.", 2, "N", min=2)
    gpus_per_node: int = option("--gpus-per-node", _GPUS_PER_NODE_TEXT, 0, "N", min=0)
    cpu_nodes: int = option("--cpu-nodes", _CPU_NODES_TEXT, 0, "N", min=0)
    time: str = option("--time", _TIME_TEXT, "24:00:00", "TIME")
    run_id: str = option("--run-id", _RUN_NAME_TEXT, "", "ID")
    output: Path = option("--output", _SCRIPT_TEXT, Path("."), "FOLDER", short=["-o"])
    runs_dir: Path | None = runs_dir_option()


_REPORT_TEXT = "Compute the summary of a finished run again from its commits, and keep it in its folder."
_FAIL_TEXT = "With --report: exit with 1 where a metric left its range."


@command("status", "look.dashboard:show_status", "arith-1 --watch")
class StatusOptions(OfRun):
    """Say how a run is doing; a finished run shows its summary.

    Finds the run's Redis by itself on the machine of `tidemill up`, elsewhere through TIDEMILL_REDIS_URL, and
    changes nothing. `--watch` shows the live view of `up`. `--report` is for a run whose end no `tidemill up`
    has seen: it computes the summary from the commits and writes summary.json and reward.png into the run's
    folder; it exits with 1 if anything was lost, trained twice, or not as the config expects it.
    """

    watch: bool = option("--watch", "Show it live until Ctrl-C, which ends the watching only.", False)
    report: bool = option("--report", _REPORT_TEXT, False)
    fails_on_warning: bool = option("--fail-on-warning", _FAIL_TEXT, False)
    as_json: bool = json_flag()


_OUTPUT_TEXT = "A new folder. Without it: list the versions."


@command("export", "look.export:export", "arith-1 --version best -o my-model", "arith-1 --verify")
class ExportOptions(OfRun):
    """Write a version of a run as a Hugging Face folder, or list its versions on the disk.

    A folder has config, tokenizer and safetensors. The list has full versions, and deltas with what they
    change; with `--verify`, exits with 1 where one is not whole.
    """

    output: Path | None = option("--output", _OUTPUT_TEXT, None, "FOLDER", short=["-o"])
    version: str = option("--version", "Which version of the run.", "last", "N|best|last")
    verify: bool = option("--verify", "Read every byte: checksums, chains, digests.", False)
    as_json: bool = json_flag()


@command("diff", "compare.diff:show_diff", "arith-1 arith-2")
class DiffOptions:
    """Find the first step at which two runs differ, and why: data, versions, tokens, rewards, numerics.

    Compares step by step what both were trained on and what came out, and stops at the first step that
    differs by more than rounding. Exits with 0 when there is none, and 1 when there is.
    """

    run_a: str = argument("A run, by id or folder.")
    run_b: str = argument("The run to compare it with.")
    tolerance: float = option(
        "--tolerance", "Numbers this close count as rounding; 0: none.", 1e-3, min=0.0, max=1.0
    )
    as_json: bool = json_flag()
    runs_dir: Path | None = runs_dir_option()
    runs_dir_b: Path | None = option("--runs-dir-b", "Folder of RUN_B, if another one.", None, "FOLDER")


@command("archive", "look.archive:archive", "arith-20260131-120000 --check")
class ArchiveOptions(OfRun):
    """Write what a run's streams hold now into its archive: Parquet files in the run's folder.

    `tidemill up` does this at the end of a run by itself; this is for runs whose services were started one by
    one, or whose end was cut short. What is archived already is skipped.
    """

    check: bool = option("--check", "Archive nothing; read every file and compare its checksum.", False)
    as_json: bool = json_flag()


_WORKERS_TEXT = "Reward workers to start. Without it: as the run's config says, and at least one."
_PACE_TEXT = "Feed trajectories at their recorded pace: a load test. Without it: as fast as they are scored."
_REDIS_TEXT = "Server for the sandbox, for workers on other machines. Without it: a private one."
_INTO_TEXT = "Name of the sandbox run, a new one. Without it: made from the run's name."
_REWARD_TEXT = "The reward function, or a built-in one. Without it: the run's own rewards."


@command("rescore", "compare.rescore:rescore", "arith-1 --reward my.py:fn --from-step 10 --to-step 20")
class RescoreOptions(OfRun):
    """Score a run's history with another reward, and say how the two agree.

    Nothing is generated again and nothing of the run changes: real reward workers score its trajectories into
    a scores stream of their own, in a sandbox run. The report has agreement, rank correlation, the groups
    that would have had another best completion, and what it cost.
    """

    into: str | None = option("--into", _INTO_TEXT, None, "SANDBOX")
    reward: str | None = option("--reward", _REWARD_TEXT, None, "FILE.py:FUNCTION")
    config: Path | None = option(
        "--config", "Take the whole reward section of this config, with its servers.", None, "FILE"
    )
    overrides: list[str] = overrides_option("Override one field, such as reward.timeout_s=5.")
    workers: int | None = option("--workers", _WORKERS_TEXT, None, min=1)
    first: int | None = option("--from-step", "First step.", None, "A", min=0)
    last: int | None = option("--to-step", "Last step.", None, "B", min=0)
    keeps_pace: bool = option("--recorded-pace", _PACE_TEXT, False)
    lane: Literal["train", "eval"] = option("--lane", "Training or evaluation.", "train")
    redis: str | None = option("--redis", _REDIS_TEXT, None, "URL")
    as_json: bool = json_flag()


@command("replay", "compare.replay:replay_steps", "412 arith-1")
class ReplayOptions(OfRun):
    """Train a committed step again, and compare it bit by bit with what was recorded.

    Restores the newest checkpoint before the step, replays the commits after it, and computes the step from
    the run's own records in the recorded micro-batches. Changes nothing of the run.

    Exits with 0 when loss, gradient norm, every other metric and the digest come out the same, else with 1.
    """

    steps: str = argument("A step, or several: 3,17 or 10..14.", metavar="STEPS")
    shows_all: bool = option("--all", "Show every metric, also those that agree.", False)
    as_json: bool = json_flag()


@dataclass(frozen=True, kw_only=True)
class ViewOptions(OfRun):
    """A command that shows records of a run.

    Example: `streams show --run arith-1 --json` has `run_id` "arith-1" and `as_json`.
    """

    run_id: str | None = run_option()
    as_json: bool = json_flag("Print JSON with everything, for programs, in a line for each entry.")
    is_full: bool = option("--full", "Show texts to their ends.", False)


@command("trace", "look.trace:show_trace", "412", "412.3 arith-1")
class TraceOptions(ViewOptions):
    """Follow a ticket, or one sample, through the run: prompt, generation, reward, training, version.

    Who generated it with which version, every attempt at its score, its group, advantages, and the step and
    micro-batch that trained on it, or why none did.
    """

    sample: str = argument("A group, or one sample of it, such as 412.3.", metavar="TICKET[.INDEX]")
    run_id: str | None = run_argument()
    lane: Literal["train", "eval"] = option("--lane", "Training or evaluation.", "train")


_STEPS_TEXT = "Counted from 0, as in the commits; with -o, several: A..B; with --profile also `next`."
_PERFETTO_TEXT = "Write a timeline of these steps for Perfetto instead (https://ui.perfetto.dev)."
_PROFILE_TEXT = "Have the trainer profile a step to come with torch.profiler, into the run's folder."


@command(
    "step",
    "look.step:show_step",
    "412 arith-1 --full",
    "40..45 arith-1 -o trace.json",
    "next arith-1 --profile",
)
class StepOptions(ViewOptions):
    """Show one step: what went in, in which micro-batches, where the time went, and what came out.

    Step N turned version N into version N + 1. A timeline has every sample of its steps, from its queue to
    its training.
    """

    steps: str = argument(_STEPS_TEXT, metavar="STEP")
    run_id: str | None = run_argument()
    output: Path | None = option("--output", _PERFETTO_TEXT, None, "FILE", short=["-o"])
    profile: bool = option("--profile", _PROFILE_TEXT, False)


_NAME_TEXT = "A further name under which browsers may ask, such as that of a proxy. May be repeated."
_HOST_TEXT = "Address to listen on. Any but this machine's own asks for a token."


@command("web", "web.server:serve", "arith-20260131-120000")
class WebOptions(OfRun):
    """Look at runs in a browser: curves, runs compared, groups, completions token by token, steps, logs.

    Pages need nothing from the network, and write nothing. They listen on this machine alone, unless --host
    says otherwise; then, or with --token, browsers ask for a password: the token that is printed, or that in
    TIDEMILL_WEB_TOKEN.
    """

    run_id: str | None = run_argument("The run to begin with; without it, all runs.")
    host: str = option("--host", _HOST_TEXT, "127.0.0.1")
    port: int = option("--port", "0 takes a free one.", 8420, min=0, max=65535)
    asks_token: bool = option("--token", "Ask for a token on this machine too.", False)
    host_names: list[str] = option("--allow-host", _NAME_TEXT, [], "NAME")


@dataclass(frozen=True, kw_only=True)
class SelectionOptions(ViewOptions):
    """Which entries of a stream; empty means all.

    Example: `streams tail scores --reward 0.9.. --step 40..45` has `reward` "0.9.." and `step` "40..45".
    """

    step: str = option("--step", "Only of these steps.", "", "A..B")
    ticket: str = option("--ticket", "Only of these tickets.", "", "A..B")
    time: str = option("--time", "Only of this time: ISO times or ages, such as '10m ago'.", "", "A..B")
    worker: str = option("--worker", "Only from this worker.", "", "NAME")
    reward: str = option("--reward", "Only samples with this reward.", "", "LOW..HIGH")
    version: str = option("--version", "Only with a token of these versions.", "", "A..B")
    lane: Literal["train", "eval"] | None = option("--lane", "Training or evaluation.", None)


_STREAM_TEXT = "prompts, trajectories, scores, weights, commits or dead; prompts:eval and so on."
_ENTRY_TEXT = "An entry's id, a sample as TICKET.INDEX, or the number of a ticket, step or version."
_GREP_TEXT = "Where to look. May be repeated. Without it: trajectories and scores."


@command("streams tail", "look.streams:show_tail", "trajectories --reward 0.9.. --step 40..45 -n 20")
class TailOptions(SelectionOptions):
    """Show the newest entries of a stream, or of a part of it.

    Ranges hold both ends; `A..` and `..B` are open, `A` is one number.
    """

    stream: str = argument(_STREAM_TEXT, metavar="STREAM")
    limit: int = option("-n", "How many entries.", 10, min=1)
    follow: bool = option("--follow", "Go on with what comes.", False, short=["-f"])


@command("streams show", "look.streams:show_entries", "", "trajectories 412.3")
class EntryOptions(ViewOptions):
    """Show everything that one entry holds; without one, list the streams.

    The list says how much there is of each and where, from when, and how far its readers are.
    """

    stream: str = argument(f"{_STREAM_TEXT} Without it: all, as a list.", "", "STREAM")
    entry: str = argument(_ENTRY_TEXT, "", "ID")
    lane: Literal["train", "eval"] | None = option("--lane", "Training or evaluation.", None)


@command("streams grep", "look.streams:show_hits", "'as an AI' --ignore-case --reward 0.8.. -n 20")
class GrepOptions(SelectionOptions):
    """Find text in prompts and completions, in judges' words and in errors; shown as it is found.

    Exits with 1 where nothing was found.
    """

    pattern: str = argument("A regular expression of Python.", metavar="PATTERN")
    streams: list[str] = option("--stream", _GREP_TEXT, [])
    ignore_case: bool = option("--ignore-case", "Ignore case.", False, short=["-i"])
    limit: int = option("-n", "Stop after this many; 0: never.", 0, min=0)


@dataclass(frozen=True, kw_only=True)
class DeadFilter:
    """Which dead letters are meant; every condition that is given must hold.

    Example: `--stream prompts:eval --error schema` has `stream` "prompts:eval" and `error` "schema".
    """

    stream: str = option("--stream", "Only from this stream, such as prompts:eval.", "")
    ticket: int | None = option("--ticket", "Only of this ticket.", None, min=0)
    error: str = option("--error", "Only with this in the error.", "", "TEXT")
    worker: str = option("--worker", "Only from this worker.", "", "TEXT")

    @property
    def is_narrow(self) -> bool:
        """Whether any condition is given."""
        return bool(self.stream or self.ticket is not None or self.error or self.worker)


@dataclass(frozen=True, kw_only=True)
class DeadChoice(DeadFilter, OfRun):
    """Dead letters by their ids, or all that the filter leaves.

    Example: `dead requeue --all --stream prompts:eval` has `has_all`, `stream` "prompts:eval", and no `ids`.
    """

    ids: list[str] = argument("Ids of dead letters.", [], "ID")  # noqa: RUF009, it makes a field
    has_all: bool = option("--all", "All dead letters that the filters leave.", False)
    run_id: str | None = run_option()


@command("dead show", "look.dead_letters:show_dead", "--error schema", "1790000000000-0 --hex")
class ShowDeadOptions(DeadChoice):
    """List the dead letters: when, from where, which sample, why; with an ID, all of that one.

    One letter is shown with the message that died, decoded where that is possible.
    """

    ids: list[str] = argument("Ids of dead letters. Without one: a list of them.", [], "ID")
    has_all: bool = field(default=True, init=False)
    limit: int = option("--limit", "At most this many, the newest; 0: all.", 100, min=0)
    with_hex: bool = option("--hex", "Show all original bytes.", False)
    as_json: bool = json_flag()


@command("dead requeue", "look.dead_letters:change_entries", "--all --stream prompts:eval")
class RequeueOptions(DeadChoice):
    """Put messages back where they belong, each exactly once.

    Refuses, with the reason, what can no longer matter: the trainer replaces the group of a dead ticket or
    trajectory by a fresh one. Exits with 1 when a letter that was named could not be put back.
    """


@command("dead drop", "look.dead_letters:change_entries", "--all --error 'schema 2' --yes")
class DropOptions(DeadChoice):
    """Remove dead letters for good, after asking. Those that the trainer has yet to act on are kept."""

    is_sure: bool = option("--yes", "Do not ask.", False, short=["-y"])
