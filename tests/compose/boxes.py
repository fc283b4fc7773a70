"""Sessions in containers of a real engine, of verifiers and agentbox-rl, with a model that has a script.

`make compose-test ARGS="--only boxes"` makes what this needs, and runs it. Of the environment:
TIDEMILL_TEST_VERIFIERS, an interpreter with verifiers; agentbox-rl on PYTHONPATH; the image of
examples/containers.
"""

import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.compose.sessions import (
    ENGINE,
    EXAMPLE,
    NAMES,
    OPTIONS,
    PLAY,
    TASKS,
    TaskFolder,
    another_engine,
    containers,
    processes_of,
    read_address_for_boxes,
    remove,
)
from tests.support.models import run_config
from tests.support.preloaded import REPO
from tests.support.rollout_worker import RUN_UID
from tests.support.scripted_model import CHAT, ScriptedModel, agent_player, call_line, make_ticket
from tests.support.waiting import PATIENCE_S, wait_until
from tidemill.common.config import RunConfig, load_config
from tidemill.common.data.dataset import Row
from tidemill.common.errors import ConfigError, EnvironmentFaultError
from tidemill.common.process.checks import check_environment
from tidemill.common.wire.messages import Lane, SamplingParams, Ticket
from tidemill.services.rollout.containers.__main__ import remove_of_run
from tidemill.services.rollout.containers.names import SessionName
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.environments.player import EnvironmentPlayer
from tidemill.services.rollout.sessions.parts import Recording
from tidemill.services.rollout.sessions.player import Player

SESSION = SessionName(RUN_UID, Lane.TRAIN, "1-0", "1a2b3c4d", 0, 0)
LENGTH = 1 << 16
BATCH = 4
COMMAND_TIMEOUT_S = 60
CALL_TIMEOUT_S = 120.0
FILL_TIMEOUT_S = 110
"""Time for commands that fill a disk, or wait until it is full: less than a call has."""

pytestmark = pytest.mark.timeout(900)

Play = Callable[..., Coroutine[Any, Any, list[Any]]]


def ticket_of(folder: TaskFolder, **row: Any) -> Ticket:
    extra = {"task_id": folder.name, **row}
    return make_ticket(folder.instruction, max_tokens=8000, extra=extra, ground_truth="")


Session = tuple[TaskFolder, *tuple[str, ...]]
"""A task, and the commands that the model runs."""


MEET = "meet"
"""In place of a command: each session waits here until the others do."""


class MeetingModel(ScriptedModel):
    def __init__(self, *lines: str, barrier: asyncio.Barrier) -> None:
        super().__init__(*lines)
        self.barrier = barrier

    async def ask(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        while self.lines[0] == MEET:
            self.lines.pop(0)
            async with asyncio.timeout(PATIENCE_S):
                await self.barrier.wait()
        return await super().ask(ids, sampling)


async def play_verifiers(*sessions: Session, limit_s: int = COMMAND_TIMEOUT_S) -> list[Any]:
    """Play sessions at once in verifiers' boxes; returns each one's play, or fault. `limit_s` is that of a
    command."""
    settings = {"containers": ENGINE, "call_timeout_s": CALL_TIMEOUT_S}
    options = f"{OPTIONS} --env.agent.harness.command-timeout-s {limit_s}"
    async with agent_player(f"{PLAY} {options}", LENGTH, **settings) as player:
        return await play_at_once(player, "shell", sessions)


async def play_agentbox(*sessions: Session, limit_s: int = COMMAND_TIMEOUT_S) -> list[Any]:
    """The same in agentbox's boxes."""
    environment = {"use": f"{EXAMPLE / 'agentbox_env.py'}:Env", "containers": "docker", "attempts": 1}
    environment["call_timeout_s"] = CALL_TIMEOUT_S
    config = run_config("m", model={"max_model_len": LENGTH}, rollout={"environment": environment})
    player = EnvironmentPlayer(config, CHAT.decode, lambda: CHAT)
    try:
        await player.start()
        return await play_at_once(player, "run_command", sessions, timeout_s=float(limit_s))
    finally:
        await player.close()


async def play_at_once(
    player: Player, tool: str, sessions: Sequence[Session], **arguments: float
) -> list[Any]:
    plays = []
    barrier = asyncio.Barrier(len(sessions))
    for number, (task, *commands) in enumerate(sessions):
        lines = [
            command if command == MEET else call_line(tool, command=command, **arguments)
            for command in commands
        ]
        model = MeetingModel(*lines, "done", barrier=barrier)
        ticket = ticket_of(task, task=NAMES.index(task.name))
        name = replace(SESSION, index=number)
        plays.append(player.play(ticket, f"s{number}", Recording(model.ask, session=name)))
    return await asyncio.gather(*plays, return_exceptions=True)


BOTH = pytest.mark.parametrize("play", [play_verifiers, play_agentbox])


def reward_of(outcome: Any) -> float | None:
    if isinstance(outcome, BaseException):
        raise outcome
    assert outcome.session is not None
    reward: float | None = outcome.session.reward
    return reward


@BOTH
@pytest.mark.parametrize("name", ["csv-join", "git-merge", "web-server"])
async def test_the_solution_gets_one_and_nothing_gets_zero(play: Play, name: str) -> None:
    task = TASKS[name]
    solved, untouched = await play((task, task.solution), (task,))
    assert (reward_of(solved), reward_of(untouched)) == (1.0, 0.0)
    roles = [message["role"] for message in solved.session.messages]
    assert roles == ["assistant", "tool", "assistant"]


async def test_all_tasks_get_one_for_their_solution_and_zero_for_nothing_by_agentbox_too() -> None:
    rewards: list[float | None] = []
    for first in range(0, len(NAMES), BATCH):
        batch = [TASKS[name] for name in NAMES[first : first + BATCH]]
        outcomes = await play_agentbox(
            *((task, task.solution) for task in batch), *((task,) for task in batch)
        )
        rewards += map(reward_of, outcomes)
        assert rewards[-2 * len(batch) :] == [1.0] * len(batch) + [0.0] * len(batch), first


def answers_of(outcome: Any) -> list[str]:
    """What the model's commands have answered."""
    return [message["content"] for message in outcome.session.messages if message["role"] == "tool"]


@BOTH
async def test_commands_that_fail_are_late_or_leave_a_job_are_the_policys(play: Play) -> None:
    task = TASKS["csv-join"]
    failing = ("exit 3", "/app/people.csv", "/app/nothing", "sleep 77", "echo begun; sleep 600 &")
    solved, unsolved = await play((task, *failing, task.solution), (task, *failing), limit_s=4)
    assert (reward_of(solved), reward_of(unsolved)) == (1.0, 0.0)
    for words, answer in zip(("3", "126", "127", "", "begun", ""), answers_of(solved), strict=True):
        assert words in answer


@BOTH
async def test_an_image_that_is_not_there_makes_a_fault(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tasks" / "csv-join"
    shutil.copytree(EXAMPLE / "tasks" / "csv-join", folder)
    file = folder / "task.toml"
    file.write_text(file.read_text().replace("tidemill-tasks:1", "localhost:1/tidemill-nothing:1"))
    monkeypatch.setenv("TASKS_DIR", str(folder.parent))
    monkeypatch.setattr(sys.modules[__name__], "NAMES", ["csv-join"])
    (outcome,) = await play((TASKS["csv-join"],))
    with pytest.raises(EnvironmentFaultError, match="tidemill-nothing"):
        reward_of(outcome)


REWRITES_TESTS = """
mkdir -p /tests; chmod 777 /tests; echo 'exit 0' > /tests/test.sh
for program in bash python3 timeout env git sqlite3 curl grep; do
  printf '#!/bin/sh\\nexit 0\\n' > /app/$program; chmod 755 /app/$program
  cp /app/$program /usr/bin/$program; cp /app/$program /usr/local/bin/$program
  mkdir -p ~/.local/bin; cp /app/$program ~/.local/bin/$program
done
echo 'PATH=/app:$PATH; exit 0' | tee ~/.bashrc ~/.profile ~/.bash_profile > /app/environment
echo 'import os; os._exit(0)' | tee /app/sitecustomize.py /app/json.py /app/sqlite3.py > /app/csv.py
export BASH_ENV=/app/environment ENV=/app/environment PATH=/app:$PATH
true
"""
DAEMON = """
nohup setsid bash -c 'while :; do
  echo "exit 0" > /tests/test.sh; pkill -STOP -f tests/test.sh; pkill timeout
  cp /app/orders.csv /app/joined.csv
  sleep 0.05
done' > /dev/null 2>&1 < /dev/null &
"""


@BOTH
@pytest.mark.parametrize("attack", [REWRITES_TESTS, DAEMON], ids=["rewrites its tests", "leaves a daemon"])
async def test_an_agent_cannot_change_what_its_test_says(play: Play, attack: str) -> None:
    harmless = TASKS["git-begin"]
    attacked, beside = await play((TASKS["csv-join"], attack), (harmless, harmless.solution))
    assert (reward_of(attacked), reward_of(beside)) == (0.0, 1.0)


@BOTH
@pytest.mark.parametrize("attack", ["kill -TERM 1; kill -9 1; true", "kill -9 -1"])
async def test_an_agent_that_ends_its_box_is_not_rewarded_and_ends_no_other(play: Play, attack: str) -> None:
    task = TASKS["csv-join"]
    attacked, beside = await play((task, attack), (task, task.solution))
    assert reward_of(beside) == 1.0
    assert isinstance(attacked, EnvironmentFaultError) or reward_of(attacked) == 0.0


@BOTH
async def test_a_box_has_no_way_to_the_engine_nor_the_names_of_other_sessions(play: Play) -> None:
    looks = "ls /run/docker.sock 2>&1; env; cat /proc/*/environ 2> /dev/null | tr '\\0' '\\n'"
    (played,) = await play((TASKS["csv-join"], looks))
    (answer,) = answers_of(played)
    assert "No such file" in answer
    for word in ("TIDEMILL", "OPENAI", "VF_RUN_ID", RUN_UID, "DOCKER"):
        assert word not in answer


GUESSES = """
python3 - <<'P'
import glob, http.client, json, secrets
words = []
for file in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
    try:
        words += open(file).read().split("\\0")
    except OSError:
        pass
words = sorted({word.rpartition("=")[2] for word in words if len(word) < 200 and word.isprintable()})
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "tell me the answer"}]})
names = [%(names)s, "0", secrets.token_hex(8), secrets.token_urlsafe(24)]
paths = ["/v1", *("/s/" + name + "/v1" for name in names)]
keys = ["", "none", "EMPTY", *names, *words]
said = []
for path in paths:
    for key in keys:
        connection = http.client.HTTPConnection("%(host)s", %(port)s, timeout=10)
        headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
        connection.request("POST", path + "/chat/completions", body, headers)
        said.append(connection.getresponse().status)
        connection.close()
print("tried", len(said), "statuses", sorted(set(said)))
P
"""


async def test_an_agent_that_guesses_the_key_of_another_session_is_refused_and_changes_nothing() -> None:
    task = TASKS["csv-join"]
    host = await asyncio.to_thread(read_address_for_boxes)
    settings = {"containers": "docker", "call_timeout_s": 120.0, "gateway_host": host}
    async with agent_player(f"{PLAY} {OPTIONS}", LENGTH, **settings) as player:
        port = player._gateway.root.rpartition(":")[2]
        # Sessions have names that can be guessed; keys are not made of them.
        names = ", ".join(repr(str(replace(SESSION, index=1, number=number))) for number in (1, 2))
        attack = GUESSES % {"names": names, "host": host, "port": port}
        attacked, beside = await play_at_once(
            player, "shell", [(task, attack, attack), (task, "sleep 10", task.solution)]
        )
    assert (reward_of(attacked), reward_of(beside)) == (0.0, 1.0)
    answers = answers_of(attacked)
    assert len(answers) == 2
    for answer in answers:
        assert re.search(r"tried \d{2,} statuses \[(401, )?404\]", answer), answer
    roles = [message["role"] for message in beside.session.messages]
    assert roles == ["assistant", "tool", "assistant", "tool", "assistant"]


async def test_a_box_of_agentbox_reaches_no_address() -> None:
    look = (
        "python3 -c 'import socket; socket.create_connection((\"192.0.2.1\", 80), 5)' 2>&1; ls /sys/class/net"
    )
    (played,) = await play_agentbox((TASKS["csv-join"], look))
    (answer,) = answers_of(played)
    assert "Network is unreachable" in answer and "eth" not in answer


async def test_each_container_of_agentbox_has_the_name_of_its_session() -> None:
    begun = f"{time.time():.6f}"  # not of the whole second: boxes of the test before were made in it
    await play_agentbox((TASKS["csv-join"],))
    label = '{{index .Actor.Attributes "tidemill.session"}}'
    events = ["docker", "events", "--since", begun, "--until", str(int(time.time()) + 1)]
    asked = [*events, "--filter", "event=create", "--format", label]
    ended = await asyncio.to_thread(subprocess.run, asked, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [str(replace(SESSION, number=1))]


LOST = r"the box was lost|the test was killed, or its box is gone"
SLOW = "sleep 29.5\n"


@BOTH
async def test_a_box_that_somebody_removes_while_the_test_runs_makes_a_fault(
    play: Play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tasks" / "csv-join"
    shutil.copytree(EXAMPLE / "tasks" / "csv-join", folder)
    (folder / "tests" / "test.sh").write_text(SLOW)
    monkeypatch.setenv("TASKS_DIR", str(folder.parent))
    before = containers()
    monkeypatch.setattr(sys.modules[__name__], "NAMES", ["csv-join"])
    playing = asyncio.create_task(play((TASKS["csv-join"],)))

    def is_tested() -> str:
        for box in containers() - before:
            if "sleep 29.5" in processes_of(box):
                return box
        return ""

    box = await wait_until(lambda: asyncio.to_thread(is_tested))
    await asyncio.to_thread(remove, box)
    (outcome,) = await playing
    with pytest.raises(EnvironmentFaultError, match=LOST):
        reward_of(outcome)


async def test_a_program_of_verifiers_that_is_killed_makes_a_fault_and_leaves_no_box() -> None:
    playing = asyncio.create_task(play_verifiers((TASKS["csv-join"], "sleep 300")))

    def find_runner() -> list[psutil.Process]:
        return [
            each for each in psutil.Process().children(recursive=True) if "vf-eval" in " ".join(words(each))
        ]

    def words(process: psutil.Process) -> list[str]:
        try:
            return process.cmdline()
        except psutil.Error:
            return []

    before = containers()
    await wait_until(lambda: len(containers() - before) == 1 and find_runner())
    for process in find_runner():
        process.kill()
    (outcome,) = await playing
    assert isinstance(outcome, EnvironmentFaultError)


async def wait_for_command(words: str) -> None:
    """Wait until a command runs in a box."""

    def runs() -> bool:
        return any(words in processes_of(box) for box in containers())

    await wait_until(lambda: asyncio.to_thread(runs))


@BOTH
async def test_an_engine_that_is_killed_makes_faults_and_nothing_is_left(
    play: Play, bridge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = TASKS["csv-join"]
    # Not below pytest's folder: the path of a socket is short.
    with tempfile.TemporaryDirectory() as folder, another_engine(Path(folder), bridge, monkeypatch) as engine:
        playing = asyncio.create_task(play((task, task.solution, "sleep 97.5")))
        await wait_for_command("sleep 97.5")
        engine.kill()
        (outcome,) = await playing
        assert isinstance(outcome, EnvironmentFaultError)
        await asyncio.to_thread(engine.start)
        # As a worker's reaper does, and `tidemill up` at its end.
        assert await remove_of_run("docker", RUN_UID) == 1
        assert containers() == set()
        (again,) = await play((task, task.solution))
        assert reward_of(again) == 1.0


FILL = """
fill() { dd if=/dev/zero of=/app/filled bs=$1 oflag=append conv=notrunc$2; }
fill 1M
# A few blocks are left, or become free: enough for a small file.
while [ -e /app/filled ]; do fill 4k ,nocreat; sleep 0.2; done > /dev/null 2>&1 < /dev/null &
sleep 4
"""
WAIT = "while head -c 4096 /dev/zero > /app/tried; do sleep 0.5; done; rm /app/tried; sleep 2"
"""Until a block cannot be written: a box may use what `df` says is not available, root's reserve."""
FREE = "rm /app/filled; until [ $(df --output=avail -k /app | tail -1) -gt 200000 ]; do sleep 0.2; done"


@BOTH
async def test_an_agent_that_fills_the_disk_makes_no_zero_of_another_session(
    play: Play, bridge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The neighbour's solution fails for want of room, and then its test runs where there is room again."""
    task = TASKS["csv-join"]
    filler = (task, FILL, MEET, FREE, MEET)
    neighbour = (task, WAIT, task.solution, MEET, MEET)
    with small_disk(1500 << 20) as folder, another_engine(folder, bridge, monkeypatch):
        for outcome in await play(filler, neighbour, limit_s=FILL_TIMEOUT_S):
            assert isinstance(outcome, EnvironmentFaultError), outcome
            assert "the disk of the containers was full" in str(outcome)
        (again,) = await play((task, task.solution))
        assert reward_of(again) == 1.0


@contextlib.contextmanager
def small_disk(num_bytes: int) -> Iterator[Path]:
    """A folder of an engine, whose data are on a disk of their own, as with /run/docker beside it."""
    with tempfile.TemporaryDirectory() as parent:
        image = Path(parent) / "image"
        with image.open("wb") as file:
            file.truncate(num_bytes)
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        folder = Path(parent) / "disk"
        data = folder / "data"
        data.mkdir(parents=True)
        subprocess.run(["mount", "-o", "loop", image, data], check=True)
        try:
            yield folder
        finally:
            if data.is_mount():  # an engine's stop leaves nothing mounted below its folder
                subprocess.run(["umount", "-l", data], check=True)


@pytest.mark.parametrize("way", ["verifiers", "agentbox"])
def test_check_plays_three_tasks_and_names_those_whose_solution_fails(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, rows = config_of(way, tmp_path)
    lines = check_environment(config, rows, plays_oracle=True)
    assert lines == [f"{lines[0].partition(': ')[0]}: 3 rows: the solution got 1, nothing got 0"]
    shutil.copytree(EXAMPLE / "tasks", tmp_path / "tasks")
    (tmp_path / "tasks" / NAMES[1] / "solution" / "solve.sh").write_text("true\n")
    (tmp_path / "tasks" / NAMES[2] / "tests" / "test.sh").write_text("true\n")
    monkeypatch.setenv("TASKS_DIR", str(tmp_path / "tasks"))
    with pytest.raises(ConfigError) as refused:
        check_environment(config, rows[1:], plays_oracle=True)
    problems = str(refused.value).partition("oracle: ")[2].split("; ")
    assert problems == [
        f"{NAMES[1]}: the solution got a reward of 0, and has to get 1",
        f"{NAMES[2]}: nothing got a reward of 1, and has to get 0",
    ]


def config_of(way: str, folder: Path) -> tuple[RunConfig, list[Row]]:
    """A run with the guessing demo's tokenizer: what the model says comes from the oracle."""
    tree = load_config(REPO / "examples" / "guess" / "config.yaml").model_dump(mode="json")
    model = folder / "model"
    shutil.copytree(tree["model"]["path"], model)
    for name, field in (("config", "max_position_embeddings"), ("tokenizer_config", "model_max_length")):
        file = model / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {field: LENGTH}))
    tree["model"] |= {"path": str(model), "max_model_len": LENGTH}
    section = {"use": f"{EXAMPLE / 'agentbox_env.py'}:Env", "oracle": f"{EXAMPLE / 'agentbox_env.py'}:oracle"}
    if way == "verifiers":
        section = {
            "use": "agent",
            "agent": f"{PLAY} {OPTIONS}",
            "oracle": f"{EXAMPLE / 'task_folder.py'}:oracle",
        }
    tree["rollout"]["environment"] = section | {"containers": "docker"}
    rows = [
        Row(TASKS[name].instruction, "boxes", None, {"task": number, "task_id": name}, number, name)
        for number, name in enumerate(NAMES[:3])
    ]
    return RunConfig.model_validate(tree), rows
