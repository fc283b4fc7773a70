"""Weights & Biases, MLflow and trackio behind one interface. Imported only where a run names them.

Names are those that TRL's trainers log through transformers: `train/reward` in Weights & Biases and trackio,
`reward` in MLflow; evaluations are `eval/<set>/score` everywhere. Addresses and keys come from the libraries'
own environment variables (WANDB_MODE, WANDB_API_KEY, MLFLOW_TRACKING_URI, TRACKIO_DIR, ...).
"""

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


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
        """Wait for the upload."""
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
        """Write what is left."""
        self._run.finish()


TRACKERS: Mapping[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}


def _prefixed(numbers: Numbers) -> dict[str, float]:
    return {name if name.startswith("eval/") else f"train/{name}": value for name, value in numbers.items()}


def _mlflow_name(name: str) -> str:
    """MLflow refuses other characters."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found
