"""Hints name the run that was asked about, and say how a command takes it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.histories import write_small_run
from tidemill.services.console.__main__ import app
from tidemill.services.console.run.folder import RunFolder, nearest


@pytest.fixture
def of_run(act, keys, tmp_path: Path) -> str:
    """The small run, which another one than the latest is."""
    act(lambda broker: write_small_run(broker, keys))
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "config.yaml").write_text("{}")
    return f"{keys.run_id} --runs-dir {nearest(tmp_path)}"


@pytest.mark.parametrize(("words", "hint"), [
    (("trace", "1"), "tidemill step 0 {run}"),
    (("trace", "1.0"), "tidemill step 0 {run}"),
    (("step", "0"), "tidemill streams show commits 0 --run {run}"),
    (("streams", "show", "scores"), "tidemill streams tail scores --run {run}"),
    (("streams", "show", "scores", "77.0"), "tidemill streams show --run {run}"),
    (("dead", "show", "9-9"), "tidemill dead show --run {run}"),
    (("dead", "requeue"), "tidemill dead show --run {run}"),
])  # fmt: skip
def test_a_command_to_be_copied_is_about_the_same_run(tidemill, of_run, words, hint) -> None:
    done = tidemill(*words, catch_exceptions=True)
    said = " ".join(f"{done.output} {done.exception or ''}".split())
    assert hint.format(run=of_run).partition("tidemill ")[2] in said


@pytest.mark.parametrize("words", [
    ("dead", "show", "ops"), ("streams", "tail", "scores", "ops"), ("streams", "grep", "a", "ops"),
    ("streams", "show", "ops"), ("streams", "tail", "ops"),
])  # fmt: skip
def test_a_run_in_the_place_of_another_argument_is_sent_to_its_option(tidemill, of_run, words) -> None:
    done = tidemill(*words, catch_exceptions=True)
    said = " ".join(f"{done.output} {done.exception or ''}".replace("│", " ").split())
    assert "ops is a run: give it as --run ops" in said


def test_the_folder_of_runs_may_be_given_behind_an_equals_sign(of_run, tmp_path) -> None:
    done = CliRunner().invoke(app, ["streams", "tail", "scores", "ops", f"--runs-dir={tmp_path}"])
    said = " ".join(done.output.replace("│", " ").split())
    assert "ops is a run: give it as --run ops" in said


def test_the_usual_folder_of_runs_is_not_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("TIDEMILL_RUNS_DIR", str(tmp_path))
    assert RunFolder(tmp_path, "a").command("step", "3").endswith(" step 3 a")
