"""Sessions with a real OpenEnv server, which runs in a virtual environment of its own: its package cannot be
installed beside vLLM."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection, serve

from tests.support.models import run_config
from tests.support.scripted_model import CHAT, ScriptedModel, call_line, make_ticket
from tests.support.servers import free_port, listening
from tests.support.venvs import python_with
from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.config.run import RunConfig
from tidemill.common.errors import ConfigError, EnvironmentFaultError
from tidemill.services.rollout.environments.openenv import OpenEnvStage
from tidemill.services.rollout.environments.player import EnvironmentPlayer, build_stage

ROOT = Path(__file__).parents[3]
PROMPT_IDS = np.asarray(CHAT.render([{"role": "user", "content": "Guess."}]), np.int32)
TICKET = make_ticket("Guess.", ground_truth="7", prompt_ids=PROMPT_IDS)
SCHEMA = {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def interpreter() -> Path:
    return python_with("openenv", "openenv.core", ["openenv"])


@pytest.fixture
def use(interpreter: Path, tmp_path: Path) -> Iterator[str]:
    port, log = free_port(), tmp_path / "log"
    command = [interpreter, ROOT / "tests" / "support" / "openenv_server.py", str(port)]
    with log.open("wb") as output, listening(command, port, stdout=output, stderr=output, cwd=tmp_path):
        yield f"openenv:http://127.0.0.1:{port}"


def player(use: str, **more: Any) -> EnvironmentPlayer:
    environment = {"use": use, "attempts": 1} | more
    config: RunConfig = run_config("m", model={"max_model_len": 2048}, rollout={"environment": environment})
    return EnvironmentPlayer(config, CHAT.decode, lambda: CHAT)


async def play(use: str, *lines: str, **more: Any) -> Any:
    playing = player(use, **more)
    await playing.start()
    try:
        return await playing.play(TICKET, "s", ScriptedModel(*lines).ask)
    finally:
        await playing.close()


async def test_a_session_ends_where_the_server_says_done_and_more_than_it_holds_wait_their_turn(use):
    playing = player(use)
    await playing.start()
    models = [ScriptedModel("3", "7") for _ in range(5)]
    played = await asyncio.gather(*(playing.play(TICKET, f"s{i}", m.ask) for i, m in enumerate(models)))
    await playing.close()
    for one in played:
        assert one.session.reward == 1.0 and one.session.end == "done"
        assert [message["content"] for message in one.session.messages] == ["3", "1: no", "7", "2: no"]
        assert CHAT.decode(one.first.prompt_ids.tolist()).startswith("user\nGuess. Begin.")
        assert [turn.reward for turn in one.first.turns] == [0.0, 1.0]


async def test_the_model_acts_by_a_tool_and_hears_what_is_wrong_with_its_arguments(use: str) -> None:
    lines = [call_line("act", guess=7), call_line("act", message="7")]
    played = await play(use, *lines, options={"action_schema": SCHEMA})
    roles = [message["role"] for message in played.session.messages]
    assert roles == ["assistant", "tool", "assistant", "tool"] and played.session.reward == 1.0
    assert "message: Field required" in played.session.messages[1]["content"]
    assert [turn.num_wrong_calls for turn in played.first.turns] == [1, 0]


@pytest.mark.parametrize(
    ("line", "options", "words"),
    [
        ("break", {}, "the board fell over"),
        ("sleep", {}, "longer than 2 s"),
        ("die", {}, "step failed"),
        ("x", {"action_field": "guess"}, "message: Field required"),
        ("x", {"observation_field": "board"}, "not 'board'"),
    ],
)
async def test_what_goes_wrong_on_the_server_is_a_fault(use, line, options, words):
    with pytest.raises(EnvironmentFaultError, match=words):
        await play(use, line, options=options, call_timeout_s=2.0)


async def test_a_server_that_stays_full_is_a_fault_in_words(use: str) -> None:
    section = EnvironmentConfig(use=use, call_timeout_s=9.0, session_timeout_s=0.3)
    others = [await OpenEnvStage(section).open({}) for _ in range(2)]
    with pytest.raises(EnvironmentFaultError, match=r"was full for 0\.3 s"):
        await OpenEnvStage(section).open({})
    for environment in others:
        await environment.close()


@pytest.mark.parametrize("said", ["[]", '"down"', '{"type": "observation", "data": [1]}', "[" * 100_000])
async def test_a_server_that_says_no_frame_is_a_fault(said: str) -> None:
    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        await connection.send(said)

    async with serve(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EnvironmentFaultError, match="reset"):
            await play(f"openenv:http://127.0.0.1:{port}", "x")


async def test_a_second_answer_to_one_step_is_a_fault_and_not_the_answer_to_the_next() -> None:
    async def answer(connection: ServerConnection) -> None:
        for number in range(4):
            frame = await connection.recv()
            observation = {"observation": {"text": f"{number}"}, "reward": 0.0, "done": number == 3}
            said = json.dumps({"type": "observation", "data": observation})
            for _ in range(2 if json.loads(frame)["type"] == "step" else 1):
                await connection.send(said)

    async with serve(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EnvironmentFaultError, match="second answer"):
            await play(f"openenv:http://127.0.0.1:{port}", "x", "y", "z")


async def test_a_server_that_is_not_there_is_a_fault() -> None:
    with pytest.raises(EnvironmentFaultError, match="cannot be reached"):
        await play("openenv:http://127.0.0.1:9", "x")


def test_options_that_there_are_not_and_addresses_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="action_feld"):
        build_stage(EnvironmentConfig(use="openenv:http://host:1", options={"action_feld": "x"}))
    with pytest.raises(ValueError, match="openenv:http://host:port"):
        EnvironmentConfig(use="openenv:host:8000")
