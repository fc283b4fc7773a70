"""Sessions with a real OpenEnv server, which runs in a virtual environment of its own: its package cannot be
installed beside vLLM."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection, serve

from tests.support.models import run_config
from tests.support.scripted_model import CHAT, ScriptedModel, call_line, make_ticket
from tests.support.servers import free_port, listening
from tests.support.venvs import python_with
from tests.support.waiting import wait_until
from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.config.run import RunConfig
from tidemill.common.errors import ConfigError, EnvironmentFaultError
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.environments import openenv
from tidemill.services.rollout.environments.openenv import OpenEnvStage
from tidemill.services.rollout.environments.player import EnvironmentPlayer, build_stage
from tidemill.services.rollout.sessions.parts import Part, Recording

ROOT = Path(__file__).parents[3]
PROMPT_IDS = np.asarray(CHAT.render([{"role": "user", "content": "Guess."}]), np.int32)
TICKET = make_ticket("Guess.", ground_truth="7", prompt_ids=PROMPT_IDS)
SCHEMA = {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}

VERSION = "0.10.0"
PACKAGES = (
    f"openenv=={VERSION}",
    "fastapi==0.165.0",
    "fastmcp==3.4.11",
    "pydantic==2.14.4",
    "uvicorn==0.54.0",
)
"""The server's packages that decide what it sends."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def interpreter() -> Path:
    return python_with(f"openenv-{VERSION}", "openenv.core", PACKAGES)


Serve = Callable[..., "contextlib.AbstractContextManager[str]"]


@pytest.fixture
def serve_game(interpreter: Path, tmp_path: Path) -> Serve:
    """Serve games of a kind, until the end of the block; its value is what `use` says."""

    @contextlib.contextmanager
    def serving(kind: str = "game", places: int = 2, port: int = 0) -> Iterator[str]:
        port = port or free_port()
        program = ROOT / "tests" / "support" / "openenv_server.py"
        command = [interpreter, program, str(port), str(places), kind]
        with (
            (tmp_path / "log").open("ab") as output,
            listening(command, port, stdout=output, stderr=output, cwd=tmp_path),
        ):
            yield f"openenv:http://127.0.0.1:{port}"

    return serving


@pytest.fixture
def use(serve_game: Serve) -> Iterator[str]:
    with serve_game() as address:
        yield address


def calls_of_games(folder: Path) -> list[list[tuple[str, Any]]]:
    """Name and value of each call of each game, in the order in which the server made the games."""
    games: dict[int, list[tuple[str, Any]]] = {}
    for line in (folder / "calls").read_text().splitlines():
        number, name, value = json.loads(line)
        games.setdefault(number, []).append((name, value))
    return [games[number] for number in sorted(games)]


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
    for trajectory in played:
        assert trajectory.session.reward == 1.0 and trajectory.session.end == "done"
        assert [message["content"] for message in trajectory.session.messages] == ["3", "1: no", "7", "2: no"]
        assert CHAT.decode(trajectory.first.prompt_ids.tolist()).startswith("user\nGuess. Begin.")
        assert [turn.reward for turn in trajectory.first.turns] == [0.0, 1.0]


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
        ("sleep 30", {}, "longer than 2 s"),
        ("die", {}, "step failed"),
        ("x", {"action_field": "guess"}, "message: Field required"),
        ("x", {"observation_field": "board"}, "not 'board'"),
        ("swear", {}, "PydanticCustomError"),
    ],
)
async def test_what_goes_wrong_on_the_server_is_a_fault(use, line, options, words):
    with pytest.raises(EnvironmentFaultError, match=words):
        await play(use, line, options=options, call_timeout_s=2.0)


async def test_every_game_is_reset_with_its_row_and_closed_once(serve_game: Serve, tmp_path: Path) -> None:
    with serve_game(places=3) as use:
        playing = player(use)
        await playing.start()
        models = [ScriptedModel("3", "7") for _ in range(7)]
        await asyncio.gather(*(playing.play(TICKET, f"s{i}", m.ask) for i, m in enumerate(models)))
        await playing.close()
        # The server says that it is full before it makes a game: as many games as sessions.
        await wait_until(lambda: [game[-1][0] for game in calls_of_games(tmp_path)] == ["close"] * 7)
    for reset, *steps, close in calls_of_games(tmp_path):
        assert reset == ("reset", {"ground_truth": "7", "data_source": TICKET.data_source})
        assert steps == [("step", "3"), ("step", "7")]
        assert close == ("close", 2)


async def test_a_server_of_one_session_plays_one_after_the_other(serve_game: Serve, tmp_path: Path) -> None:
    with serve_game("lone") as use:
        playing = player(use)
        await playing.start()
        models = [ScriptedModel("3", "7") for _ in range(4)]
        played = await asyncio.gather(*(playing.play(TICKET, f"s{i}", m.ask) for i, m in enumerate(models)))
        await playing.close()
        await wait_until(lambda: (tmp_path / "calls").read_text().count("close") == 4)
    assert [trajectory.session.reward for trajectory in played] == [1.0] * 4
    names = [json.loads(line)[1] for line in (tmp_path / "calls").read_text().splitlines()]
    assert names == ["reset", "step", "step", "close"] * 4


async def test_text_that_the_action_refuses_is_answered_to_the_model(use: str) -> None:
    played = await play(use, "x" * 21, "7")
    roles = [message["role"] for message in played.session.messages]
    assert roles == ["assistant", "user", "assistant", "user"] and played.session.reward == 1.0
    assert "message: String should have at most 20 characters" in played.session.messages[1]["content"]
    assert [turn.num_wrong_calls for turn in played.first.turns] == [0, 0]


async def test_a_field_that_no_text_fits_is_a_fault(serve_game: Serve) -> None:
    with serve_game("numbers") as use, pytest.raises(EnvironmentFaultError, match=r"numbers: .* valid list"):
        await play(use, "7", options={"action_field": "numbers"})


async def test_a_step_that_raised_is_played_again_in_another_game(use: str, tmp_path: Path) -> None:
    played = await play(use, "3", "break", "7", attempts=2)
    assert played.session.num_faults == 1 and played.session.reward == 1.0
    assert [message["content"] for message in played.session.messages] == ["7", "1: no"]
    first, second = calls_of_games(tmp_path)
    assert [name for name, _ in first[:3]] == ["reset", "step", "step"]
    assert second[0][0] == "reset" and second[1] == ("step", "7")


async def test_a_late_step_is_left_alone_and_its_place_is_waited_for(serve_game: Serve) -> None:
    with serve_game("lone") as use:
        played = await play(use, "sleep 4", "7", attempts=2, call_timeout_s=1.0)
    assert played.session.num_faults == 1 and played.session.reward == 1.0
    # The late step's answer is read by nobody.
    assert [message["content"] for message in played.session.messages] == ["7", "1: no"]


async def test_a_late_step_truncates_its_session_where_the_run_says_so(use: str) -> None:
    played = await play(use, "3", "sleep 30", call_timeout_s=1.0, late="truncate")
    assert played.session.end == "timeout" and played.session.late == "call"
    assert [turn.reward for turn in played.first.turns] == [0.0, None]


async def test_a_step_that_blocks_its_server_has_the_time_of_a_call(serve_game, monkeypatch) -> None:
    """The server answers no ping meanwhile: websockets' own limit, 20 s, is not to end the session."""
    monkeypatch.setattr(openenv, "PING_S", 0.1)
    with serve_game("blocking") as use:
        played = await play(use, "sleep 3", "7", call_timeout_s=30.0)
    assert played.session.num_faults == 0 and played.session.reward == 1.0


@pytest.mark.parametrize("is_repeatable", [False, True])
async def test_a_server_that_dies_is_never_followed_by_a_game_that_was_not_reset(
    serve_game: Serve, tmp_path: Path, is_repeatable: bool
) -> None:
    """Another server is at its address before the next step, as after a restart of its container."""
    lines = ["3", "4", "7"] if is_repeatable else ["3", "4", "3", "7"]
    model = ScriptedModel(*lines)
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        use = first.enter_context(serve_game())

        async def ask(ids: Sequence[int], sampling: SamplingParams, _: object = None) -> Generation:
            if len(model.seen) == 1:
                first.close()
                second.enter_context(serve_game(port=int(use.rpartition(":")[2])))
            return await model.ask(ids, sampling)

        async def keep(play: bytes, number: int, piece: Part) -> bool:
            return True

        playing = player(use, attempts=2, options={"repeatable": is_repeatable})
        await playing.start()
        played = await playing.play(TICKET, "s", Recording(ask, keep=keep))
        await playing.close()
    contents = [message["content"] for message in played.session.messages]
    assert played.session.num_faults == 1 and played.session.reward == 1.0
    if is_repeatable:
        assert contents == ["3", "1: no", "4", "2: no", "7", "3: no"]
    else:
        assert contents == ["3", "1: no", "7", "2: no"]
    assert model.lines == []


async def test_tools_of_an_mcp_environment_are_called_by_their_action(serve_game: Serve) -> None:
    properties = {"tool_name": {"type": "string"}, "arguments": {"type": "object"}}
    schema = {"type": "object", "properties": properties, "required": ["tool_name"]}
    lines = [call_line("act", tool_name="add", arguments={"a": 2, "b": 5}), call_line("act"), "That is all."]
    with serve_game("tools") as use:
        played = await play(use, *lines, options={"action_schema": schema})
    answers = [message["content"] for message in played.session.messages if message["role"] == "tool"]
    added, refused = answers
    assert json.loads(added)["result"]["data"] == 7
    assert "tool_name: Field required" in refused


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
