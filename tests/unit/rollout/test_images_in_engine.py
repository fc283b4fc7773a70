"""Prompts with pictures in the transformers engine: every number is that of a plain pass of transformers."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.small_vision_models import SMALL_FAMILIES, make_vision_model
from tests.support.models import run_config, tiny_model
from tests.support.pictures import Seeing, mixed_requests, noise_png, write_versions
from tidemill.common.errors import BrokenImageError, ConfigError
from tidemill.services.rollout.engines.engine import Generation, GenerationRequest
from tidemill.services.rollout.engines.transformers import TransformersEngine

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=SMALL_FAMILIES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    folder = make_vision_model(tmp_path_factory.mktemp("model"), request.param)
    return Seeing.of(folder, request.param)


def make_engine(folder: Path, **rollout: Any) -> TransformersEngine:
    rollout = {"engine": "transformers", "num_threads": 1, **rollout}
    return TransformersEngine(run_config(folder, model={"max_model_len": 256}, rollout=rollout, images={}))


@pytest.fixture
async def engine(seeing: Seeing) -> AsyncIterator[TransformersEngine]:
    engine = make_engine(seeing.folder)
    await engine.start()
    yield engine
    await engine.close()


async def generate_all(engine: TransformersEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    return await asyncio.gather(*(engine.generate(request) for request in requests))


async def test_logprobs_of_one_several_and_no_pictures_in_one_batch_are_those_of_plain_passes(seeing, engine):
    requests = mixed_requests(seeing)
    results = await generate_all(engine, requests)
    model = seeing.model()
    for request, result in zip(requests, results, strict=True):
        expected = seeing.expected(model, request, result)
        assert result.logprobs == pytest.approx(expected, abs=TOLERANCE), request.request_id
    assert len({tuple(result.token_ids) for result in results[:4]}) > 1, "the samples of a group differ"
    # The reference itself depends on the picture: with another one the same tokens have other logprobs.
    swapped = replace(requests[0], pictures=requests[6].pictures)
    assert seeing.expected(model, swapped, results[0]) != pytest.approx(results[0].logprobs, abs=0.01)


async def test_a_prompt_with_pictures_is_prefilled_and_processed_once_for_its_group(
    seeing, engine, monkeypatch
):
    processor = engine._images.processor
    num_processed = []
    pixels = processor.pixels

    def count(files: Sequence[bytes]) -> dict[str, Any]:
        num_processed.append(len(files))
        return pixels(files)

    monkeypatch.setattr(processor, "num_tokens", lambda files: seeing.processor.num_tokens(files))
    monkeypatch.setattr(processor, "pixels", count)
    rows = []
    engine._model.get_input_embeddings().register_forward_hook(
        lambda _, inputs, output: rows.append(tuple(inputs[0].shape))
    )
    files = [noise_png(1), noise_png(2)]
    requests = [seeing.request(f"r{i}", "* or *?", files, max_tokens=2) for i in range(6)]
    await generate_all(engine, requests)
    assert num_processed == [1, 1]
    assert rows[0] == (1, len(requests[0].prompt_ids))


async def test_ids_that_stand_for_pixels_are_never_sampled(seeing, engine):
    banned = seeing.processor.banned_ids
    with torch.no_grad():
        # So that they would be drawn at each token.
        head = engine._model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.clone(), requires_grad=False)
        head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)), requires_grad=False)
        head.bias[list(banned)] = 100.0
    requests = [
        seeing.request("picture", "what is *?", [noise_png(0)], max_tokens=32),
        seeing.request("text", "what is it?", max_tokens=32),
        seeing.request("greedy", "what is it?", max_tokens=8, temperature=0.0),
        seeing.request("filtered", "what is it?", max_tokens=8, top_k=2),
    ]
    for result in await generate_all(engine, requests):
        assert not set(result.token_ids) & set(banned)
        # Of the distribution without them: in the whole one each would be around -100.
        assert min(result.logprobs) > -50.0


async def test_a_continued_completion_reads_the_pictures_of_its_prompt(seeing, engine):
    first = seeing.request("first", "what is *?", [noise_png(3)], max_tokens=6)
    begun = await engine.generate(first)
    later = replace(first, request_id="later", prompt_ids=[*first.prompt_ids, *begun.token_ids])
    result = await engine.generate(later)
    assert result.logprobs == pytest.approx(seeing.expected(seeing.model(), later, result), abs=TOLERANCE)


async def test_a_prompt_whose_tokens_do_not_fit_its_pictures_fails_alone(seeing, engine):
    good = seeing.request("good", "what is *?", [noise_png(0)])
    placeholder = seeing.processor.placeholder_id
    shifted = good.pictures[0].image.model_copy(update={"first": 0})
    fewer = good.pictures[0].image.model_copy(update={"num_tokens": 3})
    second = seeing.request("other", "what is *?", [noise_png(1)]).pictures[0]
    bad = {
        "placeholders": replace(good, prompt_ids=[*good.prompt_ids, placeholder]),
        "without": replace(good, pictures=()),
        "shifted": replace(good, pictures=(replace(good.pictures[0], image=shifted),)),
        "count": replace(good, pictures=(replace(good.pictures[0], image=fewer),)),
        "bytes": replace(good, pictures=(replace(second, png=second.png[:40]),)),
    }
    results = await asyncio.gather(
        engine.generate(good), *(engine.generate(each) for each in bad.values()), return_exceptions=True
    )
    assert isinstance(results[0], Generation)
    assert [type(result) for result in results[1:]] == [BrokenImageError] * len(bad)


async def test_a_shortage_of_the_machine_is_not_the_pictures_fault(seeing, engine, monkeypatch):
    processor = engine._images.processor

    def fail(files: Sequence[bytes]) -> dict[str, Any]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    request = seeing.request("short", "what is *?", [noise_png(5)])
    with monkeypatch.context() as short, pytest.raises(OSError, match="open files"):
        short.setattr(processor, "pixels", fail)
        await engine.generate(request)
    assert (await engine.generate(request)).token_ids


async def test_a_request_that_is_cancelled_does_not_take_the_pictures_from_others(seeing, engine):
    requests = [seeing.request(f"r{i}", "what is *?", [noise_png(4)]) for i in range(2)]
    cancelled = asyncio.create_task(engine.generate(requests[0]))
    going_on = asyncio.create_task(engine.generate(requests[1]))
    await asyncio.sleep(0)
    cancelled.cancel()
    assert (await going_on).token_ids


async def test_full_versions_and_deltas_under_the_names_of_the_files_reach_tower_and_text(
    seeing, engine, tmp_path
):
    chain, folders = write_versions(seeing, tmp_path)
    manifests = chain.manifests
    assert not engine.can_patch
    for version in (1, 2, 3):
        files = chain.paths(0) if version == 1 else []
        await engine.load(version, files, [chain.paths(version)], manifests[version].digest)
        assert engine.can_patch, "every tensor of the files has its place in the model"
        requests = mixed_requests(seeing)[3:6]
        results = await generate_all(engine, requests)
        model = folders[version].model()
        for request, result in zip(requests, results, strict=True):
            expected = seeing.expected(model, request, result)
            assert result.logprobs == pytest.approx(expected, abs=TOLERANCE)
            assert result.spans == ((version, 0),)
            before = seeing.expected(folders[version - 1].model(), request, result)
            if version != 2 or request.pictures:
                assert before != pytest.approx(expected, abs=1e-3)


async def test_a_model_of_another_family_is_refused_by_name(tmp_path):
    engine = make_engine(tiny_model(tmp_path, max_position_embeddings=256))
    with pytest.raises(ConfigError, match="llama"):
        await engine.start()
