"""A run's folder, and how the commands find a run again.

`<runs>/<run_id>/` holds all that a run leaves behind; `<runs>/latest` points at the newest one. While
`tidemill up` keeps a Redis of its own, `redis.url` holds its address, readable by its owner only.
Every command begins here, so what only some need (configs, YAML) is imported where it is used.
"""

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tidemill.common.command_line import command_line
from tidemill.common.errors import BrokerError, ConfigError
from tidemill.common.files import StorageError, did_you_mean, write_atomically
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.run.state import ADDRESS_FILE, CONFIG_FILE, runs_dir

if TYPE_CHECKING:
    from tidemill.common.config import RunConfig


LATEST = "latest"
RUN_VARIABLE = "TIDEMILL_RUN_ID"
"""The run that commands are about when none is given, as in the containers of docker-compose.yml."""
SUMMARY_FILE = "summary.json"
PICTURE_FILE = "reward.png"


RUN_OPTIONS = {"streams": "--run", "dead": "--run", "up": "--run-id"}
"""Commands, and groups of them, that take the run by an option, for their arguments mean something else."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`<runs>/<run_id>`; nothing is created before `create`.

    Example: `RunFolder(Path("runs"), "a")` is `runs/a`, with `config.yaml`, `logs/` and `weights/` in it.
    """

    runs: Path
    run_id: str

    @property
    def path(self) -> Path:
        return self.runs / self.run_id

    def command(self, *words: str) -> str:
        """The command line of `tidemill WORDS` for this run, to be copied: with its id before the options,
        and with its folder of runs where that is not the usual one."""
        option = RUN_OPTIONS.get(words[0])
        run = [self.run_id] if option is None else [option, self.run_id]
        is_usual = self.runs.resolve() == folder_of_runs(None).resolve()
        runs = [] if is_usual else ["--runs-dir", nearest(self.runs)]
        num_arguments = next((at for at, word in enumerate(words) if word.startswith("-")), len(words))
        return command_line(*words[:num_arguments], *run, *words[num_arguments:], *runs)

    @property
    def logs(self) -> Path:
        """One log file for each process, appended to over restarts."""
        return self.path / "logs"

    @property
    def redis_data(self) -> Path:
        return self.path / "redis"

    @property
    def summary(self) -> Path:
        return self.path / SUMMARY_FILE

    @property
    def address_file(self) -> Path:
        """Address of the run's own Redis, while it runs."""
        return self.path / ADDRESS_FILE

    def create(self, config: "RunConfig", is_sandbox: bool = False) -> None:
        """Make the folder, keep the resolved config in it, and let `latest` point at it. The folder of a
        sandbox must be new, and is never the latest."""
        try:
            self.path.mkdir(parents=True, exist_ok=not is_sandbox)
            self.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the run's folder {self.path}: {error.strerror}. Give another with --runs-dir."
            ) from None
        import yaml

        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        write_atomically(self.path / CONFIG_FILE, text)
        self._keep_tokenizer(Path(config.model.path))
        if is_sandbox:
            return
        # One rename replaces the link, so that `latest` is there at every moment.
        aside = self.runs / f".{LATEST}.{os.getpid()}"
        aside.unlink(missing_ok=True)
        aside.symlink_to(self.run_id, target_is_directory=True)
        try:
            os.replace(aside, self.runs / LATEST)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise ConfigError(
                f"cannot point {self.runs / LATEST} at the run: {error.strerror}. Move what is there away."
            ) from None

    def clear(self) -> None:
        """Remove the files of a run that ended before its first step, but not its logs."""
        for path in self.path.iterdir():
            if path == self.logs:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _keep_tokenizer(self, model: Path) -> None:
        """Copy the model's `tokenizer.json`. The run itself does not need the copy: it is for a folder that
        is moved to a machine without the model, where tokens could not be shown as text otherwise."""
        from tidemill.common.data.prompt_lengths import TOKENIZER_FILE

        with contextlib.suppress(OSError, StorageError):
            write_atomically(self.path / TOKENIZER_FILE, (model / TOKENIZER_FILE).read_bytes())

    def config(self) -> "RunConfig | None":
        """The config that the run was last started with; None where the folder does not hold it.

        Raises:
            ConfigError: this release does not understand it.
        """
        from tidemill.common.config import load_recorded

        path = self.path / CONFIG_FILE
        return load_recorded(path) if path.exists() else None

    def write_address(self, url: str) -> None:
        descriptor = os.open(self.address_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(url)

    def address(self) -> str | None:
        """Address of this run's Redis: its own while it has one, else the environment's."""
        url = ""
        with contextlib.suppress(OSError):  # while it is written, it is empty
            url = self.address_file.read_text().strip()
        return url or os.environ.get(URL_VARIABLE) or None


def folder_of_runs(folder: str | Path | None) -> Path:
    """The folder of all runs: what the user gave, else the environment's, else ./runs."""
    return Path(folder).resolve() if folder else runs_dir()


def find_run(run: str | Path | None, runs_dir: str | Path | None = None) -> RunFolder:
    """The run that the user means: by id, by its folder wherever it is, by the environment, or the latest.

    Examples, with the runs in /work/runs: "a" is /work/runs/a, and "/old/runs/a" is that folder. "latest" is
    what the link /work/runs/latest points at. None is the run that `RUN_VARIABLE` names, else the latest.
    """
    run_name = str(run or os.environ.get(RUN_VARIABLE, ""))
    runs = folder_of_runs(runs_dir)
    if run_name and "/" in run_name:
        folder = Path(run_name).resolve()  # runs/latest is a link
        return RunFolder(folder.parent if folder.is_dir() else runs, folder.name)
    # A run may have the id "latest" itself: then a folder is there, not the link.
    is_link = run_name == LATEST and (runs / LATEST).is_symlink()
    if run_name and not is_link:
        return RunFolder(runs, run_name)
    try:
        target = os.readlink(runs / LATEST)
        return RunFolder(runs, target.rstrip("/").rpartition("/")[2])
    except OSError:
        raise ConfigError(
            f"no run id was given and {runs / LATEST} does not exist. Give the id of a run, or its folder of "
            f"runs with --runs-dir, or set {RUN_VARIABLE}."
        ) from None


def new_run_id(config: Path, default: str = "run") -> str:
    """The id of a run that was given none: the name of its config's folder, and the time.

    Example: "my-sums-20260131-093000" for `my sums/config.yaml`.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", config.resolve().parent.name)
    stem = name.lstrip("._-")[:80] or default
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def nearest(path: Path) -> str:
    """A path for messages: relative where it lies in the current folder, else as it is."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@contextlib.asynccontextmanager
async def connected(to: RunFolder | str) -> AsyncIterator[Broker]:
    """A connection to the Redis of a run, or at an address, closed at the end.

    Raises:
        TidemillError: the run's Redis is not known, or it does not answer.
    """
    broker = await (Broker.connect(to) if isinstance(to, str) else _connect(to))
    try:
        yield broker
    finally:
        await broker.close()


async def _connect(folder: RunFolder) -> Broker:
    url = folder.address()
    if url is None:
        if folder.path.is_dir():
            state = f"no Redis to ask ({nearest(folder.path)}: it is not running now)."
        else:
            hint = did_you_mean(Path(nearest(folder.path)), Path.is_dir)
            state = f"no Redis to ask, and {nearest(folder.path)} does not exist.{hint}"
        raise ConfigError(
            f"run {folder.run_id}: {state} Set {URL_VARIABLE} to "
            f"the run's server, or start the run with `{command_line('up', 'CONFIG')}`."
        )
    try:
        return await Broker.connect(url)
    except BrokerError as error:
        if not folder.address_file.exists():
            raise
        raise BrokerError(
            f"the Redis of run {folder.run_id} does not answer: its `tidemill up` was probably killed. "
            f"Continue the run with `{folder.command('up', 'CONFIG', '--resume')}`. "
            f"({error})"
        ) from None


def log_to_file(path: Path) -> None:
    """Append to a file of the run, which stays open for as long as the process lives."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S"),
            structlog.dev.ConsoleRenderer(colors=False),
        ],
        logger_factory=structlog.PrintLoggerFactory(path.open("a", buffering=1, encoding="utf-8")),
        cache_logger_on_first_use=False,
    )


def log_nothing() -> None:
    """Drop all logs: commands that only read print what matters themselves."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
