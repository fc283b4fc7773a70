"""Records runs with the code of a commit, and replays them with another checkout's.

Everything goes through the commands that users give, in processes of their own: nothing is imported from
either checkout, so their modules may differ as they like. A folder of recordings holds

    source/         the commit's files, which the runs' configs refer to
    models/         models that scripts of the commit have made
    runs/NAME/      a run's folder: config, archive, checkpoints
    digests.json    for each run, what the commit's own code replays

Whether a digest comes out again depends on the machine and on the libraries, so recordings that another
machine or other libraries made are made again.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.recordings.runs import COMMIT, MODEL_SCRIPTS, STEPS, Recording

REPO = Path(__file__).resolve().parents[2]
RECORDINGS_FOLDER = REPO / "build" / "recordings"
TABLE = "digests.json"
LIBRARIES = ("torch", "transformers", "peft", "numpy")
NOT_REPLAYED = ("redis", "weights", "logs")
"""Folders of a run that no replay reads."""
LIMIT_S = 400.0
"""For one command: far above what it takes."""
NUM_LAST_CHARACTERS = 3000

Say = Callable[[str], None]


class RecordingError(Exception):
    """A recording cannot be made or replayed; the text says why, and what to do."""


@dataclass(frozen=True)
class Made:
    """What the commit's own code says of one recording."""

    made_by: str
    """Digest of commit, settings, machine and libraries: where it differs, the recording is made again."""
    digests: list[str]
    """Of the weights after each step."""
    metrics: list[str]
    """Names of the metrics that its replays compare."""
    seconds: float


@dataclass(frozen=True)
class Replay:
    """What a checkout's replay of one recording gave."""

    name: str
    digests: list[str]
    seconds: float
    differences: list[str] = field(default_factory=list)
    """A sentence each; none where everything is the same."""


class Recordings:
    """The recordings of one commit in one folder."""

    def __init__(self, commit: str = COMMIT, folder: Path = RECORDINGS_FOLDER, say: Say = print) -> None:
        """Raises RecordingError: this clone does not have the commit."""
        self.commit = full_hash(commit)
        self.folder = folder / self.commit[:12]
        self.source = self.folder / "source"
        self.models = self.folder / "models"
        self.runs = self.folder / "runs"
        self.say = say

    def make(self, recording: Recording, is_fresh: bool = False) -> Made:
        """Record one run with the commit's code and replay it with the same code, unless that is done.

        Raises:
            RecordingError: the run ended badly, does not show what it is recorded for, or does not replay.
        """
        made_by = self._made_by(recording)
        table = self.table()
        recorded = table.get(recording.name)
        if recorded is not None and recorded.made_by == made_by and not is_fresh:
            return recorded
        self._check_out()
        self._make_models(recording)
        started_at = time.monotonic()
        self._record(recording)
        results = self._results(recording, self.source)
        replay = _compared(recording, results, [], 0.0)
        if replay.differences:
            raise RecordingError(
                f"{recording.name}: commit {self.commit[:12]} itself does not replay it: "
                + "; ".join(replay.differences)
            )
        _check_shows(recording, results)
        metrics = sorted({row["name"] for result in results for row in result["metrics"]})
        recorded = Made(made_by, replay.digests, metrics, round(time.monotonic() - started_at, 1))
        self._write_table(self.table() | {recording.name: recorded})
        self.say(f"{recording.name}: recorded and replayed in {recorded.seconds:.0f} s")
        return recorded

    def replay(self, recording: Recording, checkout: Path = REPO) -> Replay:
        """Train all steps of a recording again with the code of a checkout, and compare the results.

        Raises:
            RecordingError: it has not been recorded, or the replay ended without its results.
        """
        recorded = self.table().get(recording.name)
        if recorded is None:
            raise RecordingError(
                f"{recording.name} has not been recorded in {self.folder}; "
                "first run `python -m tests.recordings make`"
            )
        started_at = time.monotonic()
        results = self._results(recording, checkout)
        replay = _compared(recording, results, recorded.metrics, time.monotonic() - started_at)
        if replay.digests != recorded.digests:
            replay.differences.append(f"digests are {replay.digests}; recorded were {recorded.digests}")
        return replay

    def table(self) -> dict[str, Made]:
        """What has been made so far, by name. Raises RecordingError: the table cannot be read."""
        path = self.folder / TABLE
        if not path.is_file():
            return {}
        try:
            rows = json.loads(path.read_text())["recordings"]
        except json.JSONDecodeError as error:
            raise RecordingError(
                f"{path} is no JSON ({error}): remove it, and make the recordings again"
            ) from None
        return {name: Made(**row) for name, row in rows.items()}

    def _write_table(self, table: dict[str, Made]) -> None:
        rows = {name: asdict(recorded) for name, recorded in sorted(table.items())}
        text = json.dumps({"commit": self.commit, "recordings": rows}, indent=2)
        # A process that is killed in the middle leaves the table that was there.
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.folder / f"{TABLE}.unfinished"
        unfinished.write_text(text + "\n")
        unfinished.replace(self.folder / TABLE)

    def _made_by(self, recording: Recording) -> str:
        parts = [
            self.commit,
            str(recording.config(self.source)),
            *recording.overrides(self.source, self.models),
            *_machine(),
        ]
        return sha256("\n".join(parts).encode()).hexdigest()

    def _check_out(self) -> None:
        """Write the commit's files, without a work tree that git knows of."""
        if (self.source / "pyproject.toml").is_file():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as temporary:
            archive = Path(temporary) / "source.tar"
            _finished(["git", "archive", "--output", str(archive), self.commit], REPO)
            target = Path(temporary) / "source"
            target.mkdir()
            _finished(["tar", "-x", "-f", str(archive), "-C", str(target)], REPO)
            # All files or none: the folder is complete where it exists.
            target.rename(self.source)

    def _make_models(self, recording: Recording) -> None:
        """The models that the recording's settings name, where they have not been made yet."""
        words = recording.overrides(self.source, self.models)
        for name, (script, *options) in MODEL_SCRIPTS.items():
            folder = self.models / name
            is_needed = any(str(folder) in word for word in words)
            if not is_needed or (folder / "config.json").is_file():
                continue
            self.say(f"{recording.name}: making the model {name}")
            unfinished = self.models / f"{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            self._run([sys.executable, script, *options, "--out", str(unfinished)], self.source, recording)
            unfinished.rename(folder)

    def _record(self, recording: Recording) -> None:
        run = self.runs / recording.name
        shutil.rmtree(run, ignore_errors=True)
        config = str(recording.config(self.source))
        command = [*TIDEMILL, "up", config, "--no-live", "--run-id", recording.name]
        for override in recording.overrides(self.source, self.models):
            command += ["--set", override]
        self._run(command, self.source, recording)
        for name in NOT_REPLAYED:
            shutil.rmtree(run / name, ignore_errors=True)

    def _results(self, recording: Recording, checkout: Path) -> list[dict[str, Any]]:
        """What `tidemill replay` says of all steps."""
        steps = f"0..{STEPS - 1}"
        command = [*TIDEMILL, "replay", steps, recording.name, "--json"]
        done = self._run(command, checkout, recording, may_differ=True)
        try:
            results: list[dict[str, Any]] = json.loads(done.stdout)
        except json.JSONDecodeError as error:
            raise RecordingError(
                f"{recording.name}: no JSON ({error}) in {checkout} from {' '.join(command)}\n"
                f"{_tail_of(done.stdout, done.stderr)}"
            ) from None
        return results

    def _run(
        self, command: Sequence[str], checkout: Path, recording: Recording, may_differ: bool = False
    ) -> "subprocess.CompletedProcess[str]":
        """A command with the code of a checkout. With `may_differ`, exit code 1 with output is an answer."""
        # Python searches the working directory first, so `tidemill` is the checkout's own package.
        dropped = ("TIDEMILL_", "PYTEST_", "PYTHONPATH")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        environment |= {
            "TIDEMILL_RUNS_DIR": str(self.runs),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        try:
            return _finished(command, checkout, environment, may_differ)
        except RecordingError as error:
            raise RecordingError(f"{recording.name}: {error}") from None


TIDEMILL = (sys.executable, "-m", "tidemill")


def _finished(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    may_differ: bool = False,
) -> "subprocess.CompletedProcess[str]":
    """A command at its end. With `may_differ`, exit code 1 with output is an answer.

    Raises:
        RecordingError: it failed, or took longer than `LIMIT_S`.
    """
    words = f"in {folder} of {' '.join(command)}"
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise RecordingError(
            f"no end within {LIMIT_S:g} s {words}\n{_tail_of(error.stdout, error.stderr)}"
        ) from None
    except FileNotFoundError as error:
        raise RecordingError(f"{error.filename} is not there, {words}") from None
    if done.returncode == 0 or (may_differ and done.returncode == 1 and done.stdout):
        return done
    raise RecordingError(f"exit code {done.returncode} {words}\n{_tail_of(done.stdout, done.stderr)}")


def _tail_of(*outputs: str | bytes | None) -> str:
    """The end of what a command has printed. That of one that took too long comes as bytes."""
    texts = []
    for output in outputs:
        texts.append(output.decode(errors="replace") if isinstance(output, bytes) else output or "")
    return "".join(texts)[-NUM_LAST_CHARACTERS:]


def full_hash(commit: str) -> str:
    """The whole name of a commit. Raises RecordingError: this clone does not have it."""
    command = ["git", "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}"]
    try:
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    except FileNotFoundError:
        raise RecordingError(
            f"git is not installed, and commit {commit} is recorded from its history"
        ) from None
    if done.returncode != 0:
        raise RecordingError(
            f"{REPO} does not have commit {commit}, whose runs are recorded. Recordings need a clone with "
            "its history: in a shallow clone, `git fetch --unshallow` gets it."
        )
    return done.stdout.strip()


def _machine() -> list[str]:
    """What a digest depends on besides the code: the processor, Python and libraries."""
    processor = Path("/proc/cpuinfo")
    lines = processor.read_text().splitlines() if processor.is_file() else [str(os.uname())]
    of_processor = {line for line in lines if line.startswith(("model name", "flags", "Features"))}
    return [*sorted(of_processor), sys.version, *(f"{name} {version(name)}" for name in LIBRARIES)]


def _compared(
    recording: Recording, results: Sequence[dict[str, Any]], metrics: Sequence[str], seconds: float
) -> Replay:
    """`metrics` are the names of those that have to be compared."""
    differences = []
    compared = set()
    for result in results:
        rows = result["metrics"]
        compared |= {row["name"] for row in rows}
        step = f"step {result['step']}"
        if not result["digest"]["equal"]:
            differences.append(f"{step}: other weights")
        differences += [
            f"{step}: {row['name']} is {row['replayed']}, recorded was {row['recorded']}"
            for row in rows
            if not row["equal"]
        ]
        if not result["advantages"]["equal"]:
            differences.append(f"{step}: other advantages, the first: {result['advantages']['first']}")
        if not result["left_out"]["equal"]:
            differences.append(f"{step}: other samples are left out")
    if len(results) != STEPS:
        differences.append(f"{len(results)} steps were replayed, and not {STEPS}")
    missing = sorted(set(metrics) - compared)
    if missing:
        differences.append(f"metrics that are not computed any more: {', '.join(missing)}")
    digests = [result["digest"]["replayed"] for result in results]
    return Replay(recording.name, digests, seconds, differences)


def _check_shows(recording: Recording, results: Sequence[dict[str, Any]]) -> None:
    """Raises RecordingError: the run does not have what it is recorded for."""
    greatest: dict[str, float] = {}
    for result in results:
        for row in result["metrics"]:
            before = greatest.get(row["name"], row["recorded"])
            greatest[row["name"]] = max(before, row["recorded"])
    for name, bound in recording.above.items():
        if not greatest.get(name, bound) > bound:
            raise RecordingError(
                f"{recording.name}: {name} is {greatest.get(name)} at most, and has to be above {bound}: "
                "the run does not show what it is recorded for"
            )
    digests = {result["digest"]["recorded"] for result in results}
    if len(digests) != STEPS:
        raise RecordingError(f"{recording.name}: not every step has changed the weights")
