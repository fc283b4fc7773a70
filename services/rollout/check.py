"""`python -m tidemill.services.rollout.check CONFIG [ROW]`: can this environment be loaded, and played with?

CONFIG is a run's config as JSON, ROW a row of its dataset. With a row, one session is played in which no
engine takes part: the model is a script that calls each tool once with made-up arguments, or says "ok" a few
times.

Exits with 0, or with 2 and the reason on stderr. A process of its own, because importing a user's module
runs whatever stands in it.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tidemill.common.config import RunConfig
from tidemill.common.config.environment import AGENT
from tidemill.common.errors import ConfigError, EnvironmentFaultError
from tidemill.common.process.checks import PLAYED
from tidemill.common.process.programs import run_main
from tidemill.common.run.dataset import PROMPT
from tidemill.common.wire.messages import SamplingParams, Ticket
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.environments.agent_programs import AgentProgram, program_of
from tidemill.services.rollout.environments.player import EnvironmentPlayer, build_stage
from tidemill.services.rollout.sessions.chat import Call, ChatFormat, Parsed, Tools
from tidemill.services.rollout.sessions.player import Played
from tidemill.services.rollout.sessions.template_chat import open_chat

SAYS, TURNS = "ok", 3
EXAMPLES = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}, "null": None}
SHOWN = 200


def main(argument: str, row: str = "") -> int:
    """Check the environment of a config given as JSON; returns the exit code."""
    try:
        config = RunConfig.model_validate(json.loads(argument))
        if config.rollout.environment.is_single_turn:
            return 0
        if config.rollout.environment.use == AGENT:
            run_main(_start(program_of(config.rollout.environment.agent)))
            return 0
        for line in run_main(_play(config, json.loads(row) if row else None)):
            print(f"{PLAYED}{line}")
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


async def _start(program: AgentProgram) -> None:
    """An agent's program is loaded and no more: with a script for a model, many have reason to fail."""
    await program.start()
    await program.close()


async def _play(config: RunConfig, row: Mapping[str, Any] | None) -> list[str]:
    """Load the environment and, with a row, play one session; returns what came of it, in lines.

    Raises:
        ConfigError: the environment cannot be loaded, fails, or says what the chat template refuses.
    """
    section = config.rollout.environment
    if row is None:
        await build_stage(section).close()
        return []
    changed = section.model_copy(update={"attempts": 1, "max_turns": min(TURNS, section.max_turns)})
    rollout = config.rollout.model_copy(update={"environment": changed})
    chat = ScriptedChat(open_chat(config))
    player = EnvironmentPlayer(config.model_copy(update={"rollout": rollout}), _nothing, lambda: chat)
    try:
        await player.start()
        ticket = _ticket(config, row, chat)
        end = chat.render([{"role": "user", "content": SAYS}])[-1:]

        async def ask(ids: Sequence[int], sampling: SamplingParams) -> Generation:
            return Generation(end, [0.0], ((0, 0),), "stop")

        played = await player.play(ticket, "check", ask)
    except (EnvironmentFaultError, ValueError) as error:
        raise ConfigError(
            f"rollout.environment.use {section.use}: played with the first training row and a script in "
            f"place of the model: {error}"
        ) from None
    finally:
        await player.close()
    return _lines(played)


def _lines(played: Played) -> list[str]:
    session = played.session
    assert session is not None
    calls = [
        f"{call['function']['name']}({call['function']['arguments']})"
        for message in session.messages
        for call in message.get("tool_calls", ())
    ]
    answers = [str(message["content"]) for message in session.messages if message["role"] != "assistant"]
    reward = "no reward" if session.reward is None else f"a reward of {session.reward:g}"
    lines = [f"{session.environment}: {len(session.turns)} turns of a script, ended {session.end}, {reward}"]
    lines += [f"called {call}" for call in calls]
    lines += [f"answered {' '.join(answer.split())[:SHOWN]}" for answer in answers]
    return lines


def _ticket(config: RunConfig, row: Mapping[str, Any], chat: ChatFormat) -> Ticket:
    """As the trainer issues it, but for the ids of a prompt that nothing is added to."""
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return Ticket(
        ticket=0,
        step=0,
        min_version=0,
        group_size=1,
        prompt_ids=chat.render(messages),
        prompt_text=prompt if isinstance(prompt, str) else "",
        data_source=row["data_source"],
        ground_truth=row["ground_truth"],
        extra=dict(row["extra"]) | ({} if isinstance(prompt, str) else {PROMPT: prompt}),
        sampling=SamplingParams(max_tokens=config.rollout.sampling.max_tokens),
    )


class ScriptedChat:
    """The model's chat format, with a script for what the model says: each tool once, then "ok"."""

    def __init__(self, inner: ChatFormat) -> None:
        self._num_said = 0
        self.has_template = inner.has_template
        self.render, self.extend = inner.render, inner.extend
        self.shorten, self.encode = inner.shorten, inner.encode

    def parse(self, turn_ids: Sequence[int], tools: Tools = (), is_cut: bool = False) -> Parsed:
        """The next line of the script."""
        message: dict[str, Any] = {"role": "assistant", "content": SAYS}
        place, self._num_said = self._num_said, self._num_said + 1
        if place >= len(tools):
            return Parsed(message)
        function = tools[place]["function"]
        call = Call(function["name"], _example(function.get("parameters") or {}))
        written = {"name": call.name, "arguments": json.dumps(call.arguments)}
        message["tool_calls"] = [{"id": "call_0", "type": "function", "function": written}]
        return Parsed(message, (call,))


def _example(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the right types for those that are required."""
    properties = parameters.get("properties") or {}
    return {name: _value(properties.get(name) or {}) for name in parameters.get("required") or ()}


def _value(schema: Mapping[str, Any]) -> Any:
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    return EXAMPLES.get(kind[0] if isinstance(kind, list) else kind, "1")


def _nothing(ids: Sequence[int]) -> str:
    return ""


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
