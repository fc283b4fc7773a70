"""Agents' clients behind a proxy that loses, halves and delays: nothing is trained that no program has read.

A program is one of the kinds of HARNESSES: the retries of its SDK, and a loop above it that asks again.
"""

import asyncio
import contextlib
import random
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import httpx
import pytest

from tests.support.late_imports import late
from tests.support.lossy_proxy import LossyProxy, Mode
from tests.support.scripted_model import END, ByteChat, call_line
from tests.support.waiting import wait_until
from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.wire.messages import SamplingParams
from tidemill.services.rollout.engines.engine import Generation
from tidemill.services.rollout.gateway.server import Gateway
from tidemill.services.rollout.gateway.session import GatewaySession
from tidemill.services.rollout.sessions.chat import Parsed

anthropic = late("anthropic")
openai = late("openai")

CHAT = ByteChat()
SLOW_S = 0.06
"""Longer than the proxy waits before it hangs up."""
Ask = Callable[[list[Any]], Awaitable[str]]


class NumberedModel:
    """Each answer has a text of its own, so that a text says which turn it is."""

    def __init__(self, text: str) -> None:
        self.num_said = 0
        self._text = text

    async def ask(self, ids: Sequence[int], sampling: SamplingParams) -> Generation:
        await asyncio.sleep(SLOW_S)
        self.num_said += 1
        said = [*f"<{self.num_said}>{self._text}".encode(), END]
        return Generation(said, [-0.5] * len(said), ((0, 0),), "stop")


class Behind:
    """A session behind a gateway behind a proxy."""

    def __init__(self, session: GatewaySession, proxy: LossyProxy, root: str) -> None:
        self.session = session
        self.proxy = proxy
        self.root = root

    @property
    def trained(self) -> list[str]:
        """The marks of the turns that are trained."""
        played = self.session.played(None, {})
        assert played.session is not None
        texts = []
        for segment in (played.first, *played.session.forks):
            texts.append(CHAT.decode(segment.completion_ids[segment.mask].tolist()))
        return re.findall(r"<\d+>", " ".join(texts))

    @property
    def received(self) -> set[str]:
        """The marks of answers that clients could read."""
        return set(re.findall(r"<\d+>", self.proxy.received.decode().replace("\\u003c", "<")))


@contextlib.asynccontextmanager
async def behind(
    modes: Sequence[Mode], chat_format: ByteChat = CHAT, text: str = " is the answer", **limits: Any
) -> AsyncIterator[Behind]:
    section = EnvironmentConfig.model_validate({"max_turns": 200, "max_segments": 200} | limits)
    sampling = SamplingParams(max_tokens=200)
    ask = NumberedModel(text).ask
    session = GatewaySession(chat_format, CHAT.decode, ask, sampling, section, 1 << 16)
    gateway = Gateway("m")
    await gateway.start()
    port = int(gateway.root.rpartition(":")[2])
    try:
        async with LossyProxy(port, modes).serving() as proxy:
            with gateway.serving(session) as root:
                yield Behind(session, proxy, root.replace(str(port), str(proxy.port)))
    finally:
        await session.close()
        await gateway.close()


def chat(run: Behind, retries: int, is_streamed: bool) -> Ask:
    client = openai.AsyncOpenAI(base_url=f"{run.root}/v1", api_key=run.session.key, max_retries=retries)

    async def ask(messages: list[Any]) -> str:
        answer = await client.chat.completions.create(model="m", messages=messages, stream=is_streamed)
        if not is_streamed:
            return answer.choices[0].message.content
        return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

    return ask


def responses(run: Behind, retries: int, is_streamed: bool) -> Ask:
    client = openai.AsyncOpenAI(base_url=f"{run.root}/v1", api_key=run.session.key, max_retries=retries)

    async def ask(messages: list[Any]) -> str:
        if not is_streamed:
            return (await client.responses.create(model="m", input=messages)).output_text
        async with client.responses.stream(model="m", input=messages) as stream:
            return (await stream.get_final_response()).output_text

    return ask


def messages_of_anthropic(run: Behind, retries: int, is_streamed: bool) -> Ask:
    client = anthropic.AsyncAnthropic(base_url=run.root, api_key=run.session.key, max_retries=retries)

    async def ask(messages: list[Any]) -> str:
        asked = {"model": "m", "max_tokens": 99, "messages": messages}
        if not is_streamed:
            return (await client.messages.create(**asked)).content[0].text
        async with client.messages.stream(**asked) as stream:
            return await stream.get_final_text()

    return ask


def plain(run: Behind, retries: int, is_streamed: bool) -> Ask:
    """As clients of their own do it, such as those of codex and of litellm for Anthropic: without a count."""

    async def ask(messages: list[Any]) -> str:
        headers = {"authorization": f"Bearer {run.session.key}"}
        body = {"messages": messages, "stream": is_streamed}
        async with httpx.AsyncClient(headers=headers, timeout=30) as http:
            answer = await http.post(f"{run.root}/v1/chat/completions", json=body)
        answer.raise_for_status()
        if is_streamed:
            return "".join(re.findall(r'"content": "([^"]*)"', answer.text))
        return answer.json()["choices"][0]["message"]["content"]

    return ask


async def play(ask: Ask, num_turns: int, num_tries: int) -> str:
    """A program's loop; it asks again where its SDK has given up, as a request of its own."""
    messages: list[Any] = [{"role": "user", "content": "begin"}]
    text = ""
    for _ in range(num_turns):
        for attempt in range(num_tries):
            try:
                text = await ask(messages)
                break
            except Exception:
                if attempt == num_tries - 1:
                    raise
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "on"}]
    return text


LOSSES: list[Mode] = ["lose", "halve", "hang_up", "fail", "delay", "pass"]
NUM_TURNS = 3


@pytest.mark.parametrize("client", [chat, responses, messages_of_anthropic, plain])
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
async def test_what_no_program_has_read_is_not_trained(client, is_streamed, seed, monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)
    monkeypatch.setattr("anthropic._base_client.INITIAL_RETRY_DELAY", 0.01)
    chance = random.Random(seed)
    modes = chance.choices(LOSSES, k=12)
    async with behind(modes) as run:
        last = await play(client(run, chance.choice([0, 2]), is_streamed), NUM_TURNS, 16)
        trained = run.trained
        assert set(trained) <= run.received, (run.proxy.done, run.session.played(None, {}).session.unread)
        assert trained[-1] in last and len(trained) == NUM_TURNS


async def test_a_stream_that_ends_in_order_before_its_end_is_not_trained_once_the_client_goes_on() -> None:
    async with behind(["pass", "halve_in_order", "pass"]) as run:
        await play(chat(run, 0, True), NUM_TURNS, 2)
        assert run.trained == ["<1>", "<3>"]
        (unread,) = run.session.played(None, {}).session.unread
        assert unread.why == "cut"


async def test_calls_that_were_lost_before_a_program_began_again_are_not_trained() -> None:
    """A program that begins its agent again where that has failed, from the same question."""

    async def play_agent(num_turns: int) -> None:
        messages: list[Any] = [{"role": "user", "content": "begin"}]
        for _ in range(num_turns):
            said = await client.chat.completions.create(model="m", messages=messages)
            answer = said.choices[0].message
            result = {"role": "tool", "content": "on", "tool_call_id": answer.tool_calls[0].id}
            messages += [answer, result]

    async with behind(["pass", "halve"], text=call_line("noop")) as run:
        client = openai.AsyncOpenAI(base_url=f"{run.root}/v1", api_key=run.session.key, max_retries=0)
        with pytest.raises(openai.APIConnectionError):
            await play_agent(2)
        await play_agent(2)
        assert run.trained == ["<1>", "<3>", "<4>"]
        (unread,) = run.session.played(None, {}).session.unread
        assert (unread.why, unread.message["content"]) == ("asked_again", "<2>")


async def test_a_program_that_ends_after_its_only_answer_was_lost_has_nothing_to_train() -> None:
    async with behind(["hang_up"]) as run:
        with pytest.raises(httpx.HTTPError):
            await play(plain(run, 0, False), 1, 1)
        await wait_until(lambda: not run.session.num_running)
        assert not run.session.read_histories


async def test_a_response_that_breaks_in_the_middle_is_not_delivered() -> None:
    """The client leaves while most of the answer waits in the gateway's socket."""

    class LongChat(ByteChat):
        def parse(self, turn_ids: Sequence[int], tools: Sequence[Any] = (), is_cut: bool = False) -> Parsed:
            return Parsed({"role": "assistant", "content": "x" * (6 << 20)})

    async with behind([], LongChat()) as run:
        body = b'{"messages": [{"role": "user", "content": "go"}]}'
        caller = socket.socket()
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.connect(("127.0.0.1", run.proxy.gateway_port))
        reader, writer = await asyncio.open_connection(sock=caller)
        head = f"POST /s/{run.session.token}/v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
        head += f"authorization: Bearer {run.session.key}\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readexactly(1000)
        writer.transport.abort()
        await wait_until(lambda: run.session.histories.recorded and not run.session.read_histories)
