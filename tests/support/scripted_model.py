"""A model with scripted answers, a chat format of bytes that can be read; tickets and players of sessions."""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np

from tests.support.models import run_config
from tidemill.common.wire.messages import SamplingParams, Ticket
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.environments.agent import AgentPlayer
from tidemill.services.rollout.sessions.chat import Call, Parsed

START = 256
END = 257
CALL = "<call>"
CALLED = "</call>"


class ByteChat:
    """Every byte is a token; turns stand between START and END. Calls are JSON in `<call>`."""

    has_template = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < START).decode()

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
        ids = [START, *self.encode(json.dumps(tools)), END] if tools else []
        for message in messages:
            if message["role"] == "refused":
                raise ValueError("no such role")
            text = str(message.get("content") or "")
            for call in message.get("tool_calls", ()):
                text += f"{CALL}{json.dumps(call['function'])}{CALLED}"
            ids += [START, *self.encode(f"{message['role']}\n{text}"), END]
        return [*ids, START, *self.encode("assistant\n")]

    def extend(
        self, turn_ids: Sequence[int], is_stopped: bool, messages: Sequence[Any], tools: Sequence[Any] = ()
    ) -> list[int]:
        return ([] if is_stopped else [END]) + self.render(messages)

    def parse(self, turn_ids: Sequence[int], tools: Sequence[Any] = (), is_cut: bool = False) -> Parsed:
        text, *calls = self.decode(turn_ids).split(CALL)
        return Parsed({"role": "assistant", "content": text}, tuple(_call(call) for call in calls))

    def shorten(self, text: str, max_tokens: int) -> str:
        return text[:max_tokens]


class ScriptedModel:
    """Answers with one line after the other; `seen` has the ids that it was given each time."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)
        self.seen: list[list[int]] = []
        self.said: list[list[int]] = []
        self.sampled: list[SamplingParams] = []
        self.version = 3

    async def ask(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        self.seen.append(list(ids))
        self.sampled.append(sampling)
        line = self.lines.pop(0)
        said = [*line.encode(), END][: sampling.max_tokens]
        self.said.append(said)
        return Generation(
            said,
            [-0.5] * len(said),
            ((self.version, 0),),
            "stop" if said[-1] == END else "length",
            num_cached_tokens=2,
        )


def call_line(name: str, **arguments: Any) -> str:
    return f"{CALL}{json.dumps({'name': name, 'arguments': arguments})}{CALLED}"


def _call(text: str) -> Call:
    try:
        function = json.loads(text.removesuffix(CALLED))
    except ValueError:
        return Call("", error="not JSON")
    return Call(function["name"], function["arguments"])


CHAT = ByteChat()


def make_ticket(prompt_text: str = "1 + 1?", max_tokens: int = 99, **fields: Any) -> Ticket:
    defaults = {"ticket": 0, "step": 0, "min_version": 0, "group_size": 1, "ground_truth": "yes"}
    ids = np.arange(3, dtype=np.int32)
    sampling = SamplingParams(max_tokens=max_tokens)
    return Ticket(
        **{**defaults, "prompt_ids": ids, "prompt_text": prompt_text, "sampling": sampling, **fields}
    )


@contextlib.asynccontextmanager
async def agent_player(
    agent: str, max_model_len: int = 2048, model: str = "m", **environment: Any
) -> AsyncIterator[AgentPlayer]:
    """A started player of an agent's sessions."""
    section = {"use": "agent", "agent": agent, "attempts": 1} | environment
    config = run_config(model, model={"max_model_len": max_model_len}, rollout={"environment": section})
    player = AgentPlayer(config, CHAT.decode, lambda: CHAT)
    try:
        await player.start()
        yield player
    finally:
        await player.close()
