"""Pictures in requests of the clients that agents use: tokens, places, what is refused, what is trained."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from tests.support.late_imports import late
from tests.support.picture_sessions import SAMPLING, Script, Stage, take_store_away, trajectory_of
from tests.support.vision import png_of
from tidemill.common.config.environment import EnvironmentConfig
from tidemill.common.wire import codec
from tidemill.common.wire.images import Image
from tidemill.common.wire.messages import Trajectory
from tidemill.services.rollout.environments.agent import AgentPlayer
from tidemill.services.rollout.environments.environment import Closing
from tidemill.services.rollout.gateway.server import Gateway
from tidemill.services.rollout.gateway.session import GatewaySession
from tidemill.services.rollout.sessions.pictures import SessionPictures
from tidemill.services.rollout.sessions.template_chat import open_chat
from tidemill.services.trainer.groups.pictures import PictureCheck
from tidemill.services.trainer.groups.sample import make_sample

anthropic = late("anthropic")
openai = late("openai")

MAX_PICTURES = 4
SAYS = ("ab", "cd", "ef", "gh", "ij")


class Opened:
    """A session behind a gateway, and clients of it."""

    row_images: tuple[Image, ...] = ()

    def __init__(self, stage: Stage, session: GatewaySession, script: Script, root: str) -> None:
        self.stage = stage
        self.session = session
        self.script = script
        self.root = root
        self.openai = openai.AsyncOpenAI(base_url=f"{root}/v1", api_key=session.key)
        self.anthropic = anthropic.AsyncAnthropic(base_url=root, api_key=session.key)
        self.placeholder = stage.maker.processor.placeholder_id

    async def say(self, *messages: Any, **more: Any) -> Any:
        completion = await self.openai.chat.completions.create(model="m", messages=messages, **more)
        return completion.choices[0].message

    async def post(self, body: dict[str, Any]) -> httpx.Response:
        """A request to the chat API as no client sends it."""
        headers = {"authorization": f"Bearer {self.session.key}"}
        async with httpx.AsyncClient(timeout=60) as http:
            return await http.post(f"{self.root}/v1/chat/completions", json=body, headers=headers)

    def pictures_of(self, number: int) -> list[tuple[str, int]]:
        """Digest and number of tokens of each picture of question `number`, whose places hold."""
        ids, images = self.script.asked[number]
        expected = np.zeros(len(ids), dtype=bool)
        for image in images:
            expected[image.first : image.end] = True
        assert ((np.asarray(ids) == self.placeholder) == expected).all()
        return [(image.digest, image.num_tokens) for image in images]

    def trajectory(self) -> Trajectory:
        ticket = self.stage.ticket(sampling=SAMPLING)
        played = self.session.played(1.0, {}, row_images=self.row_images)
        trajectory = trajectory_of(ticket, played)
        assert codec.decode(codec.encode(trajectory), Trajectory) == trajectory
        check = PictureCheck(self.stage.maker.store, self.stage.maker.processor)
        assert check.fault_of(trajectory) == ""
        return trajectory


@contextlib.asynccontextmanager
async def opened(tmp_path: Path, *lines: str, **environment: Any) -> AsyncIterator[Opened]:
    limits = {"use": "agent", "agent": "x:y", "call_format": "hermes", **environment}
    stage = Stage(tmp_path, **limits, images={"max_per_prompt": MAX_PICTURES})
    tokenizer = stage.tokenizer
    script = Script(tokenizer, *(lines or SAYS))
    section = EnvironmentConfig.model_validate(limits)
    session = GatewaySession(
        open_chat(stage.config),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        script,
        SAMPLING.model_copy(update={"max_tokens": 20}),
        section,
        400,
        pictures=SessionPictures.of_run(stage.config, tmp_path),
    )
    gateway = Gateway("m")
    await gateway.start()
    try:
        with gateway.serving(session) as root:
            yield Opened(stage, session, script, root)
    finally:
        await session.close()
        await gateway.close()


def base64_of(png: bytes) -> str:
    return base64.b64encode(png).decode()


def url_of(png: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64_of(png)}"


def chat_part(png: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(png), "detail": "low"}}


def block(png: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(png)}
    return {"type": "image", "source": source}


def user(*content: Any) -> dict[str, Any]:
    parts = [{"type": "text", "text": item} if isinstance(item, str) else item for item in content]
    return {"role": "user", "content": parts}


async def test_openais_chat_has_pictures_in_every_turn_and_a_retry_gets_the_same_answer(tmp_path) -> None:
    async with opened(tmp_path) as run:
        first = user("what is ", chat_part(png_of(0)), "?")
        said = await run.say(first)
        second = user(chat_part(png_of(1, 84, 56)), "and this?")
        again = await run.say(first, said, second)
        # As clients send it that count no retries.
        body = {"messages": [first, said.model_dump(exclude_none=True), second]}
        repeated = (await run.post(body)).json()["choices"][0]["message"]["content"]
        assert (said.content, again.content, repeated) == ("ab", "cd", "cd")
        assert len(run.script.asked) == 2
        last = await run.say(first, said, second, again, user("which is larger?"))
        assert last.content == "ef"
        ids, images = zip(*run.script.asked, strict=True)
        # Nothing that came before is rendered or tokenized again.
        assert ids[1][: len(ids[0])] == ids[0] and ids[2][: len(ids[1])] == ids[1]
        assert images[1][:1] == images[0] and images[2] == images[1]
        assert [count for _, count in run.pictures_of(2)] == [4, 6]
        trajectory = run.trajectory()
        assert trajectory.images == images[2]
        assert len(trajectory.segments) == 1 and run.session.counts == {"clean": 2}
        # What was said stands in the record with references, without pixels.
        content = trajectory.session.messages[1]["content"]
        assert [item["type"] for item in content] == ["image", "text"]
        assert content[0]["digest"] == images[1][1].digest and len(codec.encode_payload(trajectory)) < 4000
        assert run.stage.maker.store.read(images[1][1])


async def test_anthropics_blocks_and_results_of_tools_have_pictures(tmp_path) -> None:
    tool = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}
    call = f"<tool_call>{json.dumps({'name': 'look', 'arguments': {}})}</tool_call>"
    async with opened(tmp_path, call, "cd") as run:
        asked = {"model": "m", "max_tokens": 20, "tools": [tool]}
        first = {"role": "user", "content": [block(png_of(0)), {"type": "text", "text": "what is it?"}]}
        counted = await run.anthropic.messages.count_tokens(model="m", messages=[first], tools=[tool])
        said = await run.anthropic.messages.create(**asked, messages=[first])
        (use,) = said.content
        assert use.type == "tool_use" and counted.input_tokens == len(run.script.asked[0][0])
        seen = [{"type": "text", "text": "seen:"}, block(png_of(2))]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": seen}
        reply = {"role": "user", "content": [result, block(png_of(3)), {"type": "text", "text": "both"}]}
        answer = {"role": "assistant", "content": said.content}
        await run.anthropic.messages.create(**asked, messages=[first, answer, reply])
        assert len(run.pictures_of(0)) == 1 and len(run.pictures_of(1)) == 3
        assert run.session.counts == {"clean": 1}
        roles = [message["role"] for message in run.trajectory().session.messages]
        assert roles == ["assistant", "tool", "user", "assistant"]


async def test_responses_have_pictures_in_input_and_in_outputs_of_calls(tmp_path) -> None:
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    call = f"<tool_call>{json.dumps({'name': 'look', 'arguments': {}})}</tool_call>"
    async with opened(tmp_path, call, "cd") as run:
        content = [
            {"type": "input_text", "text": "what?"},
            {"type": "input_image", "image_url": url_of(png_of(0)), "detail": "auto"},
        ]
        history: list[Any] = [{"role": "user", "content": content}]
        said = await run.openai.responses.create(model="m", input=history, tools=[tool])
        (use,) = said.output
        seen = [{"type": "input_image", "image_url": url_of(png_of(1)), "detail": "auto"}]
        output = {"type": "function_call_output", "call_id": use.call_id, "output": seen}
        history = [*history, use.model_dump(exclude_none=True), output]
        await run.openai.responses.create(model="m", input=history, tools=[tool])
        assert len(run.pictures_of(0)) == 1 and len(run.pictures_of(1)) == 2
        assert run.session.counts == {"clean": 1}


async def test_the_same_text_with_another_picture_is_another_history(tmp_path) -> None:
    async with opened(tmp_path, "ab", "ab", "cd") as run:
        first = user(chat_part(png_of(0)), "?")
        second = user(chat_part(png_of(1)), "?")
        said = await run.say(first)
        await run.say(second)
        await run.say(first, said, user("and?"))
        assert run.pictures_of(2) == run.pictures_of(0) != run.pictures_of(1)
        # The last one went on with the first history, and none was rendered again.
        assert run.session.counts == {"forked": 1, "clean": 1}


def with_url(url: Any) -> dict[str, Any]:
    return user({"type": "image_url", "image_url": url})


REFUSED = {
    "damaged": (with_url({"url": url_of(png_of(0)[:60])}), "cannot be"),
    "no base64": (with_url({"url": "data:image/png;base64,###"}), "base64"),
    "mislabelled": (with_url({"url": url_of(png_of(0), "image/jpeg")}), "labelled JPEG"),
    "an address": (with_url({"url": "http://127.0.0.1:1/a.png"}), "it is an address"),
    "a path": (with_url("/etc/passwd"), "it is a path"),
    "a file's id": (user({"type": "input_image", "file_id": "f"}), "no files are stored"),
    "of the assistant": (
        user("go") | {"role": "system", "content": [chat_part(png_of(0))]},
        "role is system",
    ),
    "a video": (user({"type": "video_url", "video_url": {"url": "x"}}), "of type 'video_url'"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_picture_that_cannot_be_used_is_answered_by_400_and_the_session_goes_on(tmp_path, name):
    message, problem = REFUSED[name]
    async with opened(tmp_path) as run:
        with pytest.raises(openai.BadRequestError, match=problem):
            await run.say(message, user("go"))
        assert not run.script.asked
        assert (await run.say(user(chat_part(png_of(0)), "!"))).content == "ab"
        assert run.session.end == "done" and len(run.trajectory().images) == 1


async def test_addresses_of_anthropics_sources_are_not_fetched(tmp_path) -> None:
    async with opened(tmp_path) as run:
        source = {"type": "url", "url": "https://example.com/a.png"}
        message = {"role": "user", "content": [{"type": "image", "source": source}]}
        with pytest.raises(anthropic.BadRequestError, match="it is an address"):
            await run.anthropic.messages.create(model="m", max_tokens=9, messages=[message])


async def test_more_pictures_than_a_prompt_may_have_are_a_limit_of_the_session(tmp_path) -> None:
    async with opened(tmp_path) as run:
        first = user(*(item for i in range(MAX_PICTURES) for item in (chat_part(png_of(i)), "!")))
        said = await run.say(first)
        with pytest.raises(openai.BadRequestError, match=r"5 pictures.*images.max_per_prompt"):
            await run.say(first, said, user(chat_part(png_of(9))))
        with pytest.raises(openai.NotFoundError):
            await run.say(first, said, user(chat_part(png_of(9))))
        assert run.session.end == "max_tokens" and len(run.trajectory().images) == MAX_PICTURES


@pytest.mark.parametrize("method", ["put", "read"])
async def test_a_store_that_is_away_takes_none_of_the_time_of_a_program(
    tmp_path, monkeypatch, method: str
) -> None:
    """Neither where a picture is stored, nor where one that is no longer in memory is read for the engine."""
    timeout_s = 4.0
    take_store_away(monkeypatch, method, timeout_s)
    monkeypatch.setattr("tidemill.services.rollout.sessions.pictures.CACHED_BYTES", 1)  # holds one picture
    async with opened(tmp_path, session_timeout_s=timeout_s) as run:
        assert run.session._pictures is not None
        run.session._ask = run.script.reading(run.session._pictures)

        async def play() -> Closing:
            said = await run.say(user("go"))
            await run.say(user("go"), said, user(chat_part(png_of(0)), "!", chat_part(png_of(1))))
            return Closing(1.0)

        player = AgentPlayer(run.stage.config, lambda ids: "", lambda: open_chat(run.stage.config))
        result = await player._watched(asyncio.create_task(play()), run.session)
        assert (result.reward, result.is_late, run.session.end) == (1.0, False, "done")
        assert len(run.trajectory().images) == 2


async def test_names_of_tokens_that_stand_for_pictures_are_text_in_a_session(tmp_path) -> None:
    name = "<|image_pad|>"
    async with opened(tmp_path, f"{name}x", "cd") as run:
        first = user(f"say {name}", chat_part(png_of(0)))
        said = await run.say(first)
        await run.say(first, said, user(f"you said {name}"))
        assert len(run.pictures_of(1)) == 1
        with pytest.raises(openai.BadRequestError, match="stands for a picture"):
            await run.openai.completions.create(model="m", prompt=[5, run.placeholder])


async def test_a_run_of_text_refuses_pictures_by_name(tmp_path) -> None:
    async with opened(tmp_path) as run:
        run.session._pictures = None
        with pytest.raises(openai.BadRequestError, match="reads text only"):
            await run.say(user(chat_part(png_of(0))))


async def test_a_request_is_read_up_to_the_size_of_its_pictures(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tidemill.services.rollout.gateway.server.MAX_BODY_BYTES", 4 << 20)
    async with opened(tmp_path) as run:
        # Of 600 x 500 pixels of noise: 900 kB, more than a history of text may have.
        large = user(chat_part(png_of(0, 600, 500)), chat_part(png_of(1, 600, 500)))
        assert (await run.say(user("?", *large["content"][:1], "!", *large["content"][1:]))).content == "ab"
        answer = await run.post({"messages": [user("x" * (5 << 20))]})
        assert answer.status_code == 413


async def test_rewards_get_the_pictures_of_the_row_whatever_a_helper_sees_first(
    tmp_path,
) -> None:
    """Segments are by their last answers: that of a helper, which ends before the main history, is first."""
    async with opened(tmp_path, "ab", "cd", "ef") as run:
        question = user(chat_part(png_of(0)), "what?")
        said = await run.say(question)
        await run.say(user(chat_part(png_of(1)), "a helper's question"))
        await run.say(question, said, user("and?"))
        of_row, of_helper = sorted(run.trajectory().images, key=lambda image: -image.segment)
        assert of_helper.segment == 0 and of_row.digest != of_helper.digest
        assert run.trajectory().prompt_images == (), "the row has none"
        run.row_images = (of_row,)
        assert run.trajectory().prompt_images == (of_row,)


async def test_forks_with_pictures_agree_in_engine_and_trainer(tmp_path) -> None:
    """Branches of one beginning, with other pictures behind it, or with the same, in one tree."""
    async with opened(tmp_path) as run:
        stage = run.stage

        async with stage.engine() as engine:

            class Reader:
                pictures = run.session._pictures

            run.session._ask = stage.asking(Reader(), engine, "fork")
            first = user(chat_part(png_of(0)), "what?")
            said = await run.say(first)
            later = [user(chat_part(png_of(seed)), "and this?") for seed in (1, 2)]
            for message in later:
                next_said = await run.say(first, said, message)
                await run.say(first, said, message, next_said, user(chat_part(png_of(3, 84, 56)), "?"))
            await run.say(user("alone, without any"))
        trajectory = run.trajectory()
        assert len(trajectory.segments) == 3
        assert [image.segment for image in trajectory.images] == [0, 0, 0, 1, 1, 1]
        blind = trajectory.model_copy(update={"images": ()})
        assert trajectory.tokens_digest != blind.tokens_digest
        sample = make_sample(trajectory)
        sample.set_advantage(1.0)
    policy = stage.maker.policy(torch.float32)
    parts, _ = policy._deal_groups([sample])
    (scores,) = policy._score_all(parts, policy.scorer, 1.0)
    rollout = sample.columns["rollout_logprobs"][sample.mask]
    np.testing.assert_allclose(scores["logprobs"][sample.mask], rollout, atol=1e-5, rtol=0.0)
