"""Tickets with pictures between real streams, a real store, and an engine that the test controls."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.rollout.test_rollout_parts import LONG, left_by, tokens_of
from tests.support.numbered import append_numbered
from tests.support.picture_environments import THIS
from tests.support.picture_samples import TEXT_IDS
from tests.support.picture_sessions import Stage
from tests.support.pictures import noise_png
from tests.support.rollout_worker import SIZE, is_settled, samples_of, take_over
from tests.support.training import trainer_config
from tests.support.vision import image_of, png_of
from tests.support.waiting import wait_until
from tidemill.common.errors import BrokenImageError, ConfigError, RefusedError
from tidemill.common.images.store import IMAGES_FOLDER, ImageStore
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.images import PICTURES_FAULT, Image
from tidemill.common.wire.keys import Keys
from tidemill.common.wire.messages import SamplingParams, Ticket
from tidemill.services.rollout.engines.engine import Generation, GenerationRequest
from tidemill.services.rollout.sessions.parts import new_play

IDS = np.array([5, 9, 9, 6, 9, 7], dtype=np.int32)
FILES = (noise_png(0), noise_png(1))
SEES = {"images__max_per_prompt": 4}


def ticket_of(files: tuple[bytes, ...] = FILES, ticket: int = 0) -> Ticket:
    return Ticket(
        ticket=ticket,
        step=0,
        min_version=0,
        group_size=SIZE,
        prompt_ids=IDS,
        sampling=SamplingParams(max_tokens=12),
        images=(image_of(files[0], 1, 2), image_of(files[1], 4, 1)),
    )


async def issue(broker: Broker, keys: Keys, ticket: Ticket) -> None:
    await append_numbered(broker, keys.prompts(), [(ticket.ticket, ticket)])


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    store = ImageStore(tmp_path)
    for png in FILES:
        store.put(png)
    return store


def note_requests(worker: Any) -> list[GenerationRequest]:
    """The requests that its engine gets from now on."""
    requests = []
    generate = worker.engine.generate

    async def note(request: GenerationRequest) -> Generation:
        requests.append(request)
        return await generate(request)

    worker.engine.generate = note
    return requests


async def test_the_pictures_of_a_ticket_reach_the_engine_and_its_trajectories(make, broker, keys, store):
    ticket = ticket_of()
    await issue(broker, keys, ticket)
    async with make(**SEES) as worker:
        requests = note_requests(worker)
        await worker.lane.generate(await worker.fetch())
    assert len(requests) == SIZE
    for request in requests:
        assert [picture.png for picture in request.pictures] == [*FILES]
        assert tuple(picture.image for picture in request.pictures) == ticket.images
    samples = await samples_of(broker, keys)
    assert [sample.images for sample in samples] == [ticket.images] * SIZE
    assert not any(sample.fault for sample in samples)
    assert await is_settled(broker, keys)


@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x")]
)
async def test_a_missing_or_damaged_picture_fails_its_samples_with_a_reason_and_no_others(
    make, broker, keys, store, tmp_path, damage
):
    good = ticket_of(FILES[::-1], ticket=1).model_copy(update={"images": (image_of(FILES[1], 1, 2),)})
    await issue(broker, keys, ticket_of())
    await issue(broker, keys, good)
    damage(tmp_path / IMAGES_FOLDER / f"{ticket_of().images[0].digest}.png")
    async with make(**SEES) as worker:
        for _ in range(2):
            await worker.lane.generate(await worker.fetch())
        assert not worker.context.stopping.is_set()
    failed = await samples_of(broker, keys, 0)
    assert len(failed) == SIZE
    for sample in failed:
        assert sample.fault.startswith(PICTURES_FAULT) and ticket_of().images[0].digest in sample.fault
        assert not len(sample.completion_ids) and sample.images == ticket_of().images
    assert [sample.fault for sample in await samples_of(broker, keys, 1)] == [""] * SIZE
    assert await is_settled(broker, keys, 0) and await is_settled(broker, keys, 1)


async def test_a_picture_that_the_engine_cannot_use_fails_its_sample_alone(make, broker, keys, store):
    await issue(broker, keys, ticket_of())
    async with make(**SEES) as worker:
        generate = worker.engine.generate

        async def refuse_one(request: GenerationRequest) -> Generation:
            if request.request_id.startswith("train-0-2"):
                raise BrokenImageError("it has 3 tokens in the prompt, and the processor makes 4")
            return await generate(request)

        worker.engine.generate = refuse_one
        await worker.lane.generate(await worker.fetch())
    faults = {sample.index: sample.fault for sample in await samples_of(broker, keys)}
    assert sorted(faults) == [0, 1, 2, 3] and [index for index in faults if faults[index]] == [2]
    assert "the processor makes 4" in faults[2]


async def test_a_store_that_is_away_is_waited_for(make, broker, keys, store, tmp_path, capfd):
    (tmp_path / IMAGES_FOLDER).rename(tmp_path / "away")
    await issue(broker, keys, ticket_of())
    async with make(**SEES) as worker:
        task = asyncio.ensure_future(worker.lane.generate(await worker.fetch()))
        await wait_until(lambda: "waiting for the store of pictures" in capfd.readouterr().out)
        assert not await samples_of(broker, keys)
        (tmp_path / "away").rename(tmp_path / IMAGES_FOLDER)
        await task
    assert [sample.fault for sample in await samples_of(broker, keys)] == [""] * SIZE


async def test_a_store_that_refuses_the_keys_ends_the_worker_and_keeps_the_ticket(
    make, broker, keys, store, monkeypatch
):
    def refuse(store: ImageStore, image: Image) -> bytes:
        raise RefusedError("it refuses this process's keys")

    monkeypatch.setattr(ImageStore, "read", refuse)
    monkeypatch.setattr("tidemill.common.store.claims.REFUSED_S", 0.0)
    await issue(broker, keys, ticket_of())
    async with make(**SEES) as worker:
        delivery = await worker.fetch()
        await worker.lane._work(delivery)
        assert worker.context.stopping.is_set()
        with pytest.raises(ConfigError, match="refuses this process's keys"):
            worker.context.raise_failure()
    assert not await samples_of(broker, keys) and not await is_settled(broker, keys)


async def test_a_single_turn_is_continued_with_its_pictures_after_a_takeover(
    make, broker, keys, store, monkeypatch
):
    monkeypatch.setattr("tidemill.services.rollout.engines.simulated.PART_TOKENS", 2)
    await issue(broker, keys, ticket_of())
    async with make("w1", **SEES, **LONG) as first, make("w2", **SEES, **LONG) as second:
        delivery, parts = await left_by(first, broker, keys)
        assert [len(tokens_of(play)) for play in parts] == [4] * SIZE
        requests = note_requests(second)
        await second.lane.generate(await take_over(broker, keys, delivery, second))
    for request in requests:
        assert [picture.png for picture in request.pictures] == [*FILES]
        assert request.prompt_ids[: len(IDS)] == IDS.tolist() and len(request.prompt_ids) == len(IDS) + 4
    samples = {sample.index: sample for sample in await samples_of(broker, keys)}
    for index, play in enumerate(parts):
        assert samples[index].completion_ids[:4].tolist() == tokens_of(play)
        assert samples[index].images == ticket_of().images


def test_a_play_of_other_pictures_with_the_same_ids_is_not_continued():
    ticket = ticket_of()
    names = {new_play(IDS, images).name[:8] for images in ((), ticket.images, ticket.images[::-1])}
    assert len(names) == 3


async def test_a_ticket_with_pictures_in_a_run_of_text_is_dead_lettered_with_the_reason(
    make, broker, keys, store
):
    await issue(broker, keys, ticket_of())
    async with make() as worker:
        with pytest.raises(ValueError, match="no section `images`"):
            await worker.lane.generate(await worker.fetch())


def session_settings(stage: Stage) -> dict[str, Any]:
    """Of a worker that plays sessions in which pictures are shown, with an engine that draws random ids."""
    return SEES | {
        "model__path": str(stage.folder),
        "model__max_model_len": 400,
        "data__train": "train.jsonl",
        "data__max_prompt_tokens": 128,
        "images__max_pixels": stage.config.images.max_pixels,
        "rollout__engine": "transformers",
        "rollout__simulated": {"tokens": 4, "vocab_size": TEXT_IDS},
        "rollout__environment": {"use": f"{THIS}:Gallery", "attempts": 1, "processes": 1},
        "rollout__sampling": {"max_tokens": 12},
    }


async def test_a_session_is_taken_over_with_the_pictures_that_it_has_shown(make, broker, keys, tmp_path):
    stage = Stage(tmp_path, use=f"{THIS}:Gallery")
    settings = session_settings(stage)
    ticket = stage.ticket([png_of(0)], ticket=0, group_size=SIZE)
    await issue(broker, keys, ticket.model_copy(update={"sampling": SamplingParams(max_tokens=12)}))
    async with make("w1", **settings) as first, make("w2", **settings) as second:
        await first.player.start()
        delivery, plays = await left_by(first, broker, keys)
        assert {len(play.parts) for play in plays} == {2}
        raw = await broker.execute("HGETALL", keys.parts(keys.progress(0)))
        assert not any(b"IHDR" in value for value in raw[1::2]), "no pixels in Redis"
        await first.player.close()
        requests = note_requests(second)
        await second.player.start()
        await second.lane.generate(await take_over(broker, keys, delivery, second))
        await second.player.close()
    samples = {sample.index: sample for sample in await samples_of(broker, keys)}
    assert await is_settled(broker, keys) and sorted(samples) == list(range(SIZE))
    store = ImageStore(tmp_path)
    for index, play in enumerate(plays):
        sample = samples[index]
        assert not sample.fault and len(sample.session.turns) == 3
        assert sample.completion_ids[:4].tolist() == tokens_of(play)[:4]
        assert sample.images[0] == ticket.images[0] and len(sample.images) == 3
        seen = [request for request in requests if request.request_id.startswith(f"train-0-{index}-")]
        # The first turn is not asked again.
        assert [len(request.pictures) for request in seen] == [2, 3]
        assert [picture.image.digest for picture in seen[-1].pictures] == [i.digest for i in sample.images]
        for picture in seen[-1].pictures:
            assert store.read(picture.image) == picture.png


async def test_a_session_whose_picture_is_gone_is_published_as_failed(make, broker, keys, tmp_path):
    stage = Stage(tmp_path, use=f"{THIS}:Gallery")
    settings = session_settings(stage)
    ticket = stage.ticket([], ticket=0, group_size=SIZE)
    await issue(broker, keys, ticket.model_copy(update={"sampling": SamplingParams(max_tokens=12)}))
    async with make("w1", **settings) as first, make("w2", **settings) as second:
        await first.player.start()
        delivery, _ = await left_by(first, broker, keys)
        await first.player.close()
        for path in (tmp_path / IMAGES_FOLDER).iterdir():
            path.unlink()
        await second.player.start()
        await second.lane.generate(await take_over(broker, keys, delivery, second))
        await second.player.close()
    samples = await samples_of(broker, keys)
    assert len(samples) == SIZE
    assert all(sample.fault.startswith(PICTURES_FAULT) for sample in samples)
    assert await is_settled(broker, keys)


def test_sessions_with_pictures_need_the_models_processor():
    with pytest.raises(ConfigError, match="loads no model"):
        trainer_config(
            **SEES, rollout__engine="simulated", rollout__environment={"use": "agent", "agent": "x:y"}
        )
