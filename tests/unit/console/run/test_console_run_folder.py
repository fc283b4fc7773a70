"""How runs are named, kept and found again, which processes they have; and the command line itself."""

import os
import stat
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from tests.support.trajectories import make_config
from tidemill import __main__ as entry
from tidemill.common.command_line import command_line
from tidemill.common.errors import ConfigError
from tidemill.services.console.__main__ import app, main
from tidemill.services.console.commands import UpOptions, runs_here
from tidemill.services.console.run.folder import RunFolder, find_run
from tidemill.services.console.up.specs import exporter_spec, service_specs
from tidemill.services.console.web.runs import Catalog


def test_latest_follows_the_newest_run_and_each_keeps_its_whole_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run id was given"):
        find_run(None, tmp_path)
    configs = [make_config(run_id=run_id, trainer={"steps": 7}) for run_id in ("one", "two")]
    for config in configs:
        RunFolder(tmp_path, config.run_id).create(config)
    assert find_run(None, tmp_path).config() == configs[1]
    assert (tmp_path / "latest" / "config.yaml").samefile(tmp_path / "two" / "config.yaml")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "two"]


def test_the_address_is_for_its_owner_only_and_comes_before_the_environments(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDEMILL_REDIS_URL", "redis://elsewhere")
    folder = RunFolder(tmp_path, "one")
    folder.create(make_config(run_id="one"))
    assert folder.address() == "redis://elsewhere"
    folder.write_address("unix:///tmp/own.sock")
    assert folder.address() == "unix:///tmp/own.sock"
    folder.write_address("")
    assert folder.address() == "redis://elsewhere"
    assert stat.S_IMODE(folder.address_file.stat().st_mode) == 0o600


async def test_a_run_whose_console_was_killed_is_not_listed_as_running(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "one")
    folder.create(make_config(run_id="one"))
    os.utime(folder.path / "config.yaml", (0, 0))
    for socket, status in ((tmp_path, "running"), (tmp_path / "removed.sock", "lost")):
        folder.write_address(f"unix://{socket}")
        assert [line.status for line in await Catalog(tmp_path).lines()] == [status]


def test_a_latest_that_is_not_a_link_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest" / "precious").mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot point"):
        RunFolder(tmp_path, "one").create(make_config(run_id="one"))
    assert (tmp_path / "latest" / "precious").is_dir()


def test_a_run_has_one_trainer_and_as_many_workers_as_configured() -> None:
    config = make_config(run_id="r", rollout={"workers": 2, "num_threads": 3}, reward={"workers": 1})
    specs = service_specs(config)
    assert [spec.name for spec in specs] == ["trainer", "rollout-0", "rollout-1", "reward-0"]
    assert [spec.ends_run for spec in specs] == [True, False, False, False]
    assert specs[1].env == {"OMP_NUM_THREADS": "3"} and specs[0].env == {}
    command = exporter_spec(config, 9109).command
    assert command[1:] == ("-m", "tidemill.services.console.exporter", "r", "--port", "9109")


def test_the_command_to_resume_can_be_copied() -> None:
    with_exporter = UpOptions(config=Path("c.yaml"), metrics_port=9109)
    program = command_line()
    assert with_exporter.command("r", resume=False) == f"{program} up c.yaml --run-id r --metrics-port 9109"
    options = UpOptions(config=Path("my runs/c.yaml"), overrides=["trainer.steps=3"], runs_dir=Path("out"))
    assert options.command("r-1", resume=True) == (
        f"{program} up 'my runs/c.yaml' --set trainer.steps=3 --run-id r-1 --runs-dir out --resume"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("step", "4"), "step 4 r-1"),
        (("streams", "show"), "streams show --run r-1"),
        (("dead", "show"), "dead show --run r-1"),
        (("up", "CONFIG", "--resume"), "up CONFIG --run-id r-1 --resume"),
        (("export", "-o", "trained"), "export r-1 -o trained"),
    ],
)
def test_a_hint_names_the_run_and_a_folder_of_runs_that_is_not_the_usual_one(
    tmp_path, monkeypatch, words, expected
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TIDEMILL_RUNS_DIR", raising=False)
    assert RunFolder(tmp_path / "runs", "r-1").command(*words) == f"{command_line()} {expected}"
    elsewhere = RunFolder(tmp_path / "big disk", "r-1").command(*words)
    assert elsewhere == f"{command_line()} {expected} --runs-dir 'big disk'"


def answer(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_the_version_is_said_and_shells_can_complete() -> None:
    said = answer("--version")
    assert said.exit_code == 0 and said.output.startswith("tidemill")
    assert "--install-completion" in answer("--help").output


@pytest.mark.parametrize("words", [(), ("up",), ("check",), ("streams",), ("streams", "tail")])
def test_flags_are_shown_as_they_are_typed(words: tuple[str, ...]) -> None:
    output = answer(*words, "--help")
    assert output.exit_code == 0 and "--help" in output.output and "bool" not in output.output


def test_a_path_that_cannot_be_used_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tidemill", "status", "one"])
    monkeypatch.setattr(
        "tidemill.services.console.look.dashboard.show_status", lambda options: tmp_path.read_bytes()
    )
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"{tmp_path}: Is a directory" in capsys.readouterr().err


def test_a_run_is_named_by_its_place_or_by_an_option_on_every_command(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "tidemill.services.console.look.dashboard.show_status", lambda options: print(options.run_id)
    )
    monkeypatch.setattr(
        "tidemill.services.console.look.export.list_versions", lambda options: print(options.run_id)
    )
    for command in (["status"], ["export"]):
        for words in (["one"], ["--run", "one"], ["one", "--run", "one"]):
            assert answer(*command, *words).output == "one\n"
        said = answer(*command, "one", "--run", "two")
        assert isinstance(said.exception, ConfigError) and "two runs are named" in str(said.exception)


def test_a_run_is_found_by_id_folder_and_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    (runs / "one").mkdir(parents=True)
    (runs / "latest").symlink_to("one")
    elsewhere = tmp_path / "elsewhere" / "two"
    elsewhere.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name in ("one", "runs/one", "runs/one/", str(runs / "one"), "latest", "runs/latest", None):
        assert find_run(name, runs) == RunFolder(runs, "one"), name
    assert find_run(str(elsewhere), runs) == RunFolder(elsewhere.parent, "two")
    assert find_run("gone/three", runs) == RunFolder(runs, "three")
    assert runs_here("o") == ["one"] and runs_here("x") == []
    os.chdir(elsewhere)
    assert runs_here("") == []


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_traceback(monkeypatch):
    class Importing(ModuleType):
        def __getattr__(self, name: str) -> NoReturn:
            raise KeyboardInterrupt

    name = "tidemill.services.console.__main__"
    monkeypatch.setitem(sys.modules, name, Importing(name))
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 130
