"""Public agents and frameworks at a session's limit, and where their worker hands over: each ends soon, and
its own reward is kept.

They are installed into folders below build/. Where they cannot be, the tests are skipped.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.frameworks import NPM, VENVS, command_of, line_of
from tests.support.numbered import append_numbered
from tests.support.runs import ServiceRun, simulated_config
from tests.support.scripted_model import ScriptedModel, agent_player, make_ticket
from tests.support.scripted_worker import ASKED, GO, NAMES
from tests.support.training import messages
from tests.support.waiting import wait_until
from tidemill.common.run.state import RUNS_DIR_VARIABLE
from tidemill.common.wire.messages import DeadLetter, Lane, SamplingParams, Trajectory

ENDS_S = 15.0
MAX_TURNS = 2
MANY_TURNS = 50
MAX_TOKENS = 500
FRAMEWORKS = [*VENVS, *NPM]
NUM_TOGETHER = 2
TOGETHER = [FRAMEWORKS[first : first + NUM_TOGETHER] for first in range(0, len(FRAMEWORKS), NUM_TOGETHER)]
"""Frameworks whose sessions run at once in one worker; with more they would wait for each other's cores."""
START = """
import json, os
row = json.loads(os.environ["TIDEMILL_ROW"])
os.execvp("sh", ["sh", "-c", COMMANDS[row["prompt"]]])
"""
"""Runs the program that a row names."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


async def play(name: str, folder: Path, **limits: int) -> tuple[Any, float]:
    """The session, and how long its program went on after the model's last turn."""
    # No two alike: crewai and openhands end by themselves where a call comes again and again.
    model = ScriptedModel(*(line_of(name, f"7{number}") for number in range(MANY_TURNS)))
    answered_at = 0.0

    async def ask(ids: Sequence[int], sampling: SamplingParams) -> Any:
        nonlocal answered_at
        answered_at = time.monotonic()
        return await model.ask(ids, sampling)

    ticket = make_ticket(max_tokens=MAX_TOKENS)
    command = f"$ {command_of(name, folder)}"
    async with agent_player(command, max_model_len=1 << 18, **limits) as player:
        played = await player.play(ticket, "s", ask)
    return played.session, time.monotonic() - answered_at


@pytest.mark.parametrize("name", FRAMEWORKS)
async def test_a_framework_that_meets_the_last_turn_ends_soon_with_its_reward(name, tmp_path):
    session, ending_s = await play(name, tmp_path, max_turns=MAX_TURNS)
    turns = sum(len(segment.turns) for segment in (session, *session.forks))
    assert (session.end, session.reward, turns, session.unread) == ("max_turns", 0.5, MAX_TURNS, ())
    results = [message["content"] for message in session.messages if message["role"] == "tool"]
    assert name not in NPM or any("7" in result for result in results)
    assert ending_s < ENDS_S


@pytest.mark.parametrize("name", FRAMEWORKS)
async def test_a_framework_that_has_used_the_tokens_of_its_session_ends_soon_with_its_reward(name, tmp_path):
    session, ending_s = await play(name, tmp_path, max_turns=MANY_TURNS, max_tokens=MAX_TOKENS)
    segments = (session, *session.forks)
    num_tokens = sum(turn.num_tokens for segment in segments for turn in segment.turns)
    assert (session.end, session.reward, session.unread) == ("max_tokens", 0.5, ())
    assert 0 < num_tokens <= MAX_TOKENS
    assert ending_s < ENDS_S


@pytest.mark.parametrize("names", TOGETHER, ids=" ".join)
@pytest.mark.parametrize("drain_s", [60.0, 0.0])
async def test_frameworks_whose_worker_is_asked_to_stop_end_soon_and_their_rewards_are_kept(
    names, drain_s, tmp_path
):
    """SIGTERM in the middle of a session: it ends there, or is handed to another worker, which plays it."""
    commands = {name: command_of(name, tmp_path / name) for name in names}
    for name in names:
        (tmp_path / name).mkdir()
    start = tmp_path / "start.py"
    start.write_text(START.replace("COMMANDS", repr(commands)))
    config = simulated_config(
        tmp_path,
        rollout__environment={
            "use": "agent",
            "agent": f"$ {sys.executable} {start}",
            "max_turns": MAX_TURNS,
        },
        rollout__sampling={"max_tokens": MAX_TOKENS},
        model__max_model_len=1 << 18,
        streams__drain_s=drain_s,
    )
    tickets = []
    for number, name in enumerate(names):
        tickets.append((number, make_ticket(name, max_tokens=MAX_TOKENS, ticket=number)))

    def has_all_asked(worker: str) -> bool:
        asked = (tmp_path / ASKED).read_text().splitlines() if (tmp_path / ASKED).exists() else []
        return all(f"{worker} {number} {MAX_TURNS}" in asked for number, _ in tickets)

    async with ServiceRun(tmp_path, config) as run:
        run.variables["tests.support.scripted_worker"] = {NAMES: json.dumps(names)}
        await append_numbered(run.broker, run.keys.prompts(Lane.TRAIN), tickets)
        worker = run.start("tests.support.scripted_worker", "first")
        await wait_until(lambda: has_all_asked("first"), 180.0)
        asked_at = time.monotonic()
        worker.send_signal(signal.SIGTERM)
        if drain_s:
            (tmp_path / GO).touch()
        assert await run.wait("first") == 0, run.log_of("first")
        assert time.monotonic() - asked_at < ENDS_S
        assert not processes_of(tmp_path)
        if not drain_s:
            assert not await messages(run.broker, run.keys.trajectories(), Trajectory)
            (tmp_path / GO).touch()
            run.start("tests.support.scripted_worker", "second")

        async def are_there() -> bool:
            return len(await messages(run.broker, run.keys.trajectories(), Trajectory)) == len(names)

        await wait_until(are_there, 180.0)
        samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
        assert not await messages(run.broker, run.keys.dead, DeadLetter)
    by_name = {names[sample.ticket]: sample for sample in samples}
    assert sorted(by_name) == sorted(names)
    for name, sample in by_name.items():
        assert sample.session is not None
        turns = sum(len(segment.turns) for segment in (sample.session, *sample.session.forks))
        said = (name, sample.worker, sample.session.end, sample.session.reward, turns, sample.session.unread)
        assert said == (name, "first" if drain_s else "second", "max_turns", 0.5, MAX_TURNS, ())


def processes_of(folder: Path) -> list[str]:
    """Processes that a worker of this folder's run has started, or it."""
    names = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUNS_DIR_VARIABLE) == str(folder) and process.pid != os.getpid():
                names.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return [name for name in names if "redis" not in name]
