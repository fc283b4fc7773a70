"""Where a plan takes its times from, and what is said where there are none."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.trajectories import make_config
from tidemill.common.errors import ConfigError
from tidemill.services.console.options import PlanOptions
from tidemill.services.console.plan.plan import latest_like, make_plan, plan
from tidemill.services.console.run.folder import RunFolder


def add_run(runs: Path, name: str, **sections: Any) -> RunFolder:
    """The folder of a run with this config; a later one is newer."""
    folder = runs / name
    folder.mkdir(parents=True)
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(make_config(**sections).model_dump(mode="json")))
    stamp = 1e9 + len(list(runs.iterdir()))
    os.utime(file, (stamp, stamp))
    return RunFolder(runs, name)


def test_the_newest_run_whose_stages_take_as_long_is_taken(tmp_path: Path) -> None:
    add_run(tmp_path, "old", reward={"workers": 2})
    wanted = add_run(tmp_path, "new", reward={"workers": 5})
    add_run(tmp_path, "other", trainer={"group_size": 3})
    (tmp_path / "latest").symlink_to("other")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("trainer: {no_such_field: 1}")
    assert latest_like(make_config(), tmp_path, Path("c.yaml")) == wanted


def test_without_a_measured_run_the_ways_to_get_times_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)--measure.*--run RUN_ID.*--assume") as caught:
        latest_like(make_config(), tmp_path, Path("c.yaml"))
    assert caught.value.exit_code == 2


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    file = tmp_path / "config.yaml"
    file.write_text("model: {path: model}\ndata: {train: train.jsonl}\n")
    return file


def test_a_run_without_a_measured_step_is_refused_with_a_way_out(tmp_path: Path, config_file: Path) -> None:
    add_run(tmp_path / "runs", "young")
    with pytest.raises(ConfigError, match=r"run young has no step yet .* --assume"):
        plan(PlanOptions(config_file, run="young", runs_dir=tmp_path / "runs"))


def test_times_come_from_one_place(config_file: Path) -> None:
    with pytest.raises(ConfigError, match="give one of --run, --measure and --assume"):
        plan(PlanOptions(config_file, run="a", measure=True))


def test_assumed_times_are_planned_with(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    options = PlanOptions(
        config_file,
        ("trainer.groups_per_step=10", "trainer.group_size=10", "reward.processes=2"),
        assume="reward=4s,rollout=1000tok/s,trainer=20s,tokens=100",
    )
    plan(options)
    text = capsys.readouterr().out
    # 100 scores of 2 at once in 4 s take 200 s; of the trainer's 20 s there are 16 s.
    assert "13 workers: 100 scores / (0.5 scores/s x 16 s)" in text
    assert "slowest  reward" in text


def test_a_plan_for_programs_has_the_same_numbers(config_file: Path) -> None:
    from tidemill.common.config import load_config

    options = PlanOptions(config_file, assume="reward=4s,rollout=1e6tok/s,trainer=20s,tokens=100")
    found = make_plan(load_config(config_file), options).as_dict()
    assert (found["bottleneck"], found["verdict"]) == ("reward", None)
    # 256 scores of 2 at once in 4 s: 512 s
    assert found["step"]["now"]["step_s"] == pytest.approx(512)
    assert found["step"]["one_more"]["reward"]["step_s"] == pytest.approx(256)
    assert found["workers"] == {"now": {"rollout": 1, "reward": 1}, "needed": {"rollout": 1, "reward": 32}}
