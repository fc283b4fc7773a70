"""The gateway, asked by the clients that agents use, unmodified: ids are what the engine saw and said."""

import asyncio
import contextlib
import http.client
import json
import os
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import httpx
import pytest
import structlog

from tests.support.late_imports import late
from tests.support.scripted_model import ByteChat, ScriptedModel, call_line
from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.telemetry import metrics
from tidemill.common.wire.messages import SamplingParams
from tidemill.common.wire.segments import Segment
from tidemill.services.rollout.gateway.dialogue import READ, wishes_in
from tidemill.services.rollout.gateway.server import RETRY_COUNT, Gateway
from tidemill.services.rollout.gateway.session import LONG_CHARACTERS, GatewaySession

anthropic = late("anthropic")
openai = late("openai")

CHAT = ByteChat()


class WatchedChat(ByteChat):
    """Keeps the threads on which it renders."""

    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = ()) -> list[int]:
        self.threads.add(threading.current_thread())
        return super().render(messages, tools)


ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOL = {"type": "function", "function": ADD}
MODEL_LEN = 4096
ROOMY = 1 << 20


class Opened:
    """A session behind a gateway, its model, and clients of it."""

    def __init__(
        self, session: GatewaySession, model: ScriptedModel, root: str, threads: set[threading.Thread]
    ) -> None:
        self.session = session
        self.model = model
        self.threads = threads
        self.openai = openai.AsyncOpenAI(base_url=f"{root}/v1", api_key=session.key)
        self.anthropic = anthropic.AsyncAnthropic(base_url=root, api_key=session.key)

    async def say(self, messages: list[Any], **more: Any) -> Any:
        completion = await self.openai.chat.completions.create(model="m", messages=messages, **more)
        return completion.choices[0].message

    async def post(self, path: str, **request: Any) -> httpx.Response:
        """A request as no client sends it."""
        headers = {"authorization": f"Bearer {self.session.key}"}
        async with httpx.AsyncClient() as http:
            return await http.post(f"{self.openai.base_url}{path}", headers=headers, **request)

    @property
    def segments(self) -> list[Segment]:
        played = self.session.played(None, {})
        assert played.session is not None
        return [played.first, *played.session.forks]

    def check_ids(self) -> None:
        """Each turn is what the engine said after what it saw, and nothing else is trained."""
        turns = []
        for segment in self.segments:
            ids = [*segment.prompt_ids.tolist(), *segment.completion_ids.tolist()]
            trained = segment.mask.tolist()
            for turn in segment.turns:
                start = turn.num_prompt_tokens
                end = turn.num_prompt_tokens + turn.num_tokens
                turns.append((ids[:start], ids[start:end]))
                assert all(trained[turn.first : turn.end])
                trained[turn.first : turn.end] = [False] * turn.num_tokens
            assert not any(trained)
        assert sorted(turns) == sorted(zip(self.model.seen, self.model.said, strict=True))


@contextlib.asynccontextmanager
async def opened(
    *lines: str,
    max_model_len: int = MODEL_LEN,
    turn_tokens: int = 200,
    refuses_wishes: bool = False,
    **limits: Any,
) -> AsyncIterator[Opened]:
    model = ScriptedModel(*lines)
    chat = WatchedChat()
    sampling = SamplingParams(max_tokens=turn_tokens)
    section = EnvironmentConfig.model_validate({"max_turns": 2000} | limits)
    session = GatewaySession(chat, CHAT.decode, model.ask, sampling, section, max_model_len)
    gateway = Gateway("m", refuses_wishes=refuses_wishes)
    await gateway.start()
    try:
        with gateway.serving(session) as root:
            yield Opened(session, model, root, chat.threads)
    finally:
        await session.close()
        await gateway.close()


USER = {"role": "user", "content": "What is 1 + 2?"}


async def test_a_history_that_grows_is_extended_whatever_the_client_does_to_its_form() -> None:
    async with opened("thinking " + call_line("add", a=1, b=2), call_line("add", a=3), "three") as run:
        first = await run.say([USER], tools=[TOOL], temperature=0.1)
        assert json.loads(first.tool_calls[0].function.arguments) == {"a": 1, "b": 2}
        reply = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}
        second = await run.say([USER, first, reply], tools=[TOOL])
        assert second.content is None
        rewritten = {
            "role": "assistant",
            "content": [{"type": "text", "text": "thinking "}],
            "tool_calls": [
                {"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"b":2, "a":1}'}}
            ],
        }
        parts = {"role": "user", "content": [{"type": "text", "text": USER["content"]}]}
        last = {"role": "tool", "tool_call_id": "y", "content": [{"type": "text", "text": "4"}]}
        third = await run.say([parts, rewritten, {**reply, "tool_call_id": "x"}, second, last], tools=[TOOL])
        assert third.content == "three"
        assert run.session.counts == {"clean": 2} and len(run.segments) == 1
        assert [turn.num_calls for turn in run.segments[0].turns] == [1, 1, 0]
        run.check_ids()


async def test_what_a_request_brings_and_json_cannot_hold_is_sent_back_as_it_came() -> None:
    tool = {**ADD, "type": "function", "parameters": {"default": float("inf")}}
    odd: dict[str, Any] = {"instructions": "half \ud83d", "tools": [tool]}
    async with opened("four") as run:
        body = json.dumps({"model": "m", "input": "2 + 2?", **odd})
        answer = await run.post("responses", content=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["instructions"] == odd["instructions"] and answer.json()["tools"] == odd["tools"]
        run.check_ids()


async def test_other_histories_are_segments_of_their_own_and_each_is_found_again() -> None:
    async with opened("a1", "b1", "a2", "b2", "short") as run:
        main = [USER]
        sub = [{"role": "system", "content": "You are another."}, USER]
        for _ in range(2):
            for history in (main, sub):
                history += [await run.say(history), {"role": "user", "content": "on"}]
        assert await run.say([{"role": "user", "content": "summary of all"}])
        assert run.session.counts == {"clean": 2, "forked": 2}
        assert [len(segment.turns) for segment in run.segments] == [2, 2, 1]
        run.check_ids()
        messages = run.session.played(None, {}).session.messages
        assert [message["content"] for message in messages if message["role"] == "assistant"] == (
            ["a1", "a2", "b1", "b2", "short"]
        )


def without_count() -> dict[str, Any]:
    """Headers of a client that does not say whether it asks again."""
    return {RETRY_COUNT: openai.Omit()}


async def test_a_retry_gets_the_same_answer_and_a_question_asked_anew_one_of_its_own() -> None:
    async with opened("one", "two", "three", "four") as run:
        both = await asyncio.gather(*(run.say([USER], extra_headers=without_count()) for _ in range(2)))
        retried = await run.say([USER], extra_headers={RETRY_COUNT: "1"})
        assert {message.content for message in (*both, retried)} == {"one"} and len(run.model.seen) == 1
        assert (await run.say([USER])).content == "two"
        assert (await run.say([USER], extra_headers=without_count())).content == "two"
        for said in ("two", "one"):
            await run.say([USER, {"role": "assistant", "content": said}, {"role": "user", "content": "on"}])
        run.model.lines = ["another"]
        assert (await run.say([USER], extra_headers=without_count())).content == "another"
        assert run.session.counts == {"clean": 2, "forked": 2}
        run.check_ids()


async def test_chat_streams_have_what_whole_answers_have() -> None:
    async with opened("so " + call_line("add", a=1), "plain") as run:
        async with run.openai.chat.completions.stream(
            model="m", messages=[USER], tools=[TOOL], stream_options={"include_usage": True}
        ) as stream:
            completion = await stream.get_final_completion()
        (choice,) = completion.choices
        assert choice.message.content == "so " and choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls[0].function.arguments == '{"a": 1}'
        assert completion.usage.completion_tokens == len(run.model.said[0])


async def test_logprobs_that_are_asked_for_are_those_of_the_tokens_that_were_sampled() -> None:
    async with opened("ab", "ab", "cd", repeated_requests="sample") as run:
        asked: dict[str, Any] = {"model": "m", "messages": [USER], "logprobs": True}
        answer = await run.openai.chat.completions.create(**asked)
        tokens = answer.choices[0].logprobs.content
        assert [(token.token, token.logprob) for token in tokens] == [("a", -0.5), ("b", -0.5), ("", -0.5)]
        async with run.openai.chat.completions.stream(**asked) as stream:
            streamed = await stream.get_final_completion()
        assert [token.token for token in streamed.choices[0].logprobs.content] == ["a", "b", ""]
        plain = await run.openai.completions.create(model="m", prompt="?", logprobs=0)
        assert plain.choices[0].logprobs.tokens == ["c", "d", ""]
        assert plain.choices[0].logprobs.text_offset == [0, 1, 2]
        run.check_ids()


async def test_responses_streams_and_goes_on_with_the_items_of_earlier_ones() -> None:
    tool = {"type": "function", **ADD}
    async with opened("so " + call_line("add", a=1), "two") as run:
        async with run.openai.responses.stream(
            model="m", input="1?", instructions="Be short.", tools=[tool]
        ) as stream:
            async for _ in stream:
                pass
            first = await stream.get_final_response()
        call = first.output[1]
        assert call.name == "add" and first.output_text == "so "
        items: list[Any] = [{"role": "user", "content": "1?"}, *(item.model_dump() for item in first.output)]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "2"})
        second = await run.openai.responses.create(
            model="m", input=items, instructions="Be short.", tools=[tool]
        )
        assert second.output_text == "two" and run.session.counts == {"clean": 1}
        run.check_ids()
        with pytest.raises(openai.BadRequestError, match="whole history"):
            await run.openai.responses.create(model="m", input="on", previous_response_id=second.id)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_anthropic_clients_play_with_tools_and_a_changing_system_prompt(is_streamed: bool) -> None:
    tool = {"name": "add", "description": "Adds.", "input_schema": ADD["parameters"]}
    async with opened("so " + call_line("add", a=1), "two") as run:

        async def say(number: int, messages: list[Any]) -> anthropic.types.Message:
            billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={number}"}
            rules = {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}
            asked: dict[str, Any] = {"system": [billing, rules], "tools": [tool], "messages": messages}
            if is_streamed:
                async with run.anthropic.messages.stream(model="m", max_tokens=99, **asked) as stream:
                    return await stream.get_final_message()
            return await run.anthropic.messages.create(model="m", max_tokens=99, **asked)

        first = await say(1, [{"role": "user", "content": "1?"}])
        assert first.stop_reason == "tool_use" and first.content[1].input == {"a": 1}
        result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "2"}
        blocks = [block.model_dump(exclude_none=True) for block in first.content]
        question = {"type": "text", "text": "1?", "cache_control": {"type": "ephemeral"}}
        second = await say(
            2,
            [
                {"role": "user", "content": [question]},
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": [result]},
            ],
        )
        assert second.content[0].text == "two" and second.stop_reason == "end_turn"
        assert second.usage.input_tokens + second.usage.cache_read_input_tokens == len(run.model.seen[1])
        assert run.session.counts == {"clean": 1}
        run.check_ids()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_anthropic_clients_learn_which_stop_sequence_has_ended_an_answer(is_streamed: bool) -> None:
    # Loops of thought, action and observation go on by it.
    asked: dict[str, Any] = {"model": "m", "max_tokens": 50, "stop_sequences": ["\nEnd", "\nObs"]}
    async with opened("so 2\nObservation: lies", "done") as run:

        async def say(*messages: Any) -> anthropic.types.Message:
            if is_streamed:
                async with run.anthropic.messages.stream(messages=messages, **asked) as stream:
                    return await stream.get_final_message()
            return await run.anthropic.messages.create(messages=messages, **asked)

        first = await say(USER)
        assert (first.content[0].text, first.stop_reason, first.stop_sequence) == (
            "so 2",
            "stop_sequence",
            "\nObs",
        )
        second = await say(USER, {"role": "assistant", "content": "so 2"}, USER)
        assert (second.content[0].text, second.stop_reason, second.stop_sequence) == (
            "done",
            "end_turn",
            None,
        )


async def test_a_thread_that_the_server_should_keep_is_refused_as_anthropics_client_understands_it() -> None:
    async with opened("never") as run:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await run.anthropic.messages.create(
                model="m", max_tokens=9, messages=[USER], extra_body={"thread": {"type": "create"}}
            )
        assert caught.value.body["error"]["details"] == {"error_code": "thread_unsupported_request"}
        assert not run.model.seen


async def test_completions_go_on_where_text_or_ids_ended_and_stop_where_the_client_says() -> None:
    async with opened(" 2\nObservation: lies", " 3") as run:
        asked = {"model": "m", "max_tokens": 50}
        first = await run.openai.completions.create(prompt="1 + 1 =", stop=["\nObs", ""], **asked)
        assert first.choices[0].text == " 2"
        second = await run.openai.completions.create(prompt="1 + 1 = 2\nso 1 + 2 =", **asked)
        assert second.choices[0].text == " 3" and run.session.counts == {"clean": 1}
        (segment,) = run.segments
        assert CHAT.decode(segment.completion_ids.tolist()) == " 2\nso 1 + 2 = 3"
        assert CHAT.decode(segment.completion_ids[segment.mask].tolist()) == " 2 3"
        assert [sampling.stop for sampling in run.model.sampled] == [("\nObs",), ()]


async def test_limits_end_the_loop_in_words_and_truncate_the_session() -> None:
    async with opened("a", "b", max_turns=1) as run:
        await run.say([USER])
        with pytest.raises(openai.BadRequestError, match="had its 1 turns") as caught:
            await run.say([USER, {"role": "assistant", "content": "a"}, USER])
        assert caught.value.code == "session_limit"
        played = run.session.played(None, {})
        assert played.finish == "length" and played.session.end == "max_turns"
    async with opened("abcdefgh", "b", max_tokens=20) as run:
        assert (await run.say([USER], max_tokens=5)).content == "abcde"
        with pytest.raises(openai.BadRequestError, match="used its 20 tokens"):
            await run.say([USER, {"role": "assistant", "content": "abcde"}, USER])
        assert run.session.played(None, {}).session.end == "max_tokens"


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"n": 2}, "n must be 1"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "reads text"),
        ({"max_tokens": 0}, "whole number from 1"),
        ({"stream": True, "stream_options": 5}, "stream_options"),
    ],
)
async def test_what_cannot_be_done_is_answered_in_words_and_not_tried_again(more: Any, words: str) -> None:
    async with opened() as run:
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            await run.openai.chat.completions.create(**{"model": "m", "messages": [USER]} | more)
        assert caught.value.response.headers["x-should-retry"] == "false"
        assert not run.model.seen


SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("body", "wishes"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, ["response_format"]),
        ({"response_format": {"type": "text"}, "tool_choice": "none"}, []),
        ({"text": {"format": SCHEMA}}, ["text.format"]),
        ({"output_config": {"format": SCHEMA}, "tool_choice": {"type": "auto"}}, ["output_config.format"]),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, ["tool_choice"]),
        ({"tool_choice": {"type": "tool", "name": "add"}}, ["tool_choice"]),
        ({"guided_json": {"type": "object"}, "structured_outputs": {}}, ["guided_json"]),
    ],
)
def test_forms_and_calls_that_a_client_asks_for_are_wishes(body: Any, wishes: list[str]) -> None:
    assert wishes_in(body) == wishes


async def test_a_form_that_a_client_asks_for_is_sampled_freely_and_counted() -> None:
    more = {"tools": [TOOL], "tool_choice": "required"}
    field = "tool_choice"
    before = metrics.AGENT_WISHES.labels(field)._value.get()
    async with opened("free", "text") as run:
        assert (await run.say([USER], **more)).content == "free"
        assert metrics.AGENT_WISHES.labels(field)._value.get() == before + 1
        run.check_ids()
    async with opened("free", refuses_wishes=True) as run:
        with pytest.raises(openai.BadRequestError, match=field):
            await run.say([USER], **more)
        assert not run.model.seen and (await run.say([USER])).content == "free"


async def test_what_does_nothing_here_is_named_in_the_log_once() -> None:
    async with opened("one", "two") as run:
        with structlog.testing.capture_logs() as logs:
            for _ in range(2):
                await run.say(
                    [USER], temperature=0.1, user="u", extra_body={"chat_template_kwargs": {"a": 1}}
                )
        assert [entry["parameters"] for entry in logs] == [["chat_template_kwargs", "temperature", "user"]]


async def test_arguments_that_come_as_an_object_are_the_call_that_the_model_made() -> None:
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": {"a": 7}}}
    history = [USER, {"role": "assistant", "tool_calls": [call]}]
    async with opened("one", "two") as run:
        await run.say([*history, {"role": "tool", "tool_call_id": "x", "content": "7"}], tools=[TOOL])
        assert json.dumps(json.dumps({"a": 7})) in CHAT.decode(run.model.seen[0])
        items = [{"type": "function_call", "call_id": "x", "name": "add", "arguments": {"a": 8}}]
        await run.openai.responses.create(model="m", input=items)
        assert json.dumps(json.dumps({"a": 8})) in CHAT.decode(run.model.seen[1])


ODD: list[Any] = [5, True, "x", [5], ["x"], [[]], {"a": 1}, {"type": 5}, {"type": "x"}, [{"type": 5}], [{}]]
ODD += [{"format": 5}, {"format": {"type": 5}}, [{"role": "user", "content": 5}], [{"role": []}]]
ODD += [[{"role": "assistant", "tool_calls": 5}], [{"role": "tool", "tool_call_id": {}, "content": "x"}]]
ODD += [[{"role": "assistant", "tool_calls": [{"id": [], "function": {"name": [], "arguments": []}}]}]]
ODD += [[{"role": "user", "content": [{"type": []}]}], [{"type": "function", "function": {"name": 5}}]]
ODD += [[{"role": "assistant", "content": [{"type": "tool_use", "id": [], "name": [], "input": "x"}]}]]
ODD += [
    [{"type": "function", "function": {"name": "f", "parameters": 5}}],
    [{"name": "f", "input_schema": 5}],
]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses", "messages"])
async def test_fields_of_another_type_are_no_failure_of_the_server(path: str) -> None:
    fields = READ | {"temperature"}
    whole: dict[str, Any] = {"model": "m", "max_tokens": 5}
    whole |= {"completions": {"prompt": "x"}, "responses": {"input": "x"}}.get(path, {"messages": [USER]})
    # Fields change the question, so that many of them begin a history of their own.
    async with opened(*["a"] * 2000, max_segments=2000) as run, httpx.AsyncClient() as http:
        headers = {"authorization": f"Bearer {run.session.key}"}
        for field in sorted(fields):
            for value in ODD:
                answer = await http.post(
                    f"{run.openai.base_url}{path}", json=whole | {field: value}, headers=headers
                )
                assert answer.status_code in (200, 400), (field, value, answer.text)


async def test_without_the_sessions_key_nothing_is_answered() -> None:
    async with opened("a") as run:
        assert [model.id async for model in await run.openai.models.list()] == ["m"]
        assert (await run.openai.models.retrieve("m")).id == "m"
        assert (await run.anthropic.models.retrieve("folder/any")).id == "m"
        for text in ("another", run.session.token):  # programs log the address, and the token with it
            with pytest.raises(openai.AuthenticationError):
                await run.openai.with_options(api_key=text).chat.completions.create(
                    model="m", messages=[USER]
                )
        with pytest.raises(openai.NotFoundError, match="no session"):
            await run.openai.with_options(
                base_url=str(run.openai.base_url).replace(run.session.token, "other")
            ).models.list()


async def test_a_request_without_an_end_is_refused_and_takes_no_memory() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(128):
            yield bytes(1 << 20)

    async with opened("hello") as run:
        answer = await run.post("chat/completions", content=pieces())
        assert answer.status_code == 413 and "too_large" in answer.text
        deep = await run.post("chat/completions", content="[" * 100_000)
        assert deep.status_code == 400 and "not JSON" in deep.text
        assert (await run.say([USER])).content == "hello"


TOO_MUCH: list[list[Any]] = [
    [USER | {"content": "x" * (1 << 20)}],
    [USER | {"content": "x" * (40 << 20)}],
    [{"role": "user", "content": ""}] * (MODEL_LEN + 1),
]


@pytest.mark.parametrize("messages", TOO_MUCH, ids=["1 MiB", "40 MiB", "many"])
async def test_what_cannot_fit_into_the_model_is_refused_before_it_is_rendered(messages: list[Any]) -> None:
    async with opened("hello") as run:
        with pytest.raises(openai.BadRequestError) as caught:
            await run.say(messages)
        assert caught.value.code == "session_limit" and run.session.end == "max_tokens"
        assert not run.threads
        assert (await run.say([USER])).content == "hello" and run.session.end == "done"


async def test_long_histories_are_rendered_and_tokenised_beside_the_loop() -> None:
    async with opened("one", "two", "three", max_model_len=ROOMY) as run:
        long = USER | {"content": "x" * LONG_CHARACTERS}
        first, again = await asyncio.gather(
            run.say([long]), run.say([long], extra_headers={RETRY_COUNT: "1"})
        )
        assert first.content == again.content == "one"
        await run.say([long, first, long])
        assert run.threads and threading.main_thread() not in run.threads


@pytest.mark.parametrize("depth", [200, 900, 100_000])
async def test_lists_in_lists_without_an_end_are_no_failure_of_the_server(depth: int) -> None:
    deep = "[" * depth + "]" * depth
    call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": deep}}
    result = {"role": "tool", "tool_call_id": "x", "content": "7"}
    async with opened("one", "two", max_model_len=ROOMY) as run:
        assert (await run.say([USER, {"role": "assistant", "tool_calls": [call]}, result])).content == "one"
        messages = '[{"role": "user", "content": "x"}]'
        answer = await run.post("chat/completions", content=f'{{"messages": {messages}, "tools": {deep}}}')
        assert answer.status_code == 400


async def test_a_connection_is_claimed_where_the_machine_can_start_no_thread(monkeypatch):
    async def refuse(*args: Any) -> None:
        raise RuntimeError("can't start new thread")

    def claim() -> int:
        """The status of the answer to a claim of the connection that it comes on."""
        port = claiming.sock.getsockname()[1]
        path = f"{url.path.removesuffix('/').removesuffix('/v1')}/processes/{os.getpid()}/connections/{port}"
        claiming.request("POST", path, headers={"x-api-key": run.session.key})
        return claiming.getresponse().status

    async with opened("hi") as run:
        url = run.openai.base_url
        claiming = http.client.HTTPConnection(url.host, url.port, 10)
        with contextlib.closing(claiming):
            claiming.connect()
            monkeypatch.setattr("asyncio.to_thread", refuse)
            assert await asyncio.get_running_loop().run_in_executor(None, claim) == 200


async def test_a_claimed_connection_without_the_placeholders_key_is_refused() -> None:
    def ask(connection: http.client.HTTPConnection, method: str, path: str, *keys: str) -> list[int]:
        """The status of each answer, all on one connection."""
        statuses = []
        for key in keys:
            connection.request(method, path, headers={"authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)
        return statuses

    async with opened("hi") as run:
        url = run.openai.base_url
        path = url.path.removesuffix("/").removesuffix("/v1")
        key = run.session.key
        claimed = http.client.HTTPConnection(url.host, url.port, 10)
        claiming = http.client.HTTPConnection(url.host, url.port, 10)
        with contextlib.closing(claimed), contextlib.closing(claiming):
            assert await asyncio.to_thread(ask, claimed, "GET", "/v1/models", key) == [404]
            port = claimed.sock.getsockname()[1]
            for pid, status in ((os.getppid(), 403), (1 << 62, 403), (os.getpid(), 200)):
                claim = f"{path}/processes/{pid}/connections/{port}"
                assert await asyncio.to_thread(ask, claiming, "POST", claim, key) == [status]
            assert await asyncio.to_thread(ask, claimed, "GET", "/v1/models", "x", key) == [401, 401]
