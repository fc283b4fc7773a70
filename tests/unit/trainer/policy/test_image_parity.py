"""What the engine samples from prompts with pictures has the same logprobs in the trainer, before and after
updates of text and tower, which reach the engine as files."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.small_vision_models import SMALL_FAMILIES
from tests.support.models import one_batch, run_config, train
from tests.support.picture_samples import IMAGES, PictureMaker
from tests.support.pictures import Seeing, mixed_requests
from tests.support.samples import sample_of
from tests.support.versions import write_version
from tests.support.vision_models import copy_vision_model
from tidemill.common.run.weight_files import WEIGHTS_FOLDER
from tidemill.services.rollout.engines.transformers import TransformersEngine
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.weights.store import WeightStore

TOLERANCE = 1e-5


async def sample_all(engine: TransformersEngine, seeing: Seeing) -> list[Sample]:
    """A sample of each request at temperature 1, with an advantage."""
    requests = [request for request in mixed_requests(seeing) if request.sampling.temperature == 1.0]
    results = await asyncio.gather(*(engine.generate(request) for request in requests))
    samples = []
    for number, (request, result) in enumerate(zip(requests, results, strict=True)):
        images = tuple(picture.image for picture in request.pictures)
        advantage = 1.0 if number % 2 else -0.5
        sample = sample_of(
            (number, 0),
            request.prompt_ids,
            result.token_ids,
            result.logprobs,
            images=images,
            advantage=advantage,
        )
        samples.append(sample)
    return samples


@pytest.mark.parametrize("trains_tower", [False, True], ids=["frozen tower", "trained tower"])
@pytest.mark.parametrize("family", SMALL_FAMILIES)
async def test_engine_and_trainer_agree_before_and_after_three_updates(
    tmp_path: Path, family: str, trains_tower: bool
) -> None:
    folder = copy_vision_model(tmp_path / "model", family)
    maker = PictureMaker(folder, tmp_path)
    seeing = Seeing(folder, family, maker.processor, Seeing.of(folder, family).tokenizer)
    for request in mixed_requests(seeing):
        for picture in request.pictures:
            maker.store.put(picture.png)
    policy = maker.policy(torch.float32, train_tower=trains_tower)
    rollout = {"engine": "transformers", "num_threads": 1}
    images = IMAGES.model_dump(exclude_unset=True)
    engine = TransformersEngine(
        run_config(folder, model={"max_model_len": 256}, rollout=rollout, images=images)
    )
    await engine.start()
    store = WeightStore(tmp_path)

    async def load(version: int) -> None:
        """Have the engine load the policy's weights, by a delta where they are published as one."""
        manifest = write_version(store, version, policy)
        paths = [tmp_path / WEIGHTS_FOLDER / manifest.folder / file.name for file in manifest.files]
        if manifest.is_delta:
            await engine.load(version, [], [paths], manifest.digest)
        else:
            await engine.load(version, paths, [], manifest.digest)
        assert engine.can_patch

    await load(0)
    before = []
    try:
        for version in range(4):
            samples = await sample_all(engine, seeing)
            parts, _ = policy._deal_groups(samples)
            scored = policy._score_all(parts, policy.scorer, 1.0)
            for sample, scores in zip(samples, scored, strict=True):
                np.testing.assert_allclose(
                    scores["logprobs"], sample.columns["rollout_logprobs"], atol=TOLERANCE, rtol=0.0
                )
            before.append(float(samples[0].columns["rollout_logprobs"].sum()))
            train(policy, [one_batch(samples)])
            await load(version + 1)
    finally:
        await engine.close()
    assert len(set(before)) == 4, "each update changes what is sampled"
