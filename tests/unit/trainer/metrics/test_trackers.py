"""Trackers get every record once, also over restarts, and can neither stop a run nor hold it up."""

import json
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tidemill.common.errors import ConfigError
from tidemill.common.run.state import METRICS_FILE, read_records
from tidemill.common.telemetry.trackers import check_loggers
from tidemill.services.trainer.metrics import trackers as sender_module
from tidemill.services.trainer.metrics.recorder import Recorder
from tidemill.services.trainer.metrics.trackers import TRACKERS, Sender, TrackedRun, Tracker

NUMBERS = {"reward": 0.5, "kl": None}


class Memory:
    """A tracker whose server can fail and hang, as real ones do when their network is away."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.fails_at: int | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def open(self, run: TrackedRun) -> Tracker:
        run.state.setdefault("opened_as", run.run_id)
        return Tracker(self.log, self.close)

    def log(self, numbers: Any, at: int, time_s: float) -> None:
        assert time_s > 1.7e9
        self.may_go_on.wait(60)
        if at == self.fails_at:
            raise ConnectionError("no route to host")
        self.rows.append((at, dict(numbers)))

    def close(self) -> None: ...


def record_steps(
    run_dir: Path, open_tracker: Any, steps: range, name: str = "wandb", resume_at: int | None = None
) -> None:
    """A trainer that records steps and the evaluations of the versions they make, then ends."""
    with closing(Recorder(run_dir, resume_at=steps.start if resume_at is None else resume_at)) as r:
        run = TrackedRun("run-1", run_dir, "tidemill", {"trainer": {"steps": 4}}, {})
        r.attach(Sender(name, open_tracker, run))
        for step in steps:
            r.step(step, NUMBERS)
            r.evaluation(step + 1, "test", {"score": 0.25})


def test_every_record_is_sent_once_over_restarts(tmp_path):
    tracker = Memory()
    record_steps(tmp_path, tracker.open, range(2))
    record_steps(tmp_path, tracker.open, range(2, 4))
    assert tracker.rows == [
        row for step in range(4) for row in ((step, {"reward": 0.5}), (step + 1, {"eval/test/score": 0.25}))
    ]


def test_steps_that_are_trained_again_are_not_sent_again(tmp_path):
    tracker = Memory()
    record_steps(tmp_path, tracker.open, range(3))
    record_steps(tmp_path, tracker.open, range(1, 4))
    assert [at for at, row in tracker.rows if "reward" in row] == [0, 1, 2, 3]


def test_a_logger_that_joins_late_or_was_away_gets_what_it_lacks(tmp_path):
    tracker = Memory()
    tracker.fails_at = 2
    with closing(Recorder(tmp_path)) as record:
        for step in range(2):
            record.step(step, NUMBERS)
    record_steps(tmp_path, tracker.open, range(2, 4))
    assert [at for at, _ in tracker.rows] == [0, 1]
    tracker.fails_at = None
    record_steps(tmp_path, tracker.open, range(4, 4))
    assert [at for at, row in tracker.rows if "reward" in row] == [0, 1, 2, 3]


def refuse(run: TrackedRun) -> Tracker:
    raise RuntimeError("no API key")


def fail_later(run: TrackedRun) -> Tracker:
    tracker = Memory()
    tracker.fails_at = 1
    return tracker.open(run)


@pytest.mark.parametrize(("open_tracker", "reason"), [(refuse, "no API key"), (fail_later, "no route")])
def test_a_failing_logger_is_said_once_and_the_run_goes_on(tmp_path, capsys, open_tracker, reason):
    record_steps(tmp_path, open_tracker, range(4))
    said = capsys.readouterr().out
    assert said.count("logger is off") == 1 and reason in said
    assert len(read_records(tmp_path / METRICS_FILE)) == 8


def test_a_logger_that_hangs_does_not_hold_up_a_step(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sender_module, "CLOSE_S", 0.0)
    tracker = Memory()
    tracker.may_go_on.clear()
    record_steps(tmp_path, tracker.open, range(10))
    tracker.may_go_on.set()
    assert "has not finished" in capsys.readouterr().out
    assert len(read_records(tmp_path / METRICS_FILE)) == 20


def test_a_tracker_finds_its_own_state_again(tmp_path):
    record_steps(tmp_path, Memory().open, range(1))
    assert json.loads((tmp_path / "logger-wandb.json").read_text()) == {
        "next": {"": 1, "eval/test/": 2},
        "state": {"opened_as": "run-1"},
    }


def test_a_logger_that_is_not_installed_is_a_mistake_with_its_remedy():
    with pytest.raises(ConfigError, match=r"names absent_tracker, which is not.*pip install 'tidemill\["):
        check_loggers(["json", "absent_tracker"])


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record_steps(tmp_path, TRACKERS["tensorboard"], range(3), name="tensorboard")
    record_steps(tmp_path, TRACKERS["tensorboard"], range(2, 4), name="tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == [0, 1, 2, 3]
    assert [event.step for event in events.Scalars("eval/test/score")] == [1, 2, 3, 4]


def test_wandb_offline_gets_the_names_of_trl(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setattr(sender_module, "CLOSE_S", 240.0)
    monkeypatch.setenv("WANDB_MODE", "offline")
    record_steps(tmp_path, TRACKERS["wandb"], range(2))
    record_steps(tmp_path, TRACKERS["wandb"], range(2, 3))
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) == 2, "one for each start; both have the run's id, so a sync joins them"
    assert all(file.name == "run-run-1.wandb" for file in files)
    content = files[0].read_bytes()
    assert b"train/reward" in content and b"eval/test/score" in content and b"train/global_step" in content
    assert json.loads((tmp_path / "logger-wandb.json").read_text())["next"][""] == 3


def test_mlflow_continues_its_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    monkeypatch.setattr(sender_module, "CLOSE_S", 240.0)  # importing mlflow takes its time
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for steps in (range(2), range(1, 3)):
        record_steps(tmp_path, TRACKERS["mlflow"], steps, name="mlflow")
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("tidemill")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run-1" and run.data.params["trainer.steps"] == "4"
    history = client.get_metric_history(run.info.run_id, "reward")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert run.data.metrics["eval/test/score"] == 0.25
