"""Whole runs from Python: what callbacks, results and history say of them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tidemill
from tests.support.runs import simulated_config
from tidemill.services.console.__main__ import app

pytestmark = pytest.mark.usefixtures("forked_checks")


def test_a_run_its_history_and_a_run_that_a_callback_stops(tmp_path: Path) -> None:
    config = simulated_config(tmp_path, trainer__steps=3, streams__archive={"enabled": True})
    runs = tmp_path / "runs"
    steps = list[Any]()
    result = tidemill.run(config, run_id="one", runs_dir=runs, on_step=steps.append, quiet=True)
    assert result.is_ok and result.summary["steps"] == 3 and result.folder == runs / "one"
    assert [record["step"] for record in steps] == [0, 1, 2]
    assert [row["reward"] for row in result.metrics.rows()] == [record["reward"] for record in steps]

    history = result.history
    assert [commit.step for commit in history.steps()] == [0, 1, 2]
    groups = history.groups()
    assert [group.number for group in groups] == list(range(len(groups))) and all(
        g.is_trained for g in groups
    )
    for group, row in zip(groups, groups.rows(), strict=True):
        rewards = [sample.reward or 0.0 for sample in group.samples]
        assert row["reward"] == pytest.approx(sum(rewards) / len(rewards))
    samples = history.samples(steps=1)
    assert len(samples) == config.trainer.groups_per_step * config.trainer.group_size
    assert {row["issued_for"] for row in samples.rows()} == {1}
    table = history.samples().to_arrow()
    by_step = table.group_by("trained_at").aggregate([("reward", "mean")]).to_pylist()
    assert {row["trained_at"]: row["reward_mean"] for row in by_step} == pytest.approx(
        {record["step"]: record["reward"] for record in steps}
    )
    assert history.config.trainer.steps == 3
    # The commands answer too, though the run's Redis is gone.
    for words in (["status", str(runs / "one"), "--report"], ["dead", "show", "--run", str(runs / "one")]):
        said = CliRunner().invoke(app, words)
        assert said.exit_code == 0, said.output
        assert "no dead letters" in said.output or "too short to tell" in said.output


async def test_an_error_of_a_callback_stops_the_run_and_reaches_the_caller(tmp_path: Path) -> None:
    config = simulated_config(tmp_path, trainer__steps=200)
    runs = tmp_path / "runs"

    def fail(record: dict[str, Any]) -> None:
        raise KeyError(record["step"])

    with pytest.raises(KeyError):
        await tidemill.run_async(config, run_id="one", runs_dir=runs, on_step=fail, quiet=True)
    # A loop runs here, as in a notebook.
    fields: dict[str, Any] = {"run_id": "one", "runs_dir": runs, "resume": True, "quiet": True}
    result = tidemill.run(config, {"trainer.steps": 201}, on_step=lambda step: step["step"] < 5, **fields)
    assert result.exit_code == 130 and "--run-id one --runs-dir" in result.why_not_finished
    assert 5 < len(await asyncio.to_thread(tidemill.History("one", runs).steps)) < 201


def test_a_mistake_is_raised_before_anything_starts(tmp_path: Path) -> None:
    config = simulated_config(tmp_path)
    findings = tidemill.check(config)
    assert findings.rows["train"] > 0 and len(findings.rewards) == 1
    with pytest.raises(tidemill.TidemillError, match=r"missing\.jsonl does not exist"):
        tidemill.run(config, {"data.train": "missing.jsonl"}, runs_dir=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
