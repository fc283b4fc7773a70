"""Weights & Biases, MLflow and trackio: each gets a run's records once, in a thread that can never stop the
run.

`logger-<name>.json` in the run's folder says what was sent and which run of the tracker it went to. A trainer
that resumes sends what metrics.jsonl has beyond that. Of steps that are trained again, the tracker keeps the
first values, metrics.jsonl the last.

Names are those that TRL's trainers log through transformers: `train/reward` in Weights & Biases and trackio,
`reward` in MLflow; evaluations are `eval/<set>/score` everywhere. Addresses and keys come from the libraries'
own environment variables (WANDB_MODE, WANDB_API_KEY, MLFLOW_TRACKING_URI, TRACKIO_DIR, ...).
"""

import json
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import structlog

from tidemill.common.run.state import STEP, Record

Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told about a run."""

    run_id: str
    run_dir: Path
    project: str
    config: Mapping[str, Any]
    state: dict[str, str]
    """What a tracker must find again after a restart; it may fill this in when it opens."""


class Tracker(Protocol):
    """One open run of a tracker. Any exception switches it off, and the training goes on."""

    def log(self, numbers: Numbers, at: int) -> None:
        """Send numbers of the step or version `at`; names of evaluations begin with `eval/`."""

    def close(self) -> None:
        """Send what is left."""


class WandbTracker:
    """Has an x-axis of its own, `train/global_step`, so that a resumed run may send in any order."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project,
            id=run.run_id,
            name=run.run_id,
            dir=str(run.run_dir),
            config=dict(run.config),
            resume="allow",
        )
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step")

    def log(self, numbers: Numbers, at: int) -> None:
        """Send them as one row."""
        self._run.log({**_prefixed(numbers), "train/global_step": at})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """One MLflow run, found again by its id."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient()
        if "run_id" not in run.state:
            experiment = self._client.get_experiment_by_name(run.project)
            number = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
            run.state["run_id"] = self._client.create_run(number, run_name=run.run_id).info.run_id
            params = [Param(key, str(value)[:500]) for key, value in _flat(run.config).items()]
            for start in range(0, len(params), 100):  # of one request, at most
                self._client.log_batch(run.state["run_id"], params=params[start : start + 100])
        self._run_id = run.state["run_id"]
        self._client.update_run(self._run_id, status="RUNNING")

    def log(self, numbers: Numbers, at: int) -> None:
        """Send them as one batch."""
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(_mlflow_name(name), value, now_ms, at) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """End the run; a resumed one opens it again."""
        self._client.set_terminated(self._run_id)


class TrackioTracker:
    """A local dashboard with the interface of Weights & Biases."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._run = trackio.init(
            project=run.project, name=run.run_id, config=dict(run.config), resume="allow", embed=False
        )

    def log(self, numbers: Numbers, at: int) -> None:
        """Send them as one row."""
        self._run.log({**_prefixed(numbers), "train/global_step": at}, step=at)

    def close(self) -> None:
        self._run.finish()


TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}


def _prefixed(numbers: Numbers) -> dict[str, float]:
    return {name if name.startswith("eval/") else f"train/{name}": value for name, value in numbers.items()}


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. /]", "_", name)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


log = structlog.get_logger(__name__)

MAX_QUEUED = 10_000
"""Records that wait for a slow tracker; sending one frees its place. With more it is switched off."""
CLOSE_S = 20.0
"""How long the end of a run waits for what is not sent yet."""
FIELDS_OF_RECORD = frozenset(("kind", "step", "version", "time", "set"))


@dataclass(slots=True)
class Position:
    next_step: int = 0
    evaluations: dict[str, int] = field(default_factory=dict)
    """Newest version sent, by dataset."""
    state: dict[str, str] = field(default_factory=dict)
    """The tracker's own."""

    def has(self, record: Record) -> bool:
        """Whether the record was sent."""
        if record["kind"] == STEP:
            return bool(record["step"] < self.next_step)
        return bool(record["version"] <= self.evaluations.get(record["set"], -1))

    def add(self, record: Record) -> None:
        """Note that it was sent."""
        if record["kind"] == STEP:
            self.next_step = record["step"] + 1
        else:
            self.evaluations[record["set"]] = record["version"]


class Sender:
    """One tracker with its thread. `send` never waits; `close` waits at most `CLOSE_S`."""

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[TrackedRun], Tracker],
        run: TrackedRun,
        records: Iterable[Record],
    ) -> None:
        """`records` are all that are on record; those that the tracker lacks are sent first."""
        self.name, self._open, self._run = name, open_tracker, run
        self._path = run.run_dir / f"logger-{name}.json"
        self._position = _read_position(self._path)
        run.state.update(self._position.state)
        self._backlog = [record for record in records if not self._position.has(record)]
        self._queue: queue.Queue[Record | None] = queue.Queue(MAX_QUEUED)
        self._is_off = False
        # A daemon: a tracker that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def send(self, record: Record) -> None:
        if self._is_off:
            return
        try:
            self._queue.put_nowait(record)
        except queue.Full:
            self._switch_off("it is too slow, and too many records wait for it")

    def close(self) -> None:
        """Wait for what is queued, then leave."""
        if not self._is_off:
            self._queue.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("logger has not finished; metrics.jsonl has everything", logger=self.name)

    def _work(self) -> None:
        try:
            tracker = self._open(self._run)
            self._write_position()  # at once: a restart must find the tracker's run again
            for record in self._backlog:
                self._send_one(tracker, record)
            while not self._is_off and (next_record := self._queue.get()) is not None:
                self._send_one(tracker, next_record)
            tracker.close()
        except Exception as error:
            # The one broad except of the loggers: whatever a tracker's library raises, the run goes on.
            self._switch_off(f"{type(error).__name__}: {error}")

    def _send_one(self, tracker: Tracker, record: Record) -> None:
        if self._position.has(record):
            return
        is_step = record["kind"] == STEP
        prefix = "" if is_step else f"eval/{record['set']}/"
        numbers = {
            prefix + name: float(value)
            for name, value in record.items()
            if name not in FIELDS_OF_RECORD and isinstance(value, int | float)
        }
        tracker.log(numbers, record["step"] if is_step else record["version"])
        self._position.add(record)
        self._write_position()

    def _write_position(self) -> None:
        """Without fsync: after a crash of the machine a record may be sent again, which does no harm."""
        self._position.state = dict(self._run.state)
        aside = self._path.with_suffix(".tmp")
        aside.write_text(json.dumps(asdict(self._position)), encoding="utf-8")
        os.replace(aside, self._path)

    def _switch_off(self, reason: str) -> None:
        if not self._is_off:
            self._is_off = True
            log.warning(
                "logger is off until the trainer starts again, which sends what is missing; the run goes on",
                logger=self.name,
                reason=reason,
            )


def _read_position(path: Path) -> Position:
    try:
        tree = json.loads(path.read_bytes())
        return Position(int(tree["next_step"]), dict(tree["evaluations"]), dict(tree["state"]))
    except FileNotFoundError:
        return Position()
    except (OSError, ValueError, KeyError, TypeError):
        log.warning("what was sent to the logger is not known; sending all again", path=str(path))
        return Position()
