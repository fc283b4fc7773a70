# ruff: noqa: RUF009 (what looks like a mutable default is a field: option() and argument() make one)
"""The options of every command, worded once: one dataclass for each command, one field for each option.

A command takes its dataclass and hands it on; `command` makes typer's parameters of the fields. Nothing heavy
is imported here: `tidemill --help` reads this file.
"""

import functools
import inspect
import os
import shlex
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from tidemill.common.errors import ConfigError

PARAMETER = "parameter"
"""Where a field's metadata keep typer's description of it."""


def option(name: str, text: str, default: Any = MISSING, metavar: str | None = None, **more: Any) -> Any:
    """A field that is an option; a default that is empty is not shown."""
    short = more.pop("short", ())
    info = typer.Option(
        name,
        *short,
        help=text,
        metavar=metavar,
        show_default=default is not MISSING and bool(default),
        **more,
    )
    return _field(info, default)


def argument(text: str, default: Any = MISSING, metavar: str | None = None, **more: Any) -> Any:
    """A field that is an argument."""
    return _field(typer.Argument(help=text, metavar=metavar, show_default=False, **more), default)


def _field(info: Any, default: Any) -> Any:
    kind = {"default_factory": list} if default == [] else {"default": default}
    return field(**kind, metadata={PARAMETER: info})


def command(app: typer.Typer, example: str, name: str | None = None) -> Callable[[Any], Any]:
    """Add a function of one dataclass to the commands; its docstring is the help.

    Where the run is an argument, a hidden `--run` names it too: people write it after every command.
    """

    def add(function: Callable[[Any], None]) -> Callable[[Any], None]:
        (kind,) = (hint for name, hint in get_type_hints(function).items() if name != "return")
        hints = get_type_hints(kind)
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            inspect.Parameter(
                item.name, keyword, default=_default(item), annotation=Annotated[hints[item.name], info]
            )
            for item in fields(kind)
            if (info := item.metadata.get(PARAMETER))
        ]
        parameters.sort(key=lambda item: item.default is not inspect.Parameter.empty)
        run_id = [item.metadata[PARAMETER] for item in fields(kind) if item.name == "run_id"]
        if run_id and isinstance(run_id[0], typer.models.ArgumentInfo):
            hidden = Annotated[str | None, typer.Option("--run", hidden=True, autocompletion=runs_here)]
            parameters.append(inspect.Parameter("run_option", keyword, default=None, annotation=hidden))

        @functools.wraps(function)
        def run(**values: Any) -> None:
            named, given = values.pop("run_option", None), values.get("run_id")
            if named and given and named != given:
                raise ConfigError(f"two runs are named, {given} and --run {named}; give one of them.")
            if named:
                values["run_id"] = named
            function(kind(**values))

        del run.__wrapped__
        run.__annotations__ = {item.name: item.annotation for item in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        app.command(name, epilog=example)(run)
        return function

    return add


def _default(item: Any) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return inspect.Parameter.empty if item.default is MISSING else item.default


def runs_here(incomplete: str) -> list[str]:
    """Ids of the runs in the folder of runs, for a shell that completes one."""
    runs = Path(os.environ.get("TIDEMILL_RUNS_DIR", "runs"))
    if not runs.is_dir():
        return []
    folders = (path for path in runs.iterdir() if path.is_dir() and not path.name.startswith("."))
    return sorted(path.name for path in folders if path.name.startswith(incomplete))


_RUN_TEXT = "The run, by its id or folder; without it, TIDEMILL_RUN_ID, else runs/latest."


def run_argument(text: str = _RUN_TEXT) -> Any:
    return argument(text, None, autocompletion=runs_here)


def run_option() -> Any:
    """For commands whose arguments say something else."""
    return option("--run", _RUN_TEXT, None, "RUN_ID", autocompletion=runs_here)


def runs_dir_option() -> Any:
    return option(
        "--runs-dir", "Folder of all runs. Without it: TIDEMILL_RUNS_DIR, else ./runs.", None, "FOLDER"
    )


def json_flag(text: str = "Print JSON, for programs.") -> Any:
    return option("--json", text, False)


def overrides_option(text: str = "Override one field, such as trainer.steps=20. May be repeated.") -> Any:
    return option("--set", text, [], "FIELD=VALUE")


def warning_flag() -> Any:
    return option("--fail-on-warning", "Exit with 1 where a metric left its range.", False)


EVERYTHING = "Print JSON with everything, for programs."
LINES = "Print JSON lines with everything, for programs."
_GPUS_TEXT = "GPUs of the whole run, for the memory that it takes. Without it: those of this machine."
_CALL_TEXT = "Call reward functions once, with the first row; no servers."
_MEMORY_TEXT = "Only compute what the run takes of GPUs and hosts; config.json of the model will do."
_GIB: dict[str, Any] = {"metavar": "GIB", "min": 1.0}


@dataclass(frozen=True)
class CheckOptions:
    config: Path | None = argument("The run's YAML file; with --fields, a section.", None)
    overrides: list[str] = overrides_option()
    calls_reward: bool = option("--call-reward/--no-call-reward", _CALL_TEXT, True)
    explains: bool = option(
        "--explain", "Also list what the preset of the algorithm sets, field by field.", False
    )
    memory: bool = option("--memory", _MEMORY_TEXT, False)
    gpus: int | None = option("--gpus", _GPUS_TEXT, None, "N", min=1, max=100_000)
    gpu_gib: float | None = option(
        "--gpu-gib", "Memory of each GPU. Without it: this machine's.", None, **_GIB
    )
    host_gib: float | None = option(
        "--host-gib", "Memory of each host. Without it: this machine's.", None, **_GIB
    )
    fields: bool = option("--fields", "List all fields of a config instead, or of one SECTION.", False)
    as_json: bool = json_flag()


_RUN_NAME_TEXT = "Name of the run. Without it: run_id of the config, else the config's folder and the time."
_PORT_TEXT = "Also export the whole run for Prometheus on this port: /metrics, and /sd to find the rest."


@dataclass(frozen=True)
class UpOptions:
    config: Path = argument("The run's YAML file.")
    overrides: list[str] = overrides_option()
    run_id: str = option("--run-id", _RUN_NAME_TEXT, "", "ID")
    resume: bool = option("--resume", "Continue a run that was stopped. Needs its id.", False)
    live: bool = option("--live/--no-live", "Live view; otherwise one line for each step.", True)
    runs_dir: Path | None = runs_dir_option()
    metrics_port: int | None = option("--metrics-port", _PORT_TEXT, None, "PORT", min=0, max=65535)
    fails_on_warning: bool = warning_flag()

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


_REPORT_TEXT = "Compute the summary of a finished run again from its commits, and keep it in its folder."


@dataclass(frozen=True)
class StatusOptions:
    run_id: str | None = run_argument()
    watch: bool = option("--watch", "Show it live until Ctrl-C, which ends the watching only.", False)
    report: bool = option("--report", _REPORT_TEXT, False)
    fails_on_warning: bool = option(
        "--fail-on-warning", "With --report: exit with 1 where a metric left its range.", False
    )
    as_json: bool = json_flag()
    runs_dir: Path | None = runs_dir_option()


@dataclass(frozen=True)
class ConvertOptions:
    file: Path = argument("A YAML, JSON, TOML or Python file, or a shell script.", metavar="FILE")
    options: list[str] = argument(
        "Further options, which win: key=value; for a script also NAME=value of its variables.",
        [],
        "KEY=VALUE",
    )
    project: Literal["verl", "trl", "prime-rl"] | None = option(
        "--from", "Whose it is. Without it: what it looks like.", None
    )
    output: Path | None = option("--output", "Write the config here.", None, "FILE", short=["-o"])


@dataclass(frozen=True)
class ExportOptions:
    output: Path = option("--output", "A new folder.", metavar="FOLDER", short=["-o"])
    run_id: str | None = run_argument()
    version: str = option("--version", "Which version of the run.", "last", "N|best|last")
    now: bool = option("--now", "Do it here, without asking for a worker.", False)
    runs_dir: Path | None = runs_dir_option()


@dataclass(frozen=True)
class ArchiveOptions:
    run_id: str | None = run_argument()
    check: bool = option("--check", "Archive nothing; read every file and compare its checksum.", False)
    as_json: bool = json_flag()
    runs_dir: Path | None = runs_dir_option()


@dataclass(frozen=True)
class WeightsOptions:
    run_id: str | None = run_argument()
    verify: bool = option("--verify", "Read every byte: checksums, chains, digests.", False)
    as_json: bool = json_flag()
    runs_dir: Path | None = runs_dir_option()


_NAME_TEXT = "A further name under which browsers may ask, such as that of a proxy. May be repeated."


@dataclass(frozen=True)
class WebOptions:
    run_id: str | None = run_argument("The run to begin with; without it, all runs.")
    host: str = option(
        "--host", "Address to listen on. Any but this machine's own asks for a token.", "127.0.0.1"
    )
    port: int = option("--port", "0 takes a free one.", 8420, min=0, max=65535)
    asks_token: bool = option("--token", "Ask for a token on this machine too.", False)
    host_names: list[str] = option("--allow-host", _NAME_TEXT, [], "NAME")
    runs_dir: Path | None = runs_dir_option()


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Which run, and how its entries are shown."""

    run_id: str | None = run_option()
    as_json: bool = json_flag(LINES)
    is_full: bool = option("--full", "Show texts to their ends.", False)
    runs_dir: Path | None = runs_dir_option()


@dataclass(frozen=True, kw_only=True)
class SelectionOptions(ViewOptions):
    """Which entries of a stream; empty means all."""

    step: str = option("--step", "Only of these steps.", "", "A..B")
    ticket: str = option("--ticket", "Only of these tickets.", "", "A..B")
    time: str = option("--time", "Only then: ISO times or ages, such as '10m ago'.", "", "A..B")
    worker: str = option("--worker", "Only from this worker.", "", "NAME")
    reward: str = option("--reward", "Only samples with this reward.", "", "LOW..HIGH")
    version: str = option("--version", "Only with a token of these versions.", "", "A..B")
    lane: str = option("--lane", "Training or evaluation.", "", "train|eval")


_STREAM_TEXT = "prompts, trajectories, scores, weights, commits or dead; prompts:eval and so on."
_ENTRY_TEXT = "An entry's id, a sample as TICKET.INDEX, or the number of a ticket, step or version."


@dataclass(frozen=True, kw_only=True)
class TailOptions(SelectionOptions):
    stream: str = argument(_STREAM_TEXT, metavar="STREAM")
    limit: int = option("-n", "How many entries.", 10, min=1)
    follow: bool = option("--follow", "Go on with what comes.", False, short=["-f"])


@dataclass(frozen=True, kw_only=True)
class GrepOptions(SelectionOptions):
    pattern: str = argument("A regular expression of Python.", metavar="PATTERN")
    streams: list[str] = option(
        "--stream", "Where to look. May be repeated. Without it: trajectories and scores.", []
    )
    ignore_case: bool = option("--ignore-case", "A is a.", False, short=["-i"])
    limit: int = option("-n", "Stop after so many; 0: never.", 0, min=0)


@dataclass(frozen=True, kw_only=True)
class EntryOptions(ViewOptions):
    stream: str = argument(f"{_STREAM_TEXT} Without it: all, as a list.", "", "STREAM")
    entry: str = argument(_ENTRY_TEXT, "", "ID")
    lane: str = option("--lane", "Training or evaluation.", "", "train|eval")


@dataclass(frozen=True, kw_only=True)
class TraceOptions(ViewOptions):
    sample: str = argument("A group, or one sample of it, such as 412.3.", metavar="TICKET[.INDEX]")
    run_id: str | None = run_argument()
    as_json: bool = json_flag(EVERYTHING)
    lane: str = option("--lane", "Training or evaluation.", "train", "train|eval")


@dataclass(frozen=True, kw_only=True)
class StepOptions(ViewOptions):
    number: int = argument("Counted from 0, as in the commits.", metavar="STEP", min=0)
    run_id: str | None = run_argument()
    as_json: bool = json_flag(EVERYTHING)


@dataclass(frozen=True)
class TimelineOptions:
    first: int = option("--from-step", "The first step.", metavar="A", min=0)
    last: int = option("--to-step", "The last step.", metavar="B", min=0)
    output: Path = option("--output", "The file to write.", Path("trace.json"), "FILE", short=["-o"])
    run_id: str | None = run_argument()
    runs_dir: Path | None = runs_dir_option()


@dataclass(frozen=True, kw_only=True)
class DeadFilter:
    """Which dead letters are meant; every condition that is given must hold."""

    stream: str = option("--stream", "Only from this stream, such as prompts:eval.", "")
    ticket: int | None = option("--ticket", "Only of this ticket.", None, min=0)
    error: str = option("--error", "Only with this in the error.", "", "TEXT")
    worker: str = option("--worker", "Only from this worker.", "", "TEXT")

    @property
    def is_narrow(self) -> bool:
        """Whether any condition is given."""
        return bool(self.stream or self.ticket is not None or self.error or self.worker)


@dataclass(frozen=True, kw_only=True)
class DeadChoice(DeadFilter):
    """Dead letters by their ids, or all that the filter leaves."""

    ids: list[str] = argument("Ids of dead letters.", [], "ID")
    has_all: bool = option("--all", "All dead letters that the filters leave.", False)
    run_id: str | None = run_option()
    runs_dir: Path | None = runs_dir_option()


@dataclass(frozen=True, kw_only=True)
class DropOptions(DeadChoice):
    is_sure: bool = option("--yes", "Do not ask.", False, short=["-y"])


@dataclass(frozen=True, kw_only=True)
class ShowDeadOptions(DeadChoice):
    ids: list[str] = argument("Ids of dead letters. Without one: a list of them.", [], "ID")
    has_all: bool = field(default=True, init=False)
    limit: int = option("--limit", "At most so many, the newest; 0: all.", 100, min=0)
    with_hex: bool = option("--hex", "Show all original bytes.", False)
    as_json: bool = json_flag()


_WORKERS_TEXT = "Reward workers to start. Without it: as the run's config says, and at least one."
_PACE_TEXT = "Feed them as slowly as they came: a load test. Without it: as fast as they are scored."
_REDIS_TEXT = "Server for the sandbox, for workers on other machines. Without it: a private one."


@dataclass(frozen=True)
class RescoreOptions:
    """`tidemill rescore`: whose history is scored again, and with which reward."""

    run_id: str | None = run_argument()
    into: str | None = option(
        "--into", "Name of the sandbox run, a new one. Without it: made from the run's name.", None, "SANDBOX"
    )
    reward: str | None = option(
        "--reward",
        "The reward function, or a built-in one. Without it: the run's own rewards.",
        None,
        "FILE.py:FUNCTION",
    )
    config: Path | None = option("--config", "Take the whole reward section of this config.", None, "FILE")
    overrides: list[str] = overrides_option("Override one field, such as reward.timeout_s=5.")
    workers: int | None = option("--workers", _WORKERS_TEXT, None, min=1)
    first: int | None = option("--from-step", "First step.", None, "A", min=0)
    last: int | None = option("--to-step", "Last step.", None, "B", min=0)
    keeps_pace: bool = option("--recorded-pace", _PACE_TEXT, False)
    lane: Literal["train", "eval"] = option("--lane", "Training or evaluation.", "train")
    redis: str | None = option("--redis", _REDIS_TEXT, None, "URL")
    as_json: bool = json_flag()
    runs_dir: Path | None = runs_dir_option()


@dataclass(frozen=True)
class ReplayOptions:
    steps: str = argument("A step, or several: 3,17 or 10..14.", metavar="STEPS")
    run_id: str | None = run_argument()
    shows_all: bool = option("--all", "Show every metric, also those that agree.", False)
    as_json: bool = json_flag()
    runs_dir: Path | None = runs_dir_option()


@dataclass(frozen=True)
class DiffOptions:
    run_a: str = argument("A run, by id or folder.")
    run_b: str = argument("The run to compare it with.")
    tolerance: float = option(
        "--tolerance", "Numbers this close count as rounding; 0: none.", 1e-3, min=0.0, max=1.0
    )
    as_json: bool = json_flag()
    runs_dir: Path | None = runs_dir_option()
    runs_dir_b: Path | None = option("--runs-dir-b", "Folder of RUN_B, if another one.", None, "FOLDER")
