"""Every step and every evaluation is on record once, also after a resume."""

import json
import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import structlog

from tests.support.disks import largest_file
from tidemill.common.files import StorageError
from tidemill.common.run.state import read_records
from tidemill.common.wire.messages import Commit
from tidemill.services.console.look.plots import plot_learning_curve
from tidemill.services.trainer.metrics.recorder import Recorder


def steps_on_record(run_dir: Path) -> list[int]:
    return [record["step"] for record in read_records(run_dir / "metrics.jsonl") if record["kind"] == "step"]


def evaluations_on_record(run_dir: Path) -> list[tuple[int, str]]:
    records = read_records(run_dir / "metrics.jsonl")
    return [(record["version"], record["set"]) for record in records if record["kind"] == "evaluation"]


def record_run(run_dir: Path) -> None:
    """Steps 0 to 3, evaluated at versions 0, 2 and 4."""
    with closing(Recorder(run_dir)) as record:
        record.evaluation(0, "test", {"score": 0.1})
        for step in range(4):
            record.step(step, {"reward": step / 10, "rewards/format/mean": 1.0})
            if step % 2:
                record.evaluation(step + 1, "test", {"score": 0.2 + step / 10})


def test_a_step_is_one_json_object_on_one_line(tmp_path):
    with closing(Recorder(tmp_path)) as record:
        record.step(0, {"reward": 0.5, "num_groups": 8, "completions/mean_length": np.float32(12.5)})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    parsed = json.loads(line)
    assert parsed.pop("time") > 1.7e9
    assert parsed == {
        "kind": "step", "step": 0, "reward": 0.5, "num_groups": 8, "completions/mean_length": 12.5,
    }  # fmt: skip


def test_values_that_are_not_finite_are_null_and_the_line_is_strict_json(tmp_path):
    with closing(Recorder(tmp_path)) as record:
        record.step(
            0, {"kl": float("nan"), "loss": float("inf"), "entropy": None, "grad_norm": np.float64("-inf")}
        )

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    parsed = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert [parsed[name] for name in ("kl", "loss", "entropy", "grad_norm")] == [None] * 4
    with closing(Recorder(tmp_path)) as record, pytest.raises(ValueError, match="named step, time"):
        record.step(1, {"step": 1.0, "time": 1.0})


@pytest.mark.parametrize("resume_at", [0, 1, 2, 3, 4])
def test_a_resume_cuts_off_what_will_be_done_again(tmp_path, resume_at):
    record_run(tmp_path)
    with closing(Recorder(tmp_path, resume_at=resume_at)) as record:
        assert steps_on_record(tmp_path) == list(range(resume_at))
        assert evaluations_on_record(tmp_path) == [(v, "test") for v in (0, 2, 4) if v <= resume_at]
        for step in range(resume_at, 4):
            record.step(step, {"reward": 1.0})
    assert steps_on_record(tmp_path) == [0, 1, 2, 3]


def test_a_repeated_step_or_evaluation_is_recorded_once_and_the_first_one_stays(tmp_path):
    record_run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with closing(Recorder(tmp_path, resume_at=4)) as record:
        assert record.has_evaluation(4, "test") and not record.has_evaluation(4, "other")
        record.evaluation(4, "test", {"score": 9.0})
        record.step(3, {"reward": 9.0})
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_line_that_a_crash_cut_off_is_removed_before_the_next_is_written(tmp_path):
    record_run(tmp_path)
    path = tmp_path / "metrics.jsonl"
    os.truncate(path, path.stat().st_size - 5)
    assert steps_on_record(tmp_path) == [0, 1, 2, 3]
    with closing(Recorder(tmp_path, resume_at=4)) as record:
        assert not record.has_evaluation(4, "test"), "its line was the one cut off"
        record.evaluation(4, "test", {"score": 0.5})
    assert evaluations_on_record(tmp_path) == [(0, "test"), (2, "test"), (4, "test")]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_what_the_file_has_lost_comes_back_from_commits_and_the_runs_state(tmp_path):
    record_run(tmp_path)
    evaluations = [r for r in read_records(tmp_path / "metrics.jsonl") if r["kind"] == "evaluation"]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[3:4]))

    def commit_of(step):
        values = {"step": step, "version": step + 1, "mini_batches": (), "groups": (), "digest": "0" * 32}
        return Commit(**values, metrics={"reward": step / 10}, finished_at=9.0) if step else None

    with structlog.testing.capture_logs() as logs:
        Recorder(tmp_path, 3, commit_of, [*evaluations, {"version": 0, "dataset": "older"}]).close()
    assert steps_on_record(tmp_path) == [1, 2]
    assert evaluations_on_record(tmp_path) == [(0, "test"), (2, "test")]
    assert [record["reward"] for record in read_records(path) if record["kind"] == "step"] == [0.1, 0.2]
    assert [entry["count"] for entry in logs if entry["log_level"] == "warning"] == [1], "that of step 0"


def test_a_line_that_does_not_fit_on_the_disk_is_not_there_in_part(tmp_path):
    record = Recorder(tmp_path)
    record.step(0, {"reward": 0.0})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with largest_file(len(before) + 10), pytest.raises(StorageError):
        record.step(1, {"reward": 0.1})
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    record.step(1, {"reward": 0.1})
    record.close()
    assert steps_on_record(tmp_path) == [0, 1]


@pytest.mark.parametrize(
    ("records", "is_drawn"),
    [
        ([], False),
        ([{"kind": "step", "step": 0, "reward": None}], False),
        ([{"kind": "evaluation", "version": 0, "set": "a"}], False),
        ([{"kind": "evaluation", "version": 0, "set": "test", "score": 0.5}], True),
        ([{"kind": "step", "step": 0, "reward": 0.5}], True),
        ([{"kind": "step", "step": s, "reward": None if s == 3 else 0.5} for s in range(30)], True),
    ],
    ids=["no records", "no finite reward", "no reward", "only an evaluation", "only one step", "a gap"],
)
def test_the_learning_curve_is_a_png_unless_there_is_nothing_to_draw(tmp_path, records, is_drawn):
    timed = [{"time": 1.0, **record} for record in records]
    assert plot_learning_curve(timed, tmp_path / "reward.png") is is_drawn
    contents = [path.read_bytes()[:6] for path in tmp_path.iterdir()]
    assert contents == [b"\x89PNG\r\n"] * is_drawn
