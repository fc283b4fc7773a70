"""Every option of the command line that several commands share or that belong together, worded once.

A command takes groups of them as dataclasses, and hands them on as they are: `grouped` makes options of their
fields. Nothing heavy is imported here: `tidemill --help` reads this file.
"""

import functools
import inspect
import shlex
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_type_hints

import typer


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


def _default(item: Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return inspect.Parameter.empty if item.default is MISSING else item.default


def option(*names: str, text: str, metavar: str | None = None, **more: Any) -> Any:
    """An option whose default goes without saying."""
    return typer.Option(*names, help=text, metavar=metavar, show_default=False, **more)


def argument(text: str, metavar: str | None = None, **more: Any) -> Any:
    """An argument whose default goes without saying."""
    return typer.Argument(help=text, metavar=metavar, show_default=False, **more)


_RUN_TEXT = "The run; without it, TIDEMILL_RUN_ID, else runs/latest."
RunId = Annotated[str | None, argument(_RUN_TEXT)]
RunOption = Annotated[str | None, option("--run", metavar="RUN_ID", text=_RUN_TEXT)]
"""Where the arguments say something else."""
_RUNS_TEXT = "Folder of all runs. Without it: TIDEMILL_RUNS_DIR, else ./runs."
RunsDir = Annotated[Path | None, option("--runs-dir", metavar="FOLDER", text=_RUNS_TEXT)]
ConfigFile = Annotated[Path, argument("The run's YAML file.")]
_SET_TEXT = "Override one field, such as trainer.steps=20. May be repeated."
Overrides = Annotated[list[str], option("--set", metavar="FIELD=VALUE", text=_SET_TEXT)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
JsonTree = Annotated[bool, typer.Option("--json", help="Print JSON with everything, for programs.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print JSON lines with everything, for programs.")]
Full = Annotated[bool, typer.Option("--full", help="Show texts to their ends.")]
LaneChoice = Annotated[Literal["train", "eval"], typer.Option("--lane", help="Training or evaluation.")]


@dataclass(frozen=True)
class CheckOptions:
    """`tidemill check`."""

    config: Annotated[Path | None, argument("The run's YAML file; with --fields, a section.")] = None
    overrides: Overrides = field(default_factory=list)
    calls_reward: Annotated[
        bool, typer.Option("--call-reward", help="Also call the reward functions once, with the first row.")
    ] = False
    fields: Annotated[
        bool, typer.Option("--fields", help="List all fields of a config instead, or of one SECTION.")
    ] = False


_RUN_NAME_TEXT = "Name of the run. Without it: run_id of the config, else the config's folder and the time."
_PORT_TEXT = "Also export the whole run for Prometheus on this port: /metrics, and /sd to find the rest."


@dataclass(frozen=True)
class UpOptions:
    """`tidemill up`."""

    config: ConfigFile
    overrides: Overrides = field(default_factory=list)
    run_id: Annotated[str, option("--run-id", metavar="ID", text=_RUN_NAME_TEXT)] = ""
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue a run that was stopped. Needs its id.")
    ] = False
    live: Annotated[
        bool, typer.Option("--live/--no-live", help="Live view; otherwise one line for each step.")
    ] = True
    runs_dir: RunsDir = None
    metrics_port: Annotated[
        int | None, option("--metrics-port", metavar="PORT", min=0, max=65535, text=_PORT_TEXT)
    ] = None

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


_TIMES_TEXT = "Take these: reward=5s,rollout=2000tok/s,trainer=30s."


@dataclass(frozen=True)
class PlanOptions:
    """`tidemill plan`."""

    config: ConfigFile
    overrides: Overrides = field(default_factory=list)
    run: Annotated[str | None, option("--run", metavar="RUN_ID", text="Take the times of this run.")] = None
    assume: Annotated[str, option("--assume", metavar="TIMES", text=_TIMES_TEXT)] = ""
    measure: Annotated[
        bool, typer.Option("--measure", help="Do a few steps first, in a folder that is thrown away.")
    ] = False
    as_json: Json = False
    runs_dir: RunsDir = None


@dataclass(frozen=True)
class WebOptions:
    """`tidemill web`."""

    run_id: Annotated[str | None, argument("The run to begin with; without it, all runs.")] = None
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Any but this machine's own asks for a token.")
    ] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8420
    host_names: Annotated[
        list[str],
        option(
            "--allow-host",
            metavar="NAME",
            text="A further name under which browsers may ask, such as that of a proxy. May be repeated.",
        ),
    ] = field(default_factory=list)
    runs_dir: RunsDir = None


@dataclass(frozen=True)
class SelectionOptions:
    """Which entries of a stream; empty means all."""

    step: Annotated[str, option("--step", metavar="A..B", text="Only of these steps.")] = ""
    ticket: Annotated[str, option("--ticket", metavar="A..B", text="Only of these tickets.")] = ""
    time: Annotated[
        str, option("--time", metavar="A..B", text="Only then: ISO times or ages, such as '10m ago'.")
    ] = ""
    worker: Annotated[str, option("--worker", metavar="NAME", text="Only from this worker.")] = ""
    reward: Annotated[str, option("--reward", metavar="LOW..HIGH", text="Only samples with this reward.")] = (
        ""
    )
    version: Annotated[
        str, option("--version", metavar="A..B", text="Only with a token of these versions.")
    ] = ""
    lane: Annotated[str, option("--lane", metavar="train|eval", text="Training or evaluation.")] = ""


@dataclass(frozen=True)
class StreamsOptions:
    """Which run, and how its streams are listed."""

    run_id: RunOption = None
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
    """`tidemill timeline`."""

    first: Annotated[int, option("--from-step", metavar="A", min=0, text="The first step.")]
    last: Annotated[int, option("--to-step", metavar="B", min=0, text="The last step.")]
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The file to write.")] = Path(
        "trace.json"
    )
    run_id: RunId = None
    runs_dir: RunsDir = None


@dataclass(frozen=True)
class LetterFilter:
    """Which dead letters are meant; every condition that is given must hold."""

    stream: Annotated[str, option("--stream", text="Only from this stream, such as prompts:eval.")] = ""
    ticket: Annotated[int | None, option("--ticket", min=0, text="Only of this ticket.")] = None
    error: Annotated[str, option("--error", metavar="TEXT", text="Only with this in the error.")] = ""
    worker: Annotated[str, option("--worker", metavar="TEXT", text="Only from this worker.")] = ""

    @property
    def is_narrow(self) -> bool:
        """Whether any condition is given."""
        return bool(self.stream or self.ticket is not None or self.error or self.worker)


@dataclass(frozen=True)
class LetterChoice(LetterFilter):
    """Dead letters by their ids, or all that the filter leaves."""

    ids: Annotated[list[str], argument("Ids of letters.", metavar="ID")] = field(default_factory=list)
    has_all: Annotated[bool, typer.Option("--all", help="All letters that the filters leave.")] = False
    run_id: RunOption = None
    runs_dir: RunsDir = None


_INTO_TEXT = "Name of the sandbox run, a new one. Without it: made from the run's name."
_REWARD_TEXT = "The reward function, or a built-in one. Without it: the run's own rewards."
_SECTION_TEXT = "Take the whole reward section of this config."
_WORKERS_TEXT = "Reward workers to start. Without it: as the run's config says."
_REDIS_TEXT = "Server for the sandbox, for workers on other machines. Without it: a private one."


@dataclass(frozen=True)
class SandboxOptions:
    """A sandbox run: whose history it is given, and which reward scores it."""

    run_id: RunId = None
    into: Annotated[str | None, option("--into", metavar="SANDBOX", text=_INTO_TEXT)] = None
    reward: Annotated[str | None, option("--reward", metavar="FILE.py:FUNCTION", text=_REWARD_TEXT)] = None
    config: Annotated[Path | None, option("--config", metavar="FILE", text=_SECTION_TEXT)] = None
    overrides: Annotated[
        list[str],
        typer.Option("--set", metavar="FIELD=VALUE", help="Override one field, such as reward.timeout_s=5."),
    ] = field(default_factory=list)
    workers: Annotated[int | None, typer.Option("--workers", min=0, help=_WORKERS_TEXT)] = None
    lane: LaneChoice = "train"
    redis: Annotated[str | None, option("--redis", metavar="URL", text=_REDIS_TEXT)] = None
    as_json: Json = False
    runs_dir: RunsDir = None


_WHAT_IF_TEXT = (
    "Also compute each step with this changed: any trainer field that does not change what was "
    "collected. May be repeated."
)


@dataclass(frozen=True)
class ReplayOptions:
    """`tidemill replay step`."""

    steps: Annotated[str, argument("A step, or several: 3,17 or 10..14.", metavar="STEPS")]
    run_id: RunId = None
    overrides: Annotated[list[str], option("--set", metavar="FIELD=VALUE", text=_WHAT_IF_TEXT)] = field(
        default_factory=list
    )
    to_torch: Annotated[
        Path | None, option("--to-torch", metavar="FILE", text="Write the batch of the step as tensors.")
    ] = None
    with_weights: Annotated[
        bool, typer.Option("--with-weights", help="With --to-torch: also the weights before the step.")
    ] = False
    shows_all: Annotated[bool, typer.Option("--all", help="Show every metric, also those that agree.")] = (
        False
    )
    as_json: Json = False
    runs_dir: RunsDir = None


@dataclass(frozen=True)
class DiffOptions:
    """`tidemill diff`."""

    run_a: Annotated[str, argument("A run, by id or folder.")]
    run_b: Annotated[str, argument("The run to compare it with.")]
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", min=0.0, max=1.0, help="Numbers this close count as rounding; 0: none."),
    ] = 1e-3
    as_json: Json = False
    runs_dir: RunsDir = None
    runs_dir_b: Annotated[
        Path | None, option("--runs-dir-b", metavar="FOLDER", text="Folder of RUN_B, if another one.")
    ] = None
