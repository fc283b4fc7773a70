"""TensorBoard, Weights & Biases, MLflow and trackio: each gets a run's records once, in a thread that can
never stop the run.

`logger-<name>.json` in the run's folder says what was sent and which run of the tracker it went to. A trainer
that resumes sends what metrics.jsonl has beyond that. Of steps that are trained again, the tracker keeps the
first values, metrics.jsonl the last.

Names are those that TRL's trainers log through transformers: `train/reward` in Weights & Biases and trackio,
`reward` in MLflow; evaluations are `eval/<set>/score` everywhere. Addresses and keys come from the libraries'
own environment variables (WANDB_MODE, WANDB_API_KEY, MLFLOW_TRACKING_URI, TRACKIO_DIR, ...).
"""

import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from tidemill.common.config.section import flatten
from tidemill.common.run.state import METRICS_FILE, STEP, Record, parse_record

log = structlog.get_logger(__name__)

Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is given of a run.

    Example: `run_id` "arith-1", `run_dir` runs/arith-1, `project` "tidemill"; a tracker of MLflow fills in
    `state` {"run_id": ...}, its own name of the run.
    """

    run_id: str
    run_dir: Path
    project: str
    config: Mapping[str, Any]
    state: dict[str, str]
    """What a tracker must find again after a restart; it may fill this in when it opens."""


class Tracker(NamedTuple):
    """One open run of a tracker. Any exception switches it off, and the training goes on."""

    log: Callable[[Numbers, int, float], object]
    """Sends numbers, the step or version that they are of, and their time in seconds; names of evaluations
    begin with `eval/`."""
    close: Callable[[], object]
    """Sends what is left."""


def open_tensorboard(run: TrackedRun) -> Tracker:
    """Event files in the run's folder."""
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(log_dir=str(run.run_dir / "tensorboard"))

    def send(numbers: Numbers, at: int, time_s: float) -> None:
        for name, value in numbers.items():
            board.add_scalar(name, value, at, walltime=time_s)
        board.flush()  # what counts as sent must not be lost with the process

    return Tracker(send, board.close)


def open_wandb(run: TrackedRun) -> Tracker:
    """Weights & Biases, with `train/global_step` as x-axis, so that a resumed run may send in any order."""
    import wandb

    session = wandb.init(
        project=run.project,
        id=run.run_id,
        name=run.run_id,
        dir=str(run.run_dir),
        config=dict(run.config),
        resume="allow",
    )
    session.define_metric("train/global_step")
    session.define_metric("*", step_metric="train/global_step")
    return Tracker(lambda numbers, at, _: session.log(_row(numbers, at)), session.finish)


def open_trackio(run: TrackedRun) -> Tracker:
    """A local dashboard with the interface of Weights & Biases."""
    import trackio

    session = trackio.init(
        project=run.project, name=run.run_id, config=dict(run.config), resume="allow", embed=False
    )
    return Tracker(lambda numbers, at, _: session.log(_row(numbers, at), step=at), session.finish)


def open_mlflow(run: TrackedRun) -> Tracker:
    """One MLflow run, found again by its id."""
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    client = MlflowClient()
    if "run_id" not in run.state:
        experiment = client.get_experiment_by_name(run.project)
        number = experiment.experiment_id if experiment else client.create_experiment(run.project)
        run.state["run_id"] = client.create_run(number, run_name=run.run_id).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in flatten(run.config).items()]
        for start in range(0, len(params), 100):  # the most that one request takes
            client.log_batch(run.state["run_id"], params=params[start : start + 100])
    run_id = run.state["run_id"]
    client.update_run(run_id, status="RUNNING")  # `close` ended it; a resumed one goes on

    def send(numbers: Numbers, at: int, time_s: float) -> None:
        named = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in numbers.items()}
        metrics = [Metric(name, value, int(1000 * time_s), at) for name, value in named.items()]
        client.log_batch(run_id, metrics=metrics)

    return Tracker(send, lambda: client.set_terminated(run_id))


TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "tensorboard": open_tensorboard,
    "wandb": open_wandb,
    "mlflow": open_mlflow,
    "trackio": open_trackio,
}


def _row(numbers: Numbers, at: int) -> dict[str, float]:
    named = {name if name.startswith("eval/") else f"train/{name}": value for name, value in numbers.items()}
    return {**named, "train/global_step": at}


CLOSE_S = 20.0
"""How long the end of a run waits for records that are not sent yet."""
FIELDS_OF_RECORD = frozenset(("kind", "step", "version", "time", "set"))


class Sender:
    """One tracker with a thread that follows metrics.jsonl. `wake` never waits; `close` waits at most
    `CLOSE_S`."""

    def __init__(self, name: str, open_tracker: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
        self.name = name
        self._open = open_tracker
        self._run = run
        self._path = run.run_dir / f"logger-{name}.json"
        self._next: dict[str, int] = {}
        """By prefix (steps, or a set's evaluations), the first step or version that was not sent."""
        self._read_position()
        self._offset = 0
        self._is_closing = False
        self._has_more = threading.Event()
        self._has_more.set()  # what an earlier process has recorded and not sent
        # A daemon: a tracker that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        self._has_more.set()

    def close(self) -> None:
        self._is_closing = True
        self._has_more.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("logger has not finished; metrics.jsonl has everything", logger=self.name)

    def _work(self) -> None:
        try:
            tracker = self._open(self._run)
            self._write_position()  # at once: a restart must find the tracker's run again
            is_last = False
            while not is_last:
                self._has_more.wait()
                self._has_more.clear()
                is_last = self._is_closing  # read before the records: `close` comes after the last of them
                self._send_new(tracker)
            tracker.close()
        except Exception as error:
            # The one broad except of the loggers: whatever a tracker's library raises, the run goes on.
            log.warning(
                "logger is off until the trainer starts again, which sends what is missing; the run goes on",
                logger=self.name,
                reason=f"{type(error).__name__}: {error}",
            )

    def _send_new(self, tracker: Tracker) -> None:
        with open(self._run.run_dir / METRICS_FILE, "rb") as file:
            file.seek(self._offset)
            lines = file.read().split(b"\n")
        for line in lines[:-1]:  # what follows the last end of a line may be half of one
            record = parse_record(line)
            if record is not None:
                self._send(tracker, record)
            self._offset += len(line) + 1

    def _send(self, tracker: Tracker, record: Record) -> None:
        is_step = record["kind"] == STEP
        if is_step:
            prefix = ""
            at = record["step"]
        else:
            prefix = f"eval/{record['set']}/"
            at = record["version"]
        if at < self._next.get(prefix, 0):
            return
        numbers = {
            prefix + name: value
            for name, value in record.items()
            if name not in FIELDS_OF_RECORD and isinstance(value, int | float)
        }
        tracker.log(numbers, at, record["time"])
        self._next[prefix] = at + 1
        self._write_position()

    def _read_position(self) -> None:
        try:
            tree = json.loads(self._path.read_bytes())
            self._next = {str(prefix): int(number) for prefix, number in tree["next"].items()}
            self._run.state.update(tree["state"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            log.warning("what was sent to the logger is not known; sending all again", path=str(self._path))

    def _write_position(self) -> None:
        """Without fsync: after a crash of the machine a record may be sent again, which does no harm."""
        aside = self._path.with_suffix(".tmp")
        aside.write_text(json.dumps({"next": self._next, "state": self._run.state}), encoding="utf-8")
        os.replace(aside, self._path)
