"""`tidemill serve-rewards` with pictures: its endpoint as a process, and the functions for TRL with it."""

import asyncio
import base64
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PilImage

from tests.integration.reward.test_serve_rewards import Service
from tests.support.misbehaving import MisbehavingServer, answers
from tests.support.recorded import tidemill
from tests.support.seen_samples import BLUE, GREEN, RED, SIZE, Colour, png_of
from tidemill.common.images.store import IMAGES_FOLDER
from tidemill.services.reward.adapters import reward_async

SEEING = """
def redness(prompts, completions, images, **columns):
    assert "image" not in columns
    reds = [[image.getpixel((0, 0))[0] for image in each] for each in images]
    return [sum((1 + number) * red for number, red in enumerate(each)) for each in reds]


def text(data_source, solution_str, ground_truth):
    return 5.0
"""


def data_url(colour: Colour) -> str:
    return f"data:image/png;base64,{base64.b64encode(png_of(colour)).decode()}"


def sees(folder: Path, reward: str, sections: str = "images: {max_per_prompt: 3}\n") -> Service:
    service = Service(folder, reward)
    (folder / "seeing.py").write_text(SEEING)
    with (folder / "rewards.yaml").open("a") as file:
        file.write(sections)
    return service


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("seen")
    with sees(folder, "function: 'seeing.py:redness', workers: 1, max_attempts: 1").running() as service:
        yield service


def sample(**fields: Any) -> dict[str, Any]:
    return {"completion": "red", "prompt": "Which?"} | fields


def test_samples_bring_their_pictures_and_are_scored_with_them(service: Service) -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": data_url(BLUE)}},
        {"type": "image"},
        {"type": "text", "text": "Which?"},
    ]
    tree = {
        "images": [data_url(RED), data_url(GREEN)],
        "samples": [
            sample(images=[data_url(RED)]),
            sample(images=[0]),
            sample(images=[1, 0]),
            sample(prompt=[{"role": "user", "content": parts}], images=[0]),
            sample(),
        ],
    }
    answer = service.post(tree)
    assert answer.status_code == 200, answer.text
    assert [score["value"] for score in answer.json()["scores"]] == [255.0, 255.0, 510.0, 510.0, 0.0]
    stored = service.folder / "runs" / "served" / IMAGES_FOLDER
    assert len(list(stored.glob("*.png"))) == 3, "each once"
    tail = tidemill(service.folder / "runs", "streams", "tail", "trajectories", "--run", "served", "--json")
    assert "base64" not in tail.stdout and '"images"' in tail.stdout, "no pixels go through Redis"


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        (["data:image/png;base64,AAAA"], "none of PNG"),
        (["data:image/jpeg;base64," + base64.b64encode(png_of(RED)).decode()], "labelled JPEG"),
        (["data:image/png,red"], "not in base64"),
        (["/etc/hostname"], "send the picture itself"),
        (["http://127.0.0.1:1/red.png"], "send the picture itself"),
        ([data_url(RED)] * 4, "max_per_prompt"),
    ],
)
def test_a_picture_that_is_refused_fails_its_sample_and_no_other(
    service: Service, images: list[str], reason: str
) -> None:
    failed, scored = service.scores(sample(images=images), sample(images=[data_url(RED)]))
    assert (failed["status"], failed["value"]) == ("failed", None)
    assert failed["error"].startswith("its pictures: ") and reason in failed["error"]
    assert scored["value"] == 255.0


def test_a_picture_that_a_request_does_not_have_is_refused(service: Service) -> None:
    answer = service.post({"samples": [sample(images=[2])], "images": [data_url(RED)]})
    assert answer.status_code == 400
    assert "samples[0].images names picture 2, and the request has 1 images" in answer.text


def test_pictures_in_a_service_without_the_section_are_refused_by_name(tmp_path: Path) -> None:
    with sees(tmp_path, "function: 'seeing.py:text', max_attempts: 1", "").running() as service:
        answer = service.post({"samples": [sample(images=[data_url(RED)])]})
        assert answer.status_code == 400 and "add `images: {}`" in answer.text
        assert service.scores(sample())[0]["value"] == 5.0


def test_trls_columns_and_messages_are_sent_with_their_pictures(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIDEMILL_REWARDS_URL", service.url)
    red = PilImage.new("RGB", SIZE, RED)
    orange = PilImage.new("RGBA", SIZE, (100, 50, 0, 255))
    question = [{"role": "user", "content": "Which?"}]
    asked = [
        {"role": "user", "content": [{"type": "image", "image": red}, {"type": "text", "text": "Which?"}]}
    ]
    answer = [{"role": "assistant", "content": "red"}]
    stored = {"bytes": png_of(RED), "path": None}
    by_images = reward_async([question, question], [answer, answer], images=[[red], [orange, red.copy()]])
    assert asyncio.run(by_images) == [255.0, 100.0 + 2 * 255.0]
    assert asyncio.run(reward_async(["Which?"], ["red"], image=[stored])) == [255.0]
    # TRL has put the column's picture into the message.
    assert asyncio.run(reward_async([asked], [answer], image=[red])) == [255.0]


def test_a_judge_that_sees_gets_them_in_their_places(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Is "}, {"type": "image"}, {"type": "text", "text": " red?"}]

    async def served() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        async with MisbehavingServer(answers("Score: 7")) as server:
            judge = "{servers: eye, template: '{{ prompt }} {{ completion }}'}"
            reward = f"max_attempts: 1, rewards: {{eye: {{judge: {judge}}}}}"
            sections = f"images: {{}}\nservers: {{eye: {{model: m, base_urls: ['{server.url}']}}}}\n"
            tree = sample(prompt=[{"role": "user", "content": parts}], images=[data_url(RED)])

            def score() -> list[dict[str, Any]]:
                with sees(tmp_path, reward, sections).running() as service:
                    return service.scores(tree)

            return await asyncio.to_thread(score), server.requests

    (score,), (request,) = asyncio.run(served())
    assert score["value"] == 7.0, score
    is_text, picture, question = request["messages"][0]["content"]
    assert (is_text["text"], question["text"]) == ("Is ", " red? red")
    sent = base64.b64decode(picture["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert PilImage.open(io.BytesIO(sent)).getpixel((0, 0)) == RED


def test_where_the_disk_takes_no_picture_the_request_is_to_be_sent_again(service: Service) -> None:
    folder = service.folder / "runs" / "served" / IMAGES_FOLDER
    service.scores(sample(images=[data_url(RED)]))
    away = folder.with_name("away")
    os.rename(folder, away)
    try:
        answer = service.post({"samples": [sample(images=[data_url((9, 9, 9))])]})
        assert answer.status_code == 503 and "cannot be stored now" in answer.text
        assert answer.headers["retry-after"]
    finally:
        os.rename(away, folder)
    assert service.scores(sample(images=[data_url((9, 9, 9))]))[0]["value"] == 9.0
