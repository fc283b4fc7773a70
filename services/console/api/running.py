"""`tidemill.run`, `run_async`, `check`, `load_config` and `rescore`: the commands, from Python."""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import structlog
from rich.console import Console

from tidemill.common.config import RunConfig, override_config, parse_config
from tidemill.common.config import load_config as load_file
from tidemill.common.run.state import CONFIG_FILE, EVALUATION, STEP
from tidemill.services.console.api.history import History, Records, metrics, wait_for
from tidemill.services.console.check.preflight import Findings, examine
from tidemill.services.console.commands import RescoreOptions, UpOptions
from tidemill.services.console.look.report import read_report
from tidemill.services.console.run.folder import folder_of_runs
from tidemill.services.console.up.local_run import LocalRun
from tidemill.services.console.up.start import prepare
from tidemill.services.console.up.views import News, PlainView

Config = RunConfig | str | Path | Mapping[str, Any]
"""A config, the YAML file that holds it, or its tree; paths in a tree start at the working directory."""
Overrides = Mapping[str, Any] | Iterable[str]
"""`{"trainer.steps": 20}`, or `["trainer.steps=20"]`."""
Callback = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class RunResult:
    """The outcome of a run."""

    run_id: str
    folder: Path
    """The run's folder: records, weights, logs."""
    exit_code: int
    """Like that of `tidemill up`: 0, 1 where the run did not do what it should, 130 where it was stopped."""
    summary: dict[str, Any] = field(default_factory=dict)
    """The contents of summary.json; empty where the run did not finish."""
    why_not_finished: str = ""
    """What ended it early, and the command that continues it."""

    @property
    def is_ok(self) -> bool:
        """Whether it finished, and did what it should."""
        return self.exit_code == 0

    @property
    def history(self) -> History:
        """Its recorded groups, samples and steps."""
        return History(self.run_id, self.folder.parent)

    @property
    def metrics(self) -> Records[Mapping[str, Any]]:
        """The records of its steps."""
        return metrics(self.run_id, self.folder.parent)


def load_config(config: Config, overrides: Overrides = ()) -> RunConfig:
    """A complete and checked config, with `overrides` in place of its fields.

    Raises:
        ConfigError: a field is unknown or its value is not allowed.
    """
    words = _words(overrides)
    if isinstance(config, str | Path):
        return load_file(Path(config), words)
    if not isinstance(config, RunConfig):
        config = parse_config(json.loads(json.dumps(config)), "config")
    return override_config(config, words)


def check(config: Config, overrides: Overrides = (), *, calls_reward: bool = True) -> Findings:
    """Find every mistake of a run before it starts, as `tidemill check` does.

    `calls_reward` calls local reward functions with the first row: for an empty completion, for its ground
    truth and for its prompt as completion.

    Raises:
        TidemillError: the run could not start; the message has all that is wrong.
    """
    loaded = load_config(config, overrides)
    return wait_for(lambda: asyncio.to_thread(examine, loaded, (), calls_reward))


def run(
    config: Config,
    overrides: Overrides = (),
    *,
    run_id: str = "",
    resume: bool = False,
    runs_dir: str | Path | None = None,
    on_step: Callback | None = None,
    on_evaluation: Callback | None = None,
    quiet: bool = False,
) -> RunResult:
    """Do a whole run on this machine, as `tidemill up` does, and wait for its end; also in a notebook.

    `on_step` and `on_evaluation` get the record of each step and evaluation, as metrics.jsonl has it, once it
    is committed. One that returns False or raises stops the run, as Ctrl-C does: it can be resumed. An error
    is raised when the run has stopped.
    `quiet` prints nothing.

    Raises:
        TidemillError: it cannot start. Nothing was started.
    """
    options = _options(config, overrides, run_id, resume, runs_dir)
    view = CallbackView(Console(highlight=False, quiet=quiet), {STEP: on_step, EVALUATION: on_evaluation})
    return wait_for(lambda: _go(config, options, view), view.stop)


async def run_async(
    config: Config,
    overrides: Overrides = (),
    *,
    run_id: str = "",
    resume: bool = False,
    runs_dir: str | Path | None = None,
    on_step: Callback | None = None,
    on_evaluation: Callback | None = None,
    quiet: bool = False,
) -> RunResult:
    """`run`, with the same arguments, for callers with a loop of their own.

    Cancellation ends the run's processes at once.
    """
    options = _options(config, overrides, run_id, resume, runs_dir)
    view = CallbackView(Console(highlight=False, quiet=quiet), {STEP: on_step, EVALUATION: on_evaluation})
    return await _go(config, options, view)


def rescore(
    run: str | None = None,
    reward: str | None = None,
    overrides: Overrides = (),
    *,
    steps: tuple[int | None, int | None] = (None, None),
    config: str | Path | None = None,
    runs_dir: str | Path | None = None,
) -> dict[str, Any]:
    """Score a run's history with another reward, as `tidemill rescore` does; returns agreement and cost.

    `reward` is FILE.py:FUNCTION or a built-in one, `config` a file whose whole reward section is taken.

    Raises:
        ConfigError: there is no such run or history, or the reward cannot be used.
    """
    from tidemill.services.console.compare.rescore import rescore_report

    options = RescoreOptions(
        run_id=run,
        reward=reward,
        config=None if config is None else Path(config),
        overrides=_words(overrides),
        first=steps[0],
        last=steps[1],
        runs_dir=None if runs_dir is None else Path(runs_dir),
    )
    report, _ = wait_for(lambda: rescore_report(options, Console(quiet=True)))
    return report


class CallbackView(PlainView):
    """Prints as PlainView does, and calls the callbacks with new records of metrics.jsonl."""

    def __init__(self, console: Console, callbacks: Mapping[str, Callback | None]) -> None:
        super().__init__(console)
        self.error: Exception | None = None
        self.run: LocalRun | None = None
        self._callbacks = callbacks
        self._is_stopping = False

    def report(self, news: News) -> None:
        """Print, and call back."""
        super().report(news)
        callback = self._callbacks.get(str(news.identity[0]))
        if callback is None or news.record is None or self._is_stopping:
            return
        try:
            self._is_stopping = callback(news.record) is False
        except Exception as error:  # the user's code: the run stops in order, then the caller sees it
            self.error = error
            self._is_stopping = True
        if self._is_stopping:
            self.stop()

    def stop(self) -> None:
        """Stop the run as the first Ctrl-C does; no effect before it has begun."""
        if self.run is not None:
            self.run.stop()


async def _go(config: Config, options: UpOptions, view: CallbackView) -> RunResult:
    loaded = None if isinstance(config, str | Path) else load_config(config)
    local = await asyncio.to_thread(prepare, options, view.console, config=loaded, view=view)
    view.run = local
    logging = structlog.get_config()
    try:
        code = await local.go()
    finally:
        structlog.configure(**logging)
    if view.error is not None:
        raise view.error
    summary = (read_report(local.folder) or {}) if code in (0, 1) else {}
    return RunResult(local.config.run_id, local.folder.path, code, summary, local.why_not_finished)


def _options(
    config: Config, overrides: Overrides, run_id: str, resume: bool, runs_dir: str | Path | None
) -> UpOptions:
    """The options of `tidemill up`. The path of a config that is no file is that of the run's config.yaml."""
    runs = None if runs_dir is None else Path(runs_dir)
    if isinstance(config, str | Path):
        path = Path(config)
    else:
        config_run_id = config.run_id if isinstance(config, RunConfig) else str(config.get("run_id", ""))
        run_id = run_id or config_run_id or f"run-{time.strftime('%Y%m%d-%H%M%S')}"
        path = folder_of_runs(runs) / run_id / CONFIG_FILE
    words = _words(overrides)
    return UpOptions(config=path, overrides=words, run_id=run_id, resume=resume, live=False, runs_dir=runs)


def _words(overrides: Overrides) -> list[str]:
    if not isinstance(overrides, Mapping):
        return list(overrides)
    values = cast(Mapping[str, Any], overrides)
    return [f"{name}={it if isinstance(it, str) else json.dumps(it)}" for name, it in values.items()]
