"""Every option of the command line that several commands share or that belong together, worded once.

A command takes groups of them as dataclasses, and hands them on as they are: `grouped` makes options of their
fields. Nothing heavy is imported here: `tidemill --help` reads this file.
"""

import functools
import inspect
import os
import shlex
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_type_hints

import typer

from tidemill.common.errors import ConfigError


def grouped(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command with the fields of its dataclasses as options of the command line."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if not is_dataclass(parameter.annotation):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        group = cast(type[Any], parameter.annotation)
        groups[name] = group
        hints = get_type_hints(group, include_extras=True)
        for item in fields(group):
            options = {"default": _default(item), "annotation": hints[item.name]}
            parameters.append(inspect.Parameter(item.name, inspect.Parameter.KEYWORD_ONLY, **options))

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{item.name: values.pop(item.name) for item in fields(group)})
        return command(**values)

    del run.__wrapped__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def naming_the_run(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command; where it takes the run as an argument, `--run` names it too."""
    signature = inspect.signature(command, eval_str=True)
    if "run_id" not in signature.parameters:
        return command

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        named = values.pop("run_option")
        if named and values["run_id"] and named != values["run_id"]:
            raise ConfigError(f"two runs are named, {values['run_id']} and --run {named}; give one of them.")
        values["run_id"] = values["run_id"] or named
        return command(**values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [item.replace(kind=keyword) for item in signature.parameters.values()]
    hidden = Annotated[str | None, typer.Option("--run", hidden=True, autocompletion=runs_here)]
    parameters.append(inspect.Parameter("run_option", keyword, default=None, annotation=hidden))
    del run.__wrapped__
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"tidemill {version('tidemill')}")
        except PackageNotFoundError:
            print("tidemill, not installed: a clone")
        raise typer.Exit


def _default(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return inspect.Parameter.empty if item.default is MISSING else item.default


def option(name: str, text: str, metavar: str | None = None, **more: Any) -> Any:
    """An option whose default goes without saying."""
    return typer.Option(name, help=text, metavar=metavar, show_default=False, **more)


def flag(name: str, text: str) -> Any:
    """An option without a value, or one whose default is shown."""
    return typer.Option(name, help=text)


def argument(text: str, metavar: str | None = None, **more: Any) -> Any:
    """An argument whose default goes without saying."""
    return typer.Argument(help=text, metavar=metavar, show_default=False, **more)


def runs_here(incomplete: str) -> list[str]:
    """Ids of the runs in the folder of runs, for a shell that completes one."""
    runs = Path(os.environ.get("TIDEMILL_RUNS_DIR", "runs"))
    if not runs.is_dir():
        return []
    folders = (path for path in runs.iterdir() if path.is_dir() and not path.name.startswith("."))
    return sorted(path.name for path in folders if path.name.startswith(incomplete))


_RUN_TEXT = "The run, by its id or folder; without it, TIDEMILL_RUN_ID, else runs/latest."
RunId = Annotated[str | None, argument(_RUN_TEXT, autocompletion=runs_here)]
RunOption = Annotated[str | None, option("--run", _RUN_TEXT, "RUN_ID", autocompletion=runs_here)]
"""Where the arguments say something else; commands with an argument take this too (`naming_the_run`)."""
_RUNS_TEXT = "Folder of all runs. Without it: TIDEMILL_RUNS_DIR, else ./runs."
RunsDir = Annotated[Path | None, option("--runs-dir", _RUNS_TEXT, "FOLDER")]
ConfigFile = Annotated[Path, argument("The run's YAML file.")]
_SET_TEXT = "Override one field, such as trainer.steps=20. May be repeated."
Overrides = Annotated[list[str], option("--set", _SET_TEXT, "FIELD=VALUE")]
Json = Annotated[bool, flag("--json", "Print JSON, for programs.")]
JsonTree = Annotated[bool, flag("--json", "Print JSON with everything, for programs.")]
JsonLines = Annotated[bool, flag("--json", "Print JSON lines with everything, for programs.")]
Full = Annotated[bool, flag("--full", "Show texts to their ends.")]
LaneChoice = Annotated[Literal["train", "eval"], flag("--lane", "Training or evaluation.")]


_GPUS_TEXT = "GPUs of the whole run, for the memory that it takes. Without it: those of this machine."


@dataclass(frozen=True)
class CheckOptions:
    config: Annotated[Path | None, argument("The run's YAML file; with --fields, a section.")] = None
    overrides: Overrides = field(default_factory=list)
    calls_reward: Annotated[
        bool,
        flag("--call-reward/--no-call-reward", "Call reward functions once, with the first row; no servers."),
    ] = True
    explains: Annotated[
        bool, flag("--explain", "Also list what the preset of the algorithm sets, field by field.")
    ] = False
    memory: Annotated[
        bool,
        flag(
            "--memory", "Only compute what the run takes of GPUs and hosts; config.json of the model will do."
        ),
    ] = False
    gpus: Annotated[int | None, option("--gpus", _GPUS_TEXT, "N", min=1, max=100_000)] = None
    gpu_gib: Annotated[
        float | None, option("--gpu-gib", "Memory of each GPU. Without it: this machine's.", "GIB", min=1.0)
    ] = None
    host_gib: Annotated[
        float | None, option("--host-gib", "Memory of each host. Without it: this machine's.", "GIB", min=1.0)
    ] = None
    fields: Annotated[bool, flag("--fields", "List all fields of a config instead, or of one SECTION.")] = (
        False
    )
    as_json: Json = False


FailOnWarning = Annotated[bool, flag("--fail-on-warning", "Exit with 1 where a metric left its range.")]
_RUN_NAME_TEXT = "Name of the run. Without it: run_id of the config, else the config's folder and the time."
_PORT_TEXT = "Also export the whole run for Prometheus on this port: /metrics, and /sd to find the rest."


@dataclass(frozen=True)
class UpOptions:
    config: ConfigFile
    overrides: Overrides = field(default_factory=list)
    run_id: Annotated[str, option("--run-id", _RUN_NAME_TEXT, "ID")] = ""
    resume: Annotated[bool, flag("--resume", "Continue a run that was stopped. Needs its id.")] = False
    live: Annotated[bool, flag("--live/--no-live", "Live view; otherwise one line for each step.")] = True
    runs_dir: RunsDir = None
    metrics_port: Annotated[int | None, option("--metrics-port", _PORT_TEXT, "PORT", min=0, max=65535)] = None
    fails_on_warning: FailOnWarning = False

    def command(self, run_id: str, resume: bool) -> str:
        """The command line that means this run, to be copied."""
        words = ["tidemill", "up", str(self.config)]
        words += [word for override in self.overrides for word in ("--set", override)]
        words += ["--run-id", run_id]
        if self.runs_dir:
            words += ["--runs-dir", str(self.runs_dir)]
        if self.metrics_port is not None:
            words += ["--metrics-port", str(self.metrics_port)]
        return shlex.join([*words, "--resume"] if resume else words)


_OPTIONS_TEXT = "Further options, which win: key=value; for a script also NAME=value of its variables."


@dataclass(frozen=True)
class ConvertOptions:
    file: Annotated[Path, argument("A YAML, JSON, TOML or Python file, or a shell script.", metavar="FILE")]
    options: Annotated[list[str], argument(_OPTIONS_TEXT, metavar="KEY=VALUE")] = field(default_factory=list)
    project: Annotated[
        Literal["verl", "trl", "prime-rl"] | None,
        option("--from", "Whose it is. Without it: what it looks like."),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the config here.", show_default=False),
    ] = None


@dataclass(frozen=True)
class WebOptions:
    run_id: Annotated[str | None, argument("The run to begin with; without it, all runs.")] = None
    host: Annotated[
        str, flag("--host", "Address to listen on. Any but this machine's own asks for a token.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8420
    asks_token: Annotated[bool, flag("--token", "Ask for a token on this machine too.")] = False
    host_names: Annotated[
        list[str],
        option(
            "--allow-host",
            "A further name under which browsers may ask, such as that of a proxy. May be repeated.",
            "NAME",
        ),
    ] = field(default_factory=list)
    runs_dir: RunsDir = None


@dataclass(frozen=True)
class SelectionOptions:
    """Which entries of a stream; empty means all."""

    step: Annotated[str, option("--step", "Only of these steps.", "A..B")] = ""
    ticket: Annotated[str, option("--ticket", "Only of these tickets.", "A..B")] = ""
    time: Annotated[str, option("--time", "Only then: ISO times or ages, such as '10m ago'.", "A..B")] = ""
    worker: Annotated[str, option("--worker", "Only from this worker.", "NAME")] = ""
    reward: Annotated[str, option("--reward", "Only samples with this reward.", "LOW..HIGH")] = ""
    version: Annotated[str, option("--version", "Only with a token of these versions.", "A..B")] = ""
    lane: Annotated[str, option("--lane", "Training or evaluation.", "train|eval")] = ""


@dataclass(frozen=True)
class StreamsOptions:
    """Which run, and how its streams are listed."""

    run_id: RunId = None
    as_json: JsonLines = False
    runs_dir: RunsDir = None


@dataclass(frozen=True)
class ViewOptions:
    """Which run, and how its entries are shown."""

    run_id: RunOption = None
    as_json: JsonLines = False
    is_full: Full = False
    runs_dir: RunsDir = None


@dataclass(frozen=True)
class TraceOptions(ViewOptions):
    """The same for commands that take the run as an argument."""

    run_id: RunId = None
    as_json: JsonTree = False


@dataclass(frozen=True)
class TimelineOptions:
    first: Annotated[int, option("--from-step", "The first step.", "A", min=0)]
    last: Annotated[int, option("--to-step", "The last step.", "B", min=0)]
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")] = Path(
        "trace.json"
    )
    run_id: RunId = None
    runs_dir: RunsDir = None


@dataclass(frozen=True)
class DeadFilter:
    """Which dead letters are meant; every condition that is given must hold."""

    stream: Annotated[str, option("--stream", "Only from this stream, such as prompts:eval.")] = ""
    ticket: Annotated[int | None, option("--ticket", "Only of this ticket.", min=0)] = None
    error: Annotated[str, option("--error", "Only with this in the error.", "TEXT")] = ""
    worker: Annotated[str, option("--worker", "Only from this worker.", "TEXT")] = ""

    @property
    def is_narrow(self) -> bool:
        """Whether any condition is given."""
        return bool(self.stream or self.ticket is not None or self.error or self.worker)


@dataclass(frozen=True)
class DeadChoice(DeadFilter):
    """Dead letters by their ids, or all that the filter leaves."""

    ids: Annotated[list[str], argument("Ids of dead letters.", metavar="ID")] = field(default_factory=list)
    has_all: Annotated[bool, flag("--all", "All dead letters that the filters leave.")] = False
    run_id: RunOption = None
    runs_dir: RunsDir = None


_INTO_TEXT = "Name of the sandbox run, a new one. Without it: made from the run's name."
_REWARD_TEXT = "The reward function, or a built-in one. Without it: the run's own rewards."
_SECTION_TEXT = "Take the whole reward section of this config."
_WORKERS_TEXT = "Reward workers to start. Without it: as the run's config says, and at least one."
_PACE_TEXT = "Feed them as slowly as they came: a load test. Without it: as fast as they are scored."
_REDIS_TEXT = "Server for the sandbox, for workers on other machines. Without it: a private one."


@dataclass(frozen=True)
class RescoreOptions:
    """`tidemill rescore`: whose history is scored again, and with which reward."""

    run_id: RunId = None
    into: Annotated[str | None, option("--into", _INTO_TEXT, "SANDBOX")] = None
    reward: Annotated[str | None, option("--reward", _REWARD_TEXT, "FILE.py:FUNCTION")] = None
    config: Annotated[Path | None, option("--config", _SECTION_TEXT, "FILE")] = None
    overrides: Annotated[
        list[str],
        typer.Option("--set", metavar="FIELD=VALUE", help="Override one field, such as reward.timeout_s=5."),
    ] = field(default_factory=list)
    workers: Annotated[int | None, typer.Option("--workers", min=1, help=_WORKERS_TEXT)] = None
    first: Annotated[int | None, option("--from-step", "First step.", "A", min=0)] = None
    last: Annotated[int | None, option("--to-step", "Last step.", "B", min=0)] = None
    keeps_pace: Annotated[bool, flag("--recorded-pace", _PACE_TEXT)] = False
    lane: LaneChoice = "train"
    redis: Annotated[str | None, option("--redis", _REDIS_TEXT, "URL")] = None
    as_json: Json = False
    runs_dir: RunsDir = None


@dataclass(frozen=True)
class ReplayOptions:
    steps: Annotated[str, argument("A step, or several: 3,17 or 10..14.", metavar="STEPS")]
    run_id: RunId = None
    shows_all: Annotated[bool, flag("--all", "Show every metric, also those that agree.")] = False
    as_json: Json = False
    runs_dir: RunsDir = None


@dataclass(frozen=True)
class DiffOptions:
    run_a: Annotated[str, argument("A run, by id or folder.")]
    run_b: Annotated[str, argument("The run to compare it with.")]
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", min=0.0, max=1.0, help="Numbers this close count as rounding; 0: none."),
    ] = 1e-3
    as_json: Json = False
    runs_dir: RunsDir = None
    runs_dir_b: Annotated[
        Path | None, option("--runs-dir-b", "Folder of RUN_B, if another one.", "FOLDER")
    ] = None
