"""The supervisor with processes that behave badly on purpose."""

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.waiting import has_ended, wait_until
from tidemill.services.console.run.folder import RunFolder
from tidemill.services.console.run.guard import Guard
from tidemill.services.console.run.local_redis import open_redis
from tidemill.services.console.up.forks import ForkServer
from tidemill.services.console.up.specs import ServiceSpec
from tidemill.services.console.up.supervisor import (
    MAX_EARLY_DEATHS,
    MAX_SAME_DEATHS,
    Ending,
    RunOutcome,
    SameCauses,
    ServiceProcess,
    Supervisor,
    says_error,
)

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
POLITE = "import time; print('up'); time.sleep(600)"


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard() as guard:
        yield guard


class Stage:
    """A supervisor over small Python programs, and what it said."""

    def __init__(self, folder: Path, guard: Guard, programs: dict[str, str], grace_s: float = 20.0) -> None:
        self.folder = folder
        self.events = list[str]()
        self.is_finished = True
        specs = [
            ServiceSpec(name, name, (sys.executable, "-u", "-c", program), ends_run=name == "trainer")
            for name, program in programs.items()
        ]
        self.supervisor = Supervisor(specs, folder, grace_s, self.events.append, first_pause_s=0.001)
        self.guard = guard

    async def run(self) -> RunOutcome:
        return await self.supervisor.run(dict(os.environ), self.guard, self._finished)

    async def _finished(self) -> bool:
        return self.is_finished

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    async def is_up(self, name: str, starts: int = 1) -> None:
        await wait_until(lambda: self.log(name).count("up") >= starts, awaited=f"{name} up {starts} times")


async def test_the_run_is_over_when_the_trainer_says_so(tmp_path: Path, guard: Guard) -> None:
    stage = Stage(tmp_path, guard, {"trainer": "print('done')", "rollout": POLITE})
    outcome = await stage.run()
    assert outcome.ending is Ending.FINISHED
    assert all(status.pid == 0 for status in stage.supervisor.statuses.values())


async def test_a_service_is_forked_until_the_fork_server_ends(tmp_path: Path, guard: Guard) -> None:
    server = ForkServer()
    log = tmp_path / "rollout.log"
    command = (sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1")
    spec = ServiceSpec("rollout", "rollout", command, {"PYTHONUNBUFFERED": "1"}, loads_torch=True)
    supervisor = Supervisor([spec], tmp_path, 20.0, lambda _: None, first_pause_s=0.001)
    running = asyncio.create_task(supervisor.run(dict(os.environ), guard, server=server))

    async def started(number: int) -> psutil.Process:
        status = supervisor.statuses["rollout"]
        await wait_until(lambda: log.exists() and log.read_text().count("Serving HTTP") == number)
        # The service may write its line before the supervisor has the answer of the fork server.
        await wait_until(lambda: status.pid)
        process = psutil.Process(status.pid)
        assert os.getsid(process.pid) == process.pid, "its group can be killed as a whole"
        return process

    first = await started(1)
    first.kill()
    second = await started(2)
    assert first.pid != second.pid
    assert second.ppid() == server.process.pid
    server.process.kill()
    third = await started(3)
    # Nobody would see its end, so it was killed. The kernel takes a moment to free its memory.
    await wait_until(lambda: has_ended(second))
    assert third.ppid() == os.getpid()
    supervisor.stop()
    assert (await running).ending is Ending.STOPPED
    server.close()


DOOMED = """
import asyncio, os, sys
from pathlib import Path
from tidemill.services.console.up.forks import ForkServer
from tidemill.services.console.run.guard import Guard
from tidemill.services.console.up.specs import ServiceSpec

async def main():
    command = (sys.executable, "-m", "http.server", "0", "--bind", "127.0.0.1")
    spec = ServiceSpec("rollout", "rollout", command, loads_torch=True)
    server = ForkServer()
    with Guard() as guard, server.watched(guard):
        starting = asyncio.create_task(server.start(spec, dict(os.environ), Path(sys.argv[1])))
        await asyncio.sleep(0)  # it has asked
        print(server.process.pid, flush=True)
        await starting

asyncio.run(main())
"""


def test_nothing_is_forked_any_more_where_the_console_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "rollout.log"
    with subprocess.Popen(
        [sys.executable, "-c", DOOMED, str(log)], stdout=subprocess.PIPE, text=True
    ) as console:
        assert console.stdout is not None
        server = psutil.Process(int(console.stdout.readline()))
        console.kill()  # while the server still imports
    server.wait(60)
    assert not log.exists()


async def test_a_trainer_that_ends_too_early_is_started_again(tmp_path: Path, guard: Guard) -> None:
    stage = Stage(tmp_path, guard, {"trainer": "print('up')"})
    stage.is_finished = False
    running = asyncio.create_task(stage.run())
    await stage.is_up("trainer", starts=3)
    stage.is_finished = True
    assert (await running).ending is Ending.FINISHED


async def test_a_process_that_dies_is_started_again_into_the_same_log(tmp_path: Path, guard: Guard) -> None:
    stage = Stage(tmp_path, guard, {"trainer": POLITE, "rollout": POLITE})
    running = asyncio.create_task(stage.run())
    await stage.is_up("rollout")
    os.kill(stage.supervisor.statuses["rollout"].pid, signal.SIGKILL)
    await stage.is_up("rollout", starts=2)
    assert stage.supervisor.statuses["rollout"].restarts == 1
    assert any("rollout ended by SIGKILL" in event for event in stage.events)
    stage.supervisor.stop()
    assert (await running).ending is Ending.STOPPED


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import sys; print('model.path is wrong', file=sys.stderr); sys.exit(2)", "model.path is wrong"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL, an illegal instruction"),
    ],
)
async def test_a_mistake_of_the_user_or_a_cpu_that_lacks_an_instruction_ends_the_run(
    tmp_path, guard, program, said
):
    stage = Stage(tmp_path, guard, {"trainer": POLITE, "rollout": program})
    outcome = await stage.run()
    assert outcome.ending is Ending.FAILED and outcome.exit_code in (2, -signal.SIGILL)
    assert said in outcome.reason and "rollout" in outcome.reason
    assert stage.supervisor.statuses["rollout"].restarts == 0


async def test_the_error_of_a_service_is_the_reason_and_not_the_lines_of_its_log_before_it(tmp_path, guard):
    program = (
        "import sys; print('joined the run'); print('Loading weights: 100%')\n"
        "print('tidemill rollout: two problems\\n\\nmodel.path is wrong', file=sys.stderr); sys.exit(2)"
    )
    stage = Stage(tmp_path, guard, {"trainer": POLITE, "rollout": program})
    outcome = await stage.run()
    assert outcome.reason.splitlines() == [
        "rollout cannot do this run (with exit code 2):",
        "  two problems",
        "  model.path is wrong",
        f"  Its log: {outcome.log}",
    ]


async def test_a_process_that_keeps_dying_is_given_up(tmp_path, guard, monkeypatch):
    monkeypatch.setattr("tidemill.services.console.up.supervisor.LONGEST_PAUSE_S", 0.001)
    # Another cause each time: letters, for numbers do not count.
    program = "import os; raise SystemExit('no such judge: ' + 'a' * (os.getpid() % 200))"
    stage = Stage(tmp_path, guard, {"trainer": POLITE, "reward": program})
    outcome = await stage.run()
    assert (outcome.ending, outcome.exit_code) == (Ending.FAILED, 1)
    assert "no such judge" in outcome.reason
    assert len(stage.events) == MAX_EARLY_DEATHS
    assert stage.log("reward").count("no such judge") == MAX_EARLY_DEATHS + 1


async def test_the_last_line_of_a_process_that_is_killed_again_and_again_is_no_error(
    tmp_path, guard, monkeypatch
):
    monkeypatch.setattr("tidemill.services.console.up.supervisor.LONGEST_PAUSE_S", 0.001)
    program = "import os; print('a print of the reward'); os.kill(os.getpid(), 9)"
    stage = Stage(tmp_path, guard, {"trainer": POLITE, "reward": program})
    outcome = await stage.run()
    assert (outcome.ending, outcome.error) == (Ending.FAILED, "")
    assert "a print of the reward" in outcome.reason, "the end of its log"


async def test_a_process_that_dies_of_the_same_cause_at_each_start_ends_the_run(tmp_path, guard):
    """The model that the engine cannot sample from: each start took the same way. Numbers may differ."""
    program = "import os; raise SystemExit(f'the model failed: AttributeError, process {os.getpid()}')"
    stage = Stage(tmp_path, guard, {"trainer": POLITE, "rollout": program})
    outcome = await stage.run()
    assert (outcome.ending, outcome.exit_code) == (Ending.FAILED, 1)
    assert f"rollout died {MAX_SAME_DEATHS} times in a row of the same cause" in outcome.reason
    assert "the model failed: AttributeError" in outcome.reason
    assert stage.log("rollout").count("the model failed") == MAX_SAME_DEATHS


def test_causes_are_compared_from_death_to_death():
    causes = SameCauses()
    assert [causes.count("no GPU 1", 1, 5.0), causes.count("no GPU 22", 1, 500.0)] == [1, 2]
    assert causes.count("another cause", 1, 5.0) == 1
    assert causes.count("another cause", -9, 5.0) == 0, "a signal names none"
    assert causes.count("another cause", 1, 5.0) == 1, "and not in a row"
    assert causes.count("another cause", 1, 900.0) == 0, "it worked for a while"
    assert causes.count("", 1, 5.0) == 0


async def test_a_command_that_does_not_exist_fails_the_run(tmp_path: Path, guard: Guard) -> None:
    stage = Stage(tmp_path, guard, {"trainer": POLITE})
    stage.supervisor.specs = [ServiceSpec("trainer", "trainer", ("/no/such/python",))]
    assert "cannot start trainer" in (await stage.run()).reason


@pytest.mark.parametrize("is_killed", [False, True], ids=["time is up", "the second Ctrl-C"])
async def test_a_process_that_does_not_stop_is_killed(tmp_path: Path, guard: Guard, is_killed: bool) -> None:
    stage = Stage(tmp_path, guard, {"trainer": STUBBORN}, grace_s=600.0 if is_killed else 0.05)
    running = asyncio.create_task(stage.run())
    await stage.is_up("trainer")
    pid = stage.supervisor.statuses["trainer"].pid
    stage.supervisor.stop()
    if is_killed:
        stage.supervisor.kill()
    assert (await running).ending is Ending.STOPPED
    assert not psutil.pid_exists(pid)
    assert is_killed or any("killed: trainer" in event for event in stage.events)


async def test_children_of_a_dead_process_do_not_outlive_it(tmp_path: Path, guard: Guard) -> None:
    program = (
        "import subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(child.pid); time.sleep(600)"
    )
    spec = ServiceSpec("reward", "reward", (sys.executable, "-u", "-c", program))
    log = tmp_path / "reward.log"
    process = await ServiceProcess.start(spec, dict(os.environ), log, guard)
    child = int(await wait_until(lambda: log.read_text().strip()))
    os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() == -signal.SIGKILL
    await wait_until(lambda: has_ended(child))


async def test_a_redis_that_dies_comes_back_with_its_data_at_the_same_address(tmp_path, guard):
    events: list[str] = []
    folder = RunFolder(tmp_path, "run")
    folder.path.mkdir()
    async with open_redis("", folder, guard, events.append, events.append) as (url, broker):
        assert folder.address() == url
        await broker.execute("SET", "here", "still")
        os.kill(int((await broker.info("server"))["process_id"]), signal.SIGKILL)
        assert await broker.execute("GET", "here") == b"still", "the broker waits until it is back"
        await wait_until(lambda: events == ["Redis died; starting it again", "Redis is back"])
        pid = int((await broker.info("server"))["process_id"])
    assert not folder.address_file.exists() and not psutil.pid_exists(pid)


async def test_nothing_outlives_a_console_that_is_killed(tmp_path: Path) -> None:
    console = tmp_path / "console.py"
    console.write_text(
        "import subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from tidemill.services.console.run.guard import Guard\n"
        "with Guard() as guard:\n"
        "    for kind in ('service', 'redis'):\n"
        "        child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "        guard.watch(child.pid, kind)\n"
        "        print(child.pid, flush=True)\n"
        "    guard.remove_at_end(Path(sys.argv[1]))\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
    )
    socket_folder = tmp_path / "socket"
    socket_folder.mkdir()
    process = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, str(console), str(socket_folder)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    assert process.stdout.readline() == "ready\n"
    assert not any(map(has_ended, pids))
    process.kill()
    process.wait()
    await wait_until(lambda: all(map(has_ended, pids)), awaited="both children to be ended")
    await wait_until(lambda: not socket_folder.exists())


async def test_a_start_that_the_machine_refuses_is_tried_again_and_ends_no_run(
    tmp_path: Path, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of processes that root does not meet: the call that starts a process fails in its place."""
    stage = Stage(tmp_path, guard, {"trainer": POLITE})
    start = asyncio.create_subprocess_exec
    num_starts = 0

    async def refuse(*command: Any, **options: Any) -> Any:
        nonlocal num_starts
        num_starts += 1
        if num_starts <= 4:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    running = asyncio.create_task(stage.run())
    await stage.is_up("trainer")
    assert num_starts == 5
    said = [event for event in stage.events if "ulimit -u" in event]
    assert len(said) == 3, "at the 1st, the 2nd and the 4th"
    stage.supervisor.stop()
    assert (await running).ending is Ending.STOPPED


@pytest.mark.parametrize(("line", "code", "may_say_why"), [
    ("ValueError: no such shape", 1, True),
    ("tidemill reward: cannot open x", 2, True),
    ("17:54:08 [info     ] joined the run                      run=ops", -signal.SIGKILL, False),
    ("17:54:08 [warning  ] no reward for a trajectory          index=1", 1, False),
    ("17:54:08 [error    ] no memory left", -signal.SIGKILL, True),
    ('{"run": "ops", "event": "joined the run", "level": "info"}', -signal.SIGTERM, False),
    ('{"event": "no memory left", "level": "error"}', 1, True),
    ("Fatal Python error: Segmentation fault", -signal.SIGSEGV, True),
    ("a print of the reward", -signal.SIGKILL, False),
    ("", 1, False),
])  # fmt: skip
def test_only_a_line_that_may_say_why_is_quoted(line: str, code: int, may_say_why: bool) -> None:
    assert says_error(line, code) is may_say_why


async def test_a_killed_worker_is_said_with_its_leases_and_without_a_line_that_is_not_about_it(
    tmp_path, guard
):
    program = "import time; print('17:54:08 [info     ] joined the run up'); time.sleep(600)"
    stage = Stage(tmp_path, guard, {"reward": program})
    stage.supervisor.lease_s = 15.0
    running = asyncio.create_task(stage.run())
    await stage.is_up("reward")
    os.kill(stage.supervisor.statuses["reward"].pid, signal.SIGKILL)
    await stage.is_up("reward", starts=2)
    (event,) = stage.events
    assert event.startswith("reward ended by SIGKILL; starting it again in")
    assert event.endswith("What it held is taken up once its leases end (streams.lease_s: 15)")
    stage.supervisor.stop()
    await running
