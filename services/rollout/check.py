"""`python -m tidemill.services.rollout.check REQUEST`: can this environment be loaded, and played with?

The request has a run's `config`, and `rows` of its dataset, or none. With a row, one session is played in
which no engine takes part: the model is a script that calls each tool once with made-up arguments, or says
"ok" a few times. With an `oracle_uid`, each row is played as `rollout.environment.oracle` says, and the
names of containers have that uid in place of a run's. It runs in a process of its own
(`common/process/checks.py`), for it imports users' modules.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.config.environment import AGENT, NO_CONTAINERS
from tidemill.common.errors import ConfigError, EnvironmentFaultError
from tidemill.common.process.checks import Answer, answer_check
from tidemill.common.process.programs import run_main
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.containers.command import ContainerCommand, EngineAwayError
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.environments import build_player
from tidemill.services.rollout.environments.player import build_stage
from tidemill.services.rollout.oracle import apart, make_ticket, play_oracle, stand_ins
from tidemill.services.rollout.sessions.chat import Call, ChatFormat, Parsed, Tools, call_of
from tidemill.services.rollout.sessions.picture_parts import pictures_in
from tidemill.services.rollout.sessions.player import Played
from tidemill.services.rollout.sessions.template_chat import content_text, open_chat

SAYS = "ok"
TURNS = 3
EXAMPLES = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}, "null": None}
SHOWN = 200


def check(request: Any) -> Answer:
    config = RunConfig.model_validate(request["config"])
    return {"played": run_main(_check(config, request["rows"], request["oracle_uid"]))}


async def _check(config: RunConfig, rows: Sequence[Mapping[str, Any]], oracle_uid: str) -> list[str]:
    """Load the environment and, with a row, play one session; with an `oracle_uid`, those of the oracle.
    Returns lines that describe it.

    Raises:
        ConfigError: the environment cannot be loaded or fails, or the chat template refuses its messages.
    """
    section = config.rollout.environment
    if section.is_single_turn:
        return []
    if section.containers != NO_CONTAINERS:
        await check_engine(section.containers)
    if oracle_uid:
        return await play_oracle(config, rows, open_chat(config), oracle_uid)
    if section.use == AGENT:  # loaded only: with a script in place of the model, many programs would fail
        from tidemill.services.rollout.environments.agent import AgentProgram

        program = AgentProgram(section.agent)
        await program.start()
        await program.close()
        return []
    if not rows:
        await build_stage(section).close()
        return []
    changed = section.model_copy(update={"attempts": 1, "max_turns": min(TURNS, section.max_turns)})
    rollout = config.rollout.model_copy(update={"environment": changed})
    chat = ScriptedChat(open_chat(config))
    folder = TemporaryDirectory()
    changed_config = apart(config.model_copy(update={"rollout": rollout}))
    player = build_player(changed_config, lambda ids: "", open_chat=lambda: chat, run_dir=Path(folder.name))
    try:
        await player.start()
        images = await stand_ins(player.pictures, rows[0])
        ticket = make_ticket(config, rows[0], chat, images=images)
        end = chat.render([{"role": "user", "content": SAYS}])[-1:]

        async def ask(
            ids: Sequence[int], sampling: SamplingParams, images: Sequence[Image] = ()
        ) -> Generation:
            return Generation(end, [0.0], ((0, 0),), "stop")

        return _lines(await player.play(ticket, "check", ask))
    except (EnvironmentFaultError, ValueError) as error:
        raise ConfigError(
            f"rollout.environment.use {section.use}: played with the first training row and a script in "
            f"place of the model: {error}"
        ) from None
    finally:
        await player.close()
        folder.cleanup()


async def check_engine(command: str) -> None:
    """Check that the engine of containers answers, before anything is started.

    Raises:
        ConfigError: it does not.
    """
    try:
        await ContainerCommand(command).list_containers()
    except EngineAwayError as error:
        raise ConfigError(
            f"rollout.environment.containers {command}: no engine of containers answers on this machine: "
            f"{error}. Start it, or check and run where it is"
        ) from None


def _lines(played: Played) -> list[str]:
    session = played.session
    assert session is not None
    reward = "no reward" if session.reward is None else f"a reward of {session.reward:g}"
    lines = [f"{session.environment}: {len(session.turns)} turns of a script, ended {session.end}, {reward}"]
    for message in session.messages:
        functions = (call["function"] for call in message.get("tool_calls", ()))
        lines += [f"called {function['name']}({function['arguments']})" for function in functions]
    answers = [described(message) for message in session.messages if message["role"] != "assistant"]
    return lines + [f"answered {' '.join(answer.split())[:SHOWN]}" for answer in answers]


def described(message: Mapping[str, Any]) -> str:
    """What an environment's message says and shows."""
    num_pictures = len(pictures_in(message))
    count = f" [pictures: {num_pictures}]" if num_pictures else ""
    return f"{content_text(message['content'])}{count}"


class ScriptedChat:
    """The model's chat format, with a script for what the model says: each tool once, then "ok"."""

    def __init__(self, inner: ChatFormat) -> None:
        self._num_said = 0
        self.has_template = inner.has_template
        self.render = inner.render
        self.extend = inner.extend
        self.shorten = inner.shorten
        self.encode = inner.encode

    def parse(self, turn_ids: Sequence[int], tools: Tools = (), is_cut: bool = False) -> Parsed:
        """The next line of the script."""
        message: dict[str, Any] = {"role": "assistant", "content": SAYS}
        index = self._num_said
        self._num_said += 1
        if index >= len(tools):
            return Parsed(message)
        function = tools[index]["function"]
        schema = function.get("parameters") or {}
        properties = schema.get("properties") or {}
        arguments = {name: _example(properties.get(name) or {}) for name in schema.get("required") or ()}
        message["tool_calls"] = [call_of("call_0", function["name"], json.dumps(arguments))]
        return Parsed(message, (Call(function["name"], arguments),))


def _example(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    return EXAMPLES.get(kind[0] if isinstance(kind, list) else kind, "1")


if __name__ == "__main__":
    sys.exit(answer_check(check))
