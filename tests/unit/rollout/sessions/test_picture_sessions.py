"""Sessions whose environments show pictures: tokens of each turn, what the engine sees, what is trained."""

import asyncio
import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PilImage

from examples.small_vision_models import SMALL_FAMILIES
from tests.support.models import one_batch, train
from tests.support.picture_environments import THIS, picture
from tests.support.picture_sessions import Script, Stage, take_store_away, trajectory_of
from tests.support.vision import png_of
from tidemill.common.errors import BrokenImageError, EnvironmentFaultError
from tidemill.common.images import store as store_module
from tidemill.common.images.pictures import make_picture
from tidemill.common.images.processor import PictureProcessor
from tidemill.common.images.store import IMAGES_FOLDER
from tidemill.common.wire import codec
from tidemill.common.wire.messages import Ticket, Trajectory
from tidemill.services.rollout.environments import build_player, load, player
from tidemill.services.rollout.environments.stages import LocalStage
from tidemill.services.rollout.environments.users_code import result_of
from tidemill.services.rollout.sessions.parts import Part, Recording, read_play
from tidemill.services.rollout.sessions.pictures import SessionPictures
from tidemill.services.rollout.sessions.player import Played
from tidemill.services.rollout.sessions.template_chat import open_chat
from tidemill.services.trainer.groups.pictures import PictureCheck
from tidemill.services.trainer.groups.sample import make_sample

TOLERANCE = 1e-5


@pytest.fixture
def on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments without a process of their own, which takes a second to start."""

    def build(config: Any) -> LocalStage:
        return LocalStage(load(config), config.call_timeout_s)

    monkeypatch.setattr(player, "build_stage", build)


@pytest.mark.parametrize("family", SMALL_FAMILIES)
async def test_engine_and_trainer_agree_on_pictures_of_the_prompt_and_of_later_turns(
    tmp_path: Path, family: str
) -> None:
    stage = Stage(tmp_path, family, use=f"{THIS}:Gallery", processes=1)
    tickets = [
        *[stage.ticket([png_of(0), png_of(1, 40, 100)])] * 3,
        stage.ticket([], truth="2", ticket=2),
        stage.ticket([png_of(5)], truth="1", ticket=3),
    ]
    async with stage.engine() as engine, stage.player() as player:
        played = await asyncio.gather(
            *(
                player.play(ticket, f"s{i}", stage.asking(player, engine, f"s{i}"))
                for i, ticket in enumerate(tickets)
            )
        )
    samples = []
    check = PictureCheck(stage.maker.store, stage.maker.processor)
    for index, (ticket, of_ticket) in enumerate(zip(tickets, played, strict=True)):
        trajectory = trajectory_of(ticket, of_ticket, index % 4)
        assert codec.decode(codec.encode(trajectory), Trajectory) == trajectory
        assert check.fault_of(trajectory) == ""
        assert len(trajectory.session.turns) == 3
        assert len(trajectory.images) == len(ticket.images) + 2
        assert trajectory.images[: len(ticket.images)] == ticket.images
        sample = make_sample(trajectory)
        sample.set_advantage(1.0 if index % 2 else -0.5)
        samples.append(sample)
        # What the environment has shown stands for pixels, and is not trained.
        ids = sample.rows[0]
        for image in trajectory.images[len(ticket.images) :]:
            assert (ids[image.first : image.end] == stage.maker.processor.placeholder_id).all()
            first = image.first - len(sample.prompt_ids)
            assert first > 0 and not sample.mask[first : first + image.num_tokens].any()
    policy = stage.maker.policy(torch.float32)
    parts, _ = policy._deal_groups(samples)
    scored = policy._score_all(parts, policy.scorer, 1.0)
    model = stage.maker.plain_model(torch.float32)
    for sample, scores in zip(samples, scored, strict=True):
        rollout = sample.columns["rollout_logprobs"][sample.mask]
        np.testing.assert_allclose(scores["logprobs"][sample.mask], rollout, atol=TOLERANCE, rtol=0.0)
        with torch.no_grad():
            plain = stage.maker.plain_logprobs(model, sample).numpy()
        np.testing.assert_allclose(plain[sample.mask], rollout, atol=TOLERANCE, rtol=0.0)
    train(policy, [one_batch(samples)])


class Kept:
    """What Redis would hold of sample 0, over several lives of workers."""

    def __init__(self, stage: Stage, ticket: Ticket) -> None:
        self.stage = stage
        self.ticket = ticket
        self.fields: dict[bytes, bytes] = {}

    async def keep(self, name: bytes, number: int, recorded: Part) -> bool:
        self.fields[b"0:%d" % number] = name + codec.encode_payload(recorded)
        return True

    async def play(self, *lines: str) -> tuple[Played, Script]:
        script = Script(self.stage.tokenizer, *lines)
        ticket = self.ticket
        play = read_play(self.fields, 0, ticket.prompt_ids, pytest.fail, ticket.images)
        async with self.stage.player() as playing:
            ask = script.reading(playing.pictures)
            return await playing.play(ticket, "s", Recording(ask, play, self.keep)), script


async def play(stage: Stage, ticket: Ticket, *lines: str) -> tuple[Played, Script]:
    return await Kept(stage, ticket).play(*lines)


@pytest.mark.usefixtures("on_the_loop")
@pytest.mark.parametrize("use", ["Gallery", "Repeated"])
async def test_another_worker_goes_on_with_the_pictures_of_all_turns(tmp_path: Path, use: str) -> None:
    stage = Stage(tmp_path, use=f"{THIS}:{use}")
    ticket = stage.ticket([png_of(0)])
    kept = Kept(stage, ticket)
    with pytest.raises(IndexError):  # the script has no third line
        await kept.play("a", "b")
    assert len(kept.fields) == 4
    assert not any(b"PNG" in raw or b"IHDR" in raw for raw in kept.fields.values()), "no pixels in Redis"
    went_on, script = await kept.play("c")
    whole, undisturbed = await play(stage, ticket, "a", "b", "c")
    assert went_on.first.completion_ids.tolist() == whole.first.completion_ids.tolist()
    assert went_on.images == whole.images and len(whole.images) == 3
    assert script.asked == undisturbed.asked[2:]
    assert went_on.session.messages == whole.session.messages


@pytest.mark.usefixtures("on_the_loop")
async def test_a_picture_that_is_gone_at_a_takeover_fails_the_sample(tmp_path: Path) -> None:
    stage = Stage(tmp_path, use=f"{THIS}:Gallery")
    ticket = stage.ticket([])
    kept = Kept(stage, ticket)
    with pytest.raises(IndexError):
        await kept.play("a", "b")
    for path in (tmp_path / IMAGES_FOLDER).iterdir():
        path.unlink()
    play = read_play(kept.fields, 0, ticket.prompt_ids, pytest.fail)
    async with stage.engine() as engine, stage.player() as playing:
        ask = stage.asking(playing, engine, "s")
        with pytest.raises(BrokenImageError, match="is missing"):
            await playing.play(ticket, "s", Recording(ask, play, kept.keep))


@pytest.mark.usefixtures("on_the_loop")
async def test_tools_return_pictures_and_the_rows_own_are_in_a_prompt_that_is_rendered_again(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path, use=f"{THIS}:Camera", call_format="hermes")
    ticket = stage.ticket([png_of(0), png_of(1)])
    calls = [
        f"<tool_call>{json.dumps({'name': 'look', 'arguments': {'where': where}})}</tool_call>"
        for where in ("up", "nowhere")
    ]
    played, script = await play(stage, ticket, *calls, "done")
    assert [image.digest for image in played.images[:2]] == [image.digest for image in ticket.images]
    text = stage.tokenizer.decode(played.first.prompt_ids)
    assert "what is it? Look twice." in text and text.count("<|vision_start|>") == 2
    (_, first), (_, second), (ids, third) = script.asked
    assert (len(first), len(second), third) == (2, 3, second)
    answer = stage.tokenizer.decode(ids[second[2].first - 4 : second[2].end + 1])
    assert answer.startswith("up:<|vision_start|>") and answer.endswith("<|vision_end|>")
    said = [message["content"] for message in played.session.messages if message["role"] == "tool"]
    assert said[0][1]["digest"] == second[2].digest and said[1] == "error: there is nothing"
    assert played.session.turns[1].num_wrong_calls == 1


@pytest.mark.usefixtures("on_the_loop")
async def test_a_chat_of_the_environments_takes_the_rows_pictures_and_adds_others(tmp_path: Path) -> None:
    stage = Stage(tmp_path, use=f"{THIS}:OwnChat", options={"rounds": 0})
    ticket = stage.ticket([png_of(0)])
    played, _ = await play(stage, ticket, "a")
    assert [image.digest == ticket.images[0].digest for image in played.images] == [True, False]
    assert played.images[1].end <= len(played.first.prompt_ids)
    with pytest.raises(EnvironmentFaultError, match="those of the row are used up"):
        await play(stage, stage.ticket([]), "a")


async def test_a_process_of_an_environment_sends_pictures_and_a_ticket_without_any_begins(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path, use=f"{THIS}:Gallery", options={"rounds": 1})
    played, script = await play(stage, stage.ticket([]), "a", "b")
    assert [len(images) for _, images in script.asked] == [0, 1]
    assert stage.maker.store.read(played.images[0])


@pytest.mark.usefixtures("on_the_loop")
@pytest.mark.parametrize("method", ["put", "read"])
async def test_a_store_that_is_away_takes_none_of_the_time_of_a_session(
    tmp_path: Path, monkeypatch, method: str
) -> None:
    """Neither where a worker stores a picture, nor where another one goes on and reads it."""
    timeout_s = 3.0
    stage = Stage(tmp_path, use=f"{THIS}:Gallery", options={"rounds": 1}, session_timeout_s=timeout_s)
    kept = Kept(stage, stage.ticket([]))
    take_store_away(monkeypatch, method, timeout_s)
    with pytest.raises(IndexError):  # the script has no second line
        await kept.play("a")
    went_on, _ = await kept.play("b")
    assert went_on.session is not None
    assert (went_on.session.end, went_on.session.late, len(went_on.images)) == ("done", "", 1)


@pytest.mark.usefixtures("on_the_loop")
async def test_the_processor_never_runs_on_the_event_loop(tmp_path: Path, monkeypatch) -> None:
    """Not for pictures of a row, which the trainer has taken in, nor for those of another worker."""
    stage = Stage(tmp_path, use=f"{THIS}:Camera", call_format="hermes")
    ticket = stage.ticket([png_of(0)])
    is_on_loop: list[bool] = []
    process = PictureProcessor._process

    def process_noted(processor: PictureProcessor, pictures: Any) -> Any:
        is_on_loop.append(threading.current_thread() is threading.main_thread())
        return process(processor, pictures)

    monkeypatch.setattr(PictureProcessor, "_process", process_noted)
    await play(stage, ticket, "done")
    assert is_on_loop == [False]
    gallery = Stage(tmp_path, use=f"{THIS}:Gallery", options={"rounds": 1})
    kept = Kept(gallery, gallery.ticket([]))
    with pytest.raises(IndexError):
        await kept.play("a")
    await kept.play("b")
    assert is_on_loop == [False] * 3


async def test_a_folder_of_pictures_that_is_not_there_just_now_is_waited_for(
    tmp_path: Path, monkeypatch
) -> None:
    pictures = SessionPictures.of_run(Stage(tmp_path).config, tmp_path)
    assert pictures is not None
    await pictures.take(png_of(0))
    (tmp_path / IMAGES_FOLDER).rename(tmp_path / "unmounted")

    class Log:
        def warning(self, *_: Any, **__: Any) -> None:
            (tmp_path / "unmounted").rename(tmp_path / IMAGES_FOLDER)

    monkeypatch.setattr(store_module, "log", Log())
    reference = await pictures.take(png_of(1))
    assert (tmp_path / IMAGES_FOLDER / f"{reference['digest']}.png").is_file()


BROKEN: dict[str, tuple[Any, str]] = {
    "damaged": ([{"type": "image", "bytes": png_of(0)[:50]}], "cannot be decoded"),
    "none": ([{"type": "image", "image": [[0.5]]}], "expected a PIL picture"),
    "a path": ([{"type": "image", "image": "a.png"}], "it is a path"),
    "an address": ([{"type": "image_url", "image_url": {"url": "http://x/a.png"}}], "it is an address"),
    "narrow": ([{"type": "image", "bytes": png_of(0, 1000, 2)}], "one side is more than"),
    "no picture": ([{"type": "text", "text": "a"}, {"type": "image"}], "a part of type image has no picture"),
}


@pytest.mark.usefixtures("on_the_loop")
@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_picture_of_an_environment_is_its_fault(tmp_path: Path, name: str) -> None:
    content, problem = BROKEN[name]
    stage = Stage(tmp_path, use=f"{THIS}:Gallery", options={"content": content})
    with pytest.raises(EnvironmentFaultError, match=problem):
        await play(stage, stage.ticket([]), "a")


@pytest.mark.usefixtures("on_the_loop")
async def test_pictures_that_would_count_as_one_are_the_environments_fault(tmp_path: Path) -> None:
    content = [{"type": "image", "bytes": png_of(0)}, {"type": "image", "bytes": png_of(1)}]
    stage = Stage(tmp_path, use=f"{THIS}:Gallery", options={"content": content})
    # Such as that of LLaVA, which writes nothing around a picture.
    template = stage.tokenizer.chat_template
    for mark in ("<|vision_start|>", "<|vision_end|>"):
        assert mark in template
        template = template.replace(mark, "")
    stage.tokenizer.chat_template = template
    stage.tokenizer.save_pretrained(stage.folder)
    with pytest.raises(EnvironmentFaultError, match="no text between them"):
        await play(stage, stage.ticket([]), "a")


@pytest.mark.usefixtures("on_the_loop")
async def test_a_session_that_shows_more_pictures_than_a_prompt_may_have_is_truncated(tmp_path: Path) -> None:
    stage = Stage(tmp_path, use=f"{THIS}:Gallery", options={"rounds": 9}, images={"max_per_prompt": 3})
    played, script = await play(stage, stage.ticket([png_of(0)]), "a", "b", "c", "d")
    assert [len(images) for _, images in script.asked] == [1, 2, 3]
    assert (played.session.end, len(played.images)) == ("max_tokens", 3)


@pytest.mark.usefixtures("on_the_loop")
async def test_names_of_tokens_that_stand_for_pictures_are_text_where_an_environment_says_them(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path, use=f"{THIS}:Gallery", options={"content": "you said <|image_pad|>", "rounds": 1})
    played, script = await play(stage, stage.ticket([png_of(0)]), "a", "b")
    ids, images = script.asked[1]
    assert ids.count(stage.maker.processor.placeholder_id) == sum(image.num_tokens for image in images)
    assert "< |image_pad|>" in stage.tokenizer.decode(played.first.completion_ids)


@pytest.mark.usefixtures("on_the_loop")
async def test_a_run_of_text_refuses_an_environments_pictures_by_name(tmp_path: Path) -> None:
    stage = Stage(tmp_path, use=f"{THIS}:Gallery")
    config = stage.config.model_copy(update={"images": None})
    playing = build_player(config, lambda ids: "", open_chat=lambda: open_chat(config), run_dir=tmp_path)
    await playing.start()
    with pytest.raises(EnvironmentFaultError, match="no section `images`"):
        await playing.play(stage.ticket([]), "s", Script(stage.tokenizer, "a"))
    await playing.close()


def test_records_of_a_tool_that_name_a_type_are_no_pictures() -> None:
    records = [
        {"type": "image", "url": "http://x/a.png", "title": "a"},
        {"type": "text", "text": "b", "at": 1},
    ]
    assert result_of(records, "search") == json.dumps(records)
    assert result_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "search") == "ab"


@pytest.mark.parametrize(("mode", "is_taken"), [("CMYK", True), ("RGBa", True), ("P", True), ("F", False)])
def test_pictures_of_pil_become_files_of_their_modes(mode: str, is_taken: bool) -> None:
    seen = picture(0).convert("RGBA").convert(mode) if mode != "F" else picture(0).convert("F")
    if not is_taken:
        with pytest.raises(EnvironmentFaultError, match="more than 8 bits"):
            result_of(seen, "look")
        return
    (block,) = result_of(seen, "look")
    stored = make_picture(block["picture"], 1 << 20, "PNG")
    assert (stored.width, stored.height) == (56, 56)


def test_a_picture_of_pil_is_turned_by_its_tag() -> None:
    file = io.BytesIO()
    tags = PilImage.Exif()
    tags[0x0112] = 6  # a quarter to the right
    picture(0, 84, 56).save(file, "JPEG", exif=tags)
    (block,) = result_of(PilImage.open(file), "look")
    stored = make_picture(block["picture"], 1 << 20)
    assert (stored.width, stored.height) == (56, 84)


def test_what_does_not_work_with_pictures_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="OpenEnv's servers are read as text"):
        Stage(tmp_path, use="openenv:http://localhost:1")
