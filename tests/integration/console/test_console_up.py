"""`tidemill` as a user meets it: whole runs with stand-ins for the services, mistakes, and its own start."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.checked_runs import write_run
from tests.support.preloaded import tidemill
from tests.support.waiting import has_ended, wait_until
from tidemill.common.command_line import command_line
from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError, TidemillError
from tidemill.common.history import History, StreamName
from tidemill.common.streams import Entry
from tidemill.common.wire.messages import Commit
from tidemill.services.console.commands import ArchiveOptions, UpOptions
from tidemill.services.console.look.archive import archive
from tidemill.services.console.run.end import LOST, read_end
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.up.specs import ServiceSpec
from tidemill.services.console.up.start import run_up

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("forked_checks")

TRAINER = """
import asyncio, sys
from tests.support.numbered import append_numbered
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import Commit
from tidemill.common.run.state import read_config, update_state

async def main(run_id, stop_after):
    broker, keys = await Broker.connect(), Keys(run_id)
    steps = (await read_config(broker, keys)).trainer.steps
    for step in range(min(steps, stop_after)):
        metrics = {"reward": step / 10, "staleness/max": 0.0, "completion_tokens": 8.0, "step_time_s": 0.5}
        commit = Commit(step=step, version=step + 1, mini_batches=((((step, 0), (step, 1)),),),
                        groups=(step,), metrics=metrics)
        await append_numbered(broker, keys.commits, [(step, commit)])
        await update_state(broker, keys, status="running", tickets_issued=step + 1,
                           trajectories_seen=2 * step + 2)
    if steps > stop_after:
        print("waiting", flush=True)
        await asyncio.sleep(600)
    evaluations = [{"version": 0, "set": "held", "score": 0.1},
                   {"version": steps, "set": "held", "score": 0.9}]
    await update_state(broker, keys, status="finished", evaluations=evaluations)
    await broker.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def specs_with(trainer: str = TRAINER, stop_after: int = 1000) -> Any:
    """Stand-ins in place of the services: a trainer that commits, and a worker that only waits."""

    def specs_of(config: RunConfig) -> Sequence[ServiceSpec]:
        env = {"PYTHONPATH": str(ROOT)}
        command = (sys.executable, "-c", trainer, config.run_id, str(stop_after))
        wait = (sys.executable, "-c", "import time; time.sleep(600)")
        return [
            ServiceSpec("trainer", "trainer", command, env, ends_run=True),
            ServiceSpec("rollout-0", "rollout", wait, env),
        ]

    return specs_of


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of three steps of one group of two; the folder of runs is the test's own."""
    monkeypatch.delenv("TIDEMILL_REDIS_URL", raising=False)
    monkeypatch.setenv("TIDEMILL_RUNS_DIR", str(tmp_path / "runs"))
    path = write_run(tmp_path / "my project")
    ours = "expect: {eval_gain: 0.5}\ntrainer: {steps: 3, groups_per_step: 1"
    path.write_text(path.read_text().replace("trainer: {steps: 5, groups_per_step: 4", ours))
    return path


def test_a_run_from_start_to_report(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_up(UpOptions(config=config, overrides=["reward.on_failure=0"]), specs_with()) == 0
    runs = config.parents[1] / "runs"
    (run,) = [path for path in runs.iterdir() if not path.is_symlink()]
    assert run.name.startswith("my-project-") and (runs / "latest").resolve() == run
    summary = json.loads((run / "summary.json").read_text())
    assert summary["ok"] and summary["steps"] == 3 and summary["lost"] == 0
    assert (summary["eval_before"], summary["eval_after"]) == (0.1, 0.9)
    assert summary["wall_s"] > 0
    output = capfd.readouterr().out
    assert output.count("warning: reward.on_failure is 0") == 1
    assert "step 3/3" in output and "everything that was expected of the run holds" in output
    assert not (run / "redis.url").exists(), "the run's Redis is gone, and so is its address"
    # The run's folder alone still has all of its streams.
    assert asyncio.run(_archived_steps(run)) == [0, 1, 2]
    assert archive(ArchiveOptions(run_id=run.name, check=True, as_json=True)) == 0
    (damaged,) = (run / "archive" / "commits").glob("*.parquet")
    damaged.write_bytes(b"?")
    assert archive(ArchiveOptions(run_id=run.name, check=True, as_json=True)) == 1
    assert str(damaged) in capfd.readouterr().out


async def _archived_steps(run: Path) -> list[int]:
    records = History(run.name, run, None).scan(StreamName.COMMITS)
    return [r.message.step async for r in records if isinstance(r, Entry) and isinstance(r.message, Commit)]


def test_a_mistake_found_by_a_service_exits_with_2(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = "raise SystemExit(print('the template is wrong') or 2)"
    assert run_up(UpOptions(config=config, run_id="wrong"), specs_with(trainer)) == 2
    error = capfd.readouterr().err
    assert "the template is wrong" in error
    assert f"tidemill up '{config}' --run-id wrong --resume" in error
    end = read_end(RunFolder(config.parents[1] / "runs", "wrong"))
    assert (end.status, end.error, end.exit_code) == ("failed", "the template is wrong", 2)
    answer = tidemill("status", "wrong", **os.environ).stdout
    assert "failed after 0 of 3 steps" in answer and "the template is wrong" in answer
    assert end.resume in answer and "TIDEMILL_REDIS_URL" not in answer


def test_a_run_that_ended_before_its_first_step_does_not_keep_its_id(config: Path, capfd) -> None:
    run = config.parents[1] / "runs" / "wrong"
    trainer = "raise SystemExit(print('the template is wrong') or 2)"
    assert run_up(UpOptions(config=config, run_id="wrong"), specs_with(trainer)) == 2
    (run / "metrics.jsonl").write_text("")
    assert run_up(UpOptions(config=config, run_id="wrong"), specs_with()) == 0
    assert "begins again" in capfd.readouterr().out
    assert "the template is wrong" in (run / "logs" / "trainer.log").read_text(), "its logs stay"
    assert json.loads((run / "summary.json").read_text())["steps"] == 3


def test_a_finished_run_is_not_started_again(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = config.parents[1] / "runs" / "done"
    assert run_up(UpOptions(config=config, run_id="done"), specs_with()) == 0
    answer = capfd.readouterr().out
    assert f"{command_line('export', 'done', '-o', 'trained')}  the trained model" in answer
    files = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    nothing = specs_with("raise SystemExit('started')")
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        # Nobody would serve there.
        again = UpOptions(config=config, run_id="done", resume=True, metrics_port=occupied.getsockname()[1])
        assert run_up(again, nothing) == 0
    answer = capfd.readouterr().out
    assert "finished: all 3 steps are done, and nothing was started" in answer
    assert files == {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    more = UpOptions(config=config, run_id="done", resume=True, overrides=["trainer.steps=4"])
    assert run_up(more, specs_with()) == 0
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    assert read_end(RunFolder(run.parent, "done")).steps == 4
    capfd.readouterr()
    assert run_up(more, nothing) == 0
    (line,) = (line for line in capfd.readouterr().out.splitlines() if "goes on from there" in line)
    assert "--set trainer.steps=8" in line and "trainer.steps=4" not in line, "each option stands once"


def test_a_worker_that_leaves_a_finished_run_is_not_started_again(config: Path, capfd) -> None:
    """As one does that sees the run's end before the console has stopped it."""
    leave = (
        "import asyncio, sys, time\n"
        "from tidemill.common.redis.broker import Broker\n"
        "from tidemill.common.run.state import read_state, update_state\n"
        "from tidemill.common.wire.keys import Keys\n"
        "async def main():\n"
        "    broker, keys = await Broker.connect(), Keys(sys.argv[1])\n"
        "    while (await read_state(broker, keys)).get('status') != 'finished':\n"
        "        await asyncio.sleep(0.05)\n"
        "    print('left', flush=True)\n"
        "    await broker.close()\n"
        "asyncio.run(main())\n"
    )
    trainer = TRAINER.replace('status="finished", ', 'status="finished", version=steps, ')
    trainer = trainer.replace(
        "    await broker.close()", "    await asyncio.sleep(3)\n    await broker.close()"
    )

    def specs_of(config: RunConfig) -> Sequence[ServiceSpec]:
        first, worker = specs_with(trainer)(config)
        return [first, replace(worker, command=(sys.executable, "-c", leave, config.run_id))]

    assert run_up(UpOptions(config=config, run_id="leaves"), specs_of) == 0
    run = config.parents[1] / "runs" / "leaves"
    assert "starting it again" not in capfd.readouterr().out
    assert (run / "logs" / "rollout-0.log").read_text() == "left\n"


def test_a_run_id_that_exists_must_be_resumed_by_name_and_a_run_that_disappoints_exits_with_1(config, capfd):
    options = UpOptions(config=config, run_id="twice")
    assert run_up(options, specs_with()) == 0
    with pytest.raises(ConfigError, match="exists already") as caught:
        run_up(options, specs_with())
    assert "--run-id twice --resume" in str(caught.value)
    with pytest.raises(ConfigError, match="exists already"):  # before anything that takes time is looked at
        run_up(UpOptions(config=config, run_id="twice", overrides=["reward.function=no.py:f"]), specs_with())
    with pytest.raises(ConfigError, match="the latest is twice"):
        run_up(UpOptions(config=config, resume=True), specs_with())
    with pytest.raises(ConfigError, match="there is no run other to resume"):
        run_up(UpOptions(config=config, run_id="other", resume=True), specs_with())
    capfd.readouterr()
    changes = ("trainer.steps=5", "expect.eval_gain=0.85")
    more = UpOptions(config=config, overrides=list(changes), run_id="twice", resume=True)
    assert run_up(more, specs_with()) == 1, "more was expected; the streams of before are still there"
    output = capfd.readouterr().out
    assert "expected a gain of 0.85" in output
    assert "step 5/5" in output and "step 3/5" not in output, "what was done before is not news"
    summary = json.loads((config.parents[1] / "runs" / "twice" / "summary.json").read_text())
    assert (summary["steps"], summary["duplicated_in_training"]) == (5, 0)


def test_a_port_in_use_is_found_before_anything_starts(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        with pytest.raises(TidemillError, match=f"cannot serve metrics on 127.0.0.1:{port}") as caught:
            run_up(UpOptions(config=config, run_id="busy", metrics_port=port))
    assert caught.value.exit_code == 2
    assert not (config.parents[1] / "runs").exists()


def test_where_there_is_no_run_none_is_named_to_resume(config: Path) -> None:
    with pytest.raises(ConfigError, match="--run-id") as caught:
        run_up(UpOptions(config=config, resume=True))
    assert "RUN_ID" not in str(caught.value) and command_line() not in str(caught.value)


async def test_a_run_that_did_not_finish_says_which_reward_failed_and_why(config: Path) -> None:
    """No worker is there that could say it: only the scores are."""
    waits = '        print("waiting", flush=True)\n        await asyncio.sleep(600)\n'
    fails = (
        "        score = Score(ticket=0, index=1, status='failed', latency_s=0.1,\n"
        "                      error='KeyError: 1 (my.py, line 4)')\n"
        "        await append(broker, keys.scores(), score)\n"
        "        sys.exit(2)\n"
    )
    assert waits in TRAINER
    trainer = TRAINER.replace(waits, fails).replace("import Commit\n", "import Commit, Score\n")
    trainer = f"from tidemill.common.streams import append\n{trainer}"
    options = UpOptions(config=config, run_id="fails")
    assert await asyncio.to_thread(run_up, options, specs_with(trainer, stop_after=2)) == 2
    (line,) = read_end(RunFolder(config.parents[1] / "runs", "fails")).failing
    assert line.endswith("failed once (error): KeyError: 1 (my.py, line 4)")
    assert f"failing: {line}" in tidemill("status", "fails", **os.environ).stdout


async def test_ctrl_c_stops_the_run_so_that_it_can_be_resumed(config: Path) -> None:
    script = config.parent / "console.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from tidemill.services.console.up.start import run_up\n"
        "from tidemill.services.console.commands import UpOptions\n"
        "from tests.integration.console.test_console_up import specs_with\n"
        "options = UpOptions(config=Path(sys.argv[1]), run_id='held', resume=len(sys.argv) > 3)\n"
        "sys.exit(run_up(options, specs_with(stop_after=1000 if options.resume else 2)))\n"
    )
    command = [sys.executable, str(script), str(config), str(ROOT)]
    process = subprocess.Popen(  # noqa: ASYNC220
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    run = config.parents[1] / "runs" / "held"
    log = run / "logs" / "trainer.log"
    await wait_until(lambda: log.exists() and "waiting" in log.read_text())
    children = psutil.Process(process.pid).children(recursive=True)
    with pytest.raises(ConfigError, match=f"is running since .*process {process.pid} on") as caught:
        await asyncio.to_thread(run_up, UpOptions(config=config, run_id="held"), specs_with())
    assert "status held --watch" in str(caught.value)
    status = tidemill("status", "held", "--json", **os.environ)
    assert json.loads(status.stdout)["version"] == 2, "any terminal of this machine can ask"
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"stopped after 2 of 3 steps" in error and b"--run-id held --resume" in error
    assert all(map(has_ended, children))
    stopped = tidemill("status", "held", **os.environ).stdout
    assert "stopped after 2 of 3 steps" in stopped and "--run-id held --resume" in stopped
    assert await asyncio.to_thread(subprocess.call, [*command, "resume"], timeout=120) == 0
    assert "everything that was expected" in tidemill("status", "held", **os.environ).stdout


async def test_a_run_whose_launcher_was_killed_says_when_it_was_last_seen(config: Path) -> None:
    script = config.parent / "console.py"
    script.write_text(
        "import sys\n"
        "from pathlib import Path\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from tidemill.services.console.up.start import run_up\n"
        "from tidemill.services.console.commands import UpOptions\n"
        "from tests.integration.console.test_console_up import specs_with\n"
        "options = UpOptions(config=Path(sys.argv[1]), run_id='killed')\n"
        "sys.exit(run_up(options, specs_with(stop_after=2)))\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, str(script), str(config), str(ROOT))
    run = config.parents[1] / "runs" / "killed"
    log = run / "logs" / "trainer.log"
    await wait_until(lambda: log.exists() and "waiting" in log.read_text())
    folder = RunFolder(run.parent, "killed")
    assert read_end(folder).status == "running"
    process.kill()
    await process.wait()
    lost = read_end(folder)
    assert lost.status == LOST and lost.at > 0
    answer = tidemill("status", "killed", **os.environ).stdout
    assert "ended without a word, last seen at" in answer and "--run-id killed --resume" in answer


MODELS = {"torch", "transformers", "vllm"}
IMPORTS = {
    "what gives a first score": (
        "import tidemill.services.reward.worker, tidemill.services.console.serve.server",
        MODELS | {"httpx", "jinja2", "rq"},
    ),
    "help": (
        "from tidemill.services.console.__main__ import app; "
        "[app(words, standalone_mode=False) for words in (['--help'], ['up', '--help'], ['check', '-h'])]",
        MODELS | {"numpy", "redis", "matplotlib", "structlog", "yaml"},
    ),
    "a check, which finds every mistake": (
        "from pathlib import Path; from tidemill.services.console.check.preflight import examine; "
        "examine(Path('CONFIG'))",
        MODELS | {"matplotlib"},
    ),
}


@pytest.mark.parametrize("command", IMPORTS)
def test_what_must_be_quick_imports_no_model_and_nothing_that_it_does_not_need(config, command):
    code, unwanted = IMPORTS[command]
    program = (
        "import sys, contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    {code.replace('CONFIG', str(config))}\n"
        "print(*sys.modules)"
    )
    words = [sys.executable, "-c", program]
    result = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
    modules = set(result.stdout.split())
    assert any(name.startswith("tidemill.services") for name in modules) and not unwanted & modules


def test_a_mistake_is_answered_in_plain_words_with_exit_code_2(config: Path) -> None:
    result = tidemill("check", str(config), "--set", "trainer.step=1", **os.environ)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert "trainer.step: no such field; did you mean 'steps'?" in result.stderr
