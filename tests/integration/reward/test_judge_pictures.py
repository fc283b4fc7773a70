"""Judges and reward models that see, in a whole reward worker: what their HTTP servers get."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PilImage

from tests.support.misbehaving import MisbehavingServer, answers, says
from tests.support.rewards import scores, worker
from tests.support.seen_samples import BLUE, GREEN, RED, Colour, png_of, seen_trajectory
from tidemill.common.images.store import IMAGES_FOLDER, ImageStore
from tidemill.common.redis.broker import Broker
from tidemill.common.streams import append
from tidemill.common.wire.images import PICTURES_FAULT
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import ScoreStatus, Trajectory

CHAT = [
    {"role": "system", "content": "Say colours."},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Is "},
            {"type": "image"},
            {"type": "text", "text": " like "},
            {"type": "image"},
            {"type": "text", "text": "?"},
        ],
    },
]


@pytest.fixture
async def broker(redis: Any) -> Any:
    broker = await Broker.connect(redis.url)
    yield broker
    await broker.close()


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    return ImageStore(tmp_path)


def picture(block: dict[str, Any]) -> tuple[Colour, bytes]:
    """The colour of a picture in a request, and its bytes."""
    assert block["type"] == "image_url"
    head, _, payload = block["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    png = base64.b64decode(payload, validate=True)
    opened = PilImage.open(io.BytesIO(png))
    assert (opened.format, opened.mode) == ("PNG", "RGB")
    pixel: Any = opened.getpixel((0, 0))
    return pixel, png


def text(block: dict[str, Any]) -> str:
    assert block.keys() == {"type", "text"} and block["type"] == "text"
    return str(block["text"])


def judged(server: MisbehavingServer, template: str, **judge: Any) -> dict[str, Any]:
    return {
        "servers": {"judge": {"model": "m", "base_urls": [server.url], "patience_s": 20.0}},
        "rewards": {"judge": {"judge": {"servers": "judge", "template": template} | judge}},
    }


async def requests_for(
    broker: Broker, keys: Keys, tmp_path: Path, server: MisbehavingServer, *samples: Trajectory, **config: Any
) -> list[dict[str, Any]]:
    """The requests that a worker sends for these samples."""
    await append(broker, keys.trajectories(), *samples)
    async with worker(broker, keys, run_dir=tmp_path, images={}, **config):
        published = await scores(broker, keys, len(samples))
    assert [score.error for score in published] == [""] * len(samples)
    return server.requests


async def test_a_judge_gets_the_pictures_of_the_prompt_in_their_places(broker, keys, tmp_path, store):
    sample = seen_trajectory(store, [RED, BLUE], extra={"prompt": CHAT}, text="No, <image> is not.")
    async with MisbehavingServer(answers("Score: 7")) as server:
        config = judged(
            server, "{{ conversation[1].content }} They said: {{ completion }}", system="{{ prompt }}"
        )
        (request,) = await requests_for(broker, keys, tmp_path, server, sample, **config)
    system, user = request["messages"]
    # No server takes pictures in the system's message.
    assert system == {"role": "system", "content": "system: Say colours.\n\nuser: Is <image> like <image>?"}
    first, red, second, blue, last = user["content"]
    assert [text(block) for block in (first, second)] == ["Is ", " like "]
    # What a completion writes is no place of a picture.
    assert text(last) == "? They said: No, <image> is not."
    assert [picture(block) for block in (red, blue)] == [(RED, png_of(RED)), (BLUE, png_of(BLUE))]


@pytest.mark.parametrize(
    ("prompt", "before", "after"),
    [
        ([{"role": "user", "content": "Look: <image> What is it?"}], "Q: Look: ", " What is it? A: #### 1"),
        ([{"role": "user", "content": "What is it?"}], "Q: ", "What is it? A: #### 1"),
        ("Look: <image> What is it?", "Q: Look: ", " What is it? A: #### 1"),
    ],
)
async def test_places_are_those_of_the_rows_forms(broker, keys, tmp_path, store, prompt, before, after):
    """verl's mark, TRL's picture without any place, and a row of text."""
    fields = {"extra": {}, "own_text": prompt} if isinstance(prompt, str) else {"extra": {"prompt": prompt}}
    sample = seen_trajectory(store, [GREEN], **fields)
    async with MisbehavingServer(answers("Score: 7")) as server:
        config = judged(server, "Q: {{ prompt }} A: {{ completion }}")
        (request,) = await requests_for(broker, keys, tmp_path, server, sample, **config)
    first, green, last = request["messages"][0]["content"]
    assert (text(first), picture(green)[0], text(last)) == (before, GREEN, after)


async def test_a_judge_whose_template_does_not_show_the_prompt_gets_text_and_nothing_is_read(
    broker, keys, tmp_path, store
):
    sample = seen_trajectory(store, [RED], text="red", ground_truth="red")
    (tmp_path / IMAGES_FOLDER / f"{sample.images[0].digest}.png").unlink()
    async with MisbehavingServer(answers("Score: 7")) as server:
        config = judged(server, "{{ completion }} = {{ ground_truth }}?")
        (request,) = await requests_for(broker, keys, tmp_path, server, sample, **config)
    assert request["messages"] == [{"role": "user", "content": "red = red?"}]


async def test_a_prompt_without_pictures_is_text_for_a_judge(broker, keys, tmp_path, store):
    sample = seen_trajectory(store, [])
    async with MisbehavingServer(answers("Score: 7")) as server:
        config = judged(server, "{{ prompt }} {{ completion }}")
        (request,) = await requests_for(broker, keys, tmp_path, server, sample, **config)
    assert request["messages"] == [{"role": "user", "content": "Which colours? #### 1"}]


async def test_a_cached_verdict_is_not_that_of_another_picture(broker, keys, tmp_path, store):
    samples = [seen_trajectory(store, [colour], ticket) for ticket, colour in enumerate((RED, GREEN, RED))]
    async with MisbehavingServer(answers("Score: 7")) as server:
        config = judged(server, "{{ prompt }} {{ completion }}")
        config["rewards"]["judge"]["cache"] = True
        requests = await requests_for(broker, keys, tmp_path, server, *samples, **config)
    colours = [picture(request["messages"][0]["content"][0])[0] for request in requests]
    assert sorted(colours) == sorted([RED, GREEN])


async def test_a_picture_that_is_gone_fails_its_sample_and_no_judge_is_asked(broker, keys, tmp_path, store):
    sample = seen_trajectory(store, [RED])
    (tmp_path / IMAGES_FOLDER / f"{sample.images[0].digest}.png").unlink()
    await append(broker, keys.trajectories(), sample)
    async with MisbehavingServer(answers("Score: 7")) as server:
        config = judged(server, "{{ prompt }} {{ completion }}")
        async with worker(broker, keys, run_dir=tmp_path, images={}, **config):
            (score,) = await scores(broker, keys, 1)
    assert server.requests == []
    assert (score.status, score.value, score.attempts) == (ScoreStatus.FAILED, None, 1)
    assert re.search(PICTURES_FAULT + ".*missing", score.error)


async def test_a_prompt_with_more_places_than_pictures_fails_its_sample(broker, keys, tmp_path, store):
    sample = seen_trajectory(store, [RED], extra={"prompt": CHAT})
    await append(broker, keys.trajectories(), sample)
    async with MisbehavingServer(answers("Score: 7")) as server:
        config = judged(server, "{{ prompt }} {{ completion }}")
        async with worker(broker, keys, run_dir=tmp_path, images={}, **config):
            (score,) = await scores(broker, keys, 1)
    assert "1 pictures and 2 places" in score.error and server.requests == []


async def test_a_reward_model_gets_the_conversation_with_its_pictures(broker, keys, tmp_path, store):
    sample = seen_trajectory(store, [RED, BLUE], extra={"prompt": CHAT}, text="no")
    async with MisbehavingServer(says(200, {"data": [{"probs": [2.5]}]})) as server:
        config = {
            "servers": {"rm": {"model": "m", "base_urls": [server.url], "patience_s": 20.0}},
            "rewards": {"rm": {"model": {"servers": "rm"}}},
        }
        (request,) = await requests_for(broker, keys, tmp_path, server, sample, **config)
    system, user, said = request["messages"]
    assert system == CHAT[0] and said == {"role": "assistant", "content": "no"}
    is_text, red, is_between, blue, is_end = user["content"]
    assert [text(block) for block in (is_text, is_between, is_end)] == ["Is ", " like ", "?"]
    assert [picture(red)[0], picture(blue)[0]] == [RED, BLUE]
