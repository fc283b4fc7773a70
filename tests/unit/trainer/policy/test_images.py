"""Samples with pictures: their numbers are those of transformers' own pass over each of them alone."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from examples.small_vision_models import SMALL_FAMILIES, make_vision_model
from tests.support.allocations import peak_bytes
from tests.support.models import (
    gradients_of,
    load_state,
    one_batch,
    option_of,
    save_state,
    train,
)
from tests.support.picture_samples import IMAGES, PictureMaker, compute_in_float64
from tests.support.vision import png_of
from tidemill.common.config.images import ImagesConfig
from tidemill.common.errors import ConfigError, RefusedError
from tidemill.common.images.store import ImageStore
from tidemill.common.wire.images import Image
from tidemill.services.trainer.groups.sample import Sample
from tidemill.services.trainer.policy import images
from tidemill.services.trainer.policy.layers import body_of, tower_of
from tidemill.services.trainer.policy.options import PictureSettings
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy

PACKINGS = (True, False)
"""In trees, and in padded rows."""


@pytest.fixture(scope="module", params=SMALL_FAMILIES)
def maker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PictureMaker:
    run_dir = tmp_path_factory.mktemp("run")
    return PictureMaker(make_vision_model(run_dir / "model", request.param), run_dir)


def gap(gradient: torch.Tensor, expected: torch.Tensor) -> float:
    """The difference of two gradients, relative to the second."""
    return float((gradient - expected).norm() / expected.norm())


def logprobs_by_key(policy: TransformersPolicy, samples: list[Sample]) -> dict[tuple[int, int], np.ndarray]:
    parts, _ = policy._deal_groups(samples)
    scored = policy._score_all(parts, policy.scorer, 1.0)
    return {sample.key: scores["logprobs"] for sample, scores in zip(samples, scored, strict=True)}


def note_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Digests of the pictures that are read from stores from now on."""
    digests: list[str] = []
    read = ImageStore.read

    def note(store: ImageStore, image: Image) -> bytes:
        digests.append(image.digest)
        return read(store, image)

    monkeypatch.setattr(ImageStore, "read", note)
    return digests


@pytest.mark.parametrize("packing", PACKINGS)
def test_logprobs_are_those_of_a_plain_pass_over_each_sample(maker: PictureMaker, packing: bool) -> None:
    samples = maker.samples()
    mine = logprobs_by_key(maker.policy(packing=packing), samples)
    plain = maker.plain_model()
    for sample in samples:
        with torch.no_grad():
            expected = maker.plain_logprobs(plain, sample).numpy()
        np.testing.assert_allclose(mine[sample.key], expected, atol=1e-12, rtol=0.0)
    # Other pictures behind the same ids have other numbers.
    assert np.abs(mine[0, 0] - mine[0, 2]).max() > 1e-3


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_batch_has_the_gradient_of_its_samples_alone(
    maker: PictureMaker, packing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_in_float64(monkeypatch)
    samples = maker.samples()
    together = maker.policy(packing=packing, train_tower=True)
    together.accumulate(one_batch(samples))
    alone = maker.policy(packing=False, train_tower=True)
    for sample in samples:
        alone.accumulate(one_batch([sample]))
    assert gap(gradients_of(together), gradients_of(alone)) < 1e-12


def test_the_gradient_is_that_of_a_plain_pass(maker: PictureMaker) -> None:
    sample = maker.samples()[4]
    policy = maker.policy(train_tower=True, algorithm={"loss": "reinforce", "importance": {"mode": "off"}})
    policy.accumulate(one_batch([sample]))
    plain = maker.plain_model()
    (-sample.mean_advantage * maker.plain_logprobs(plain, sample).sum()).backward()
    expected = dict(plain.named_parameters())
    for name, weight in policy._parameters:
        assert (weight.grad is None) == (expected[name].grad is None), name
    trained = [expected[name].grad for name, weight in policy._parameters if weight.grad is not None]
    gradient = torch.cat([tensor.flatten() for tensor in trained if tensor is not None])
    assert gap(gradients_of(policy), gradient) < 1e-12


def test_each_trained_weight_has_a_gradient_with_layers_computed_again(maker: PictureMaker) -> None:
    samples = maker.samples()
    kept = maker.policy(train_tower=True)
    again = maker.policy(train_tower=True, gradient_checkpointing=True)
    for policy in (kept, again):
        policy.accumulate(one_batch(samples))
    without = {name for name, weight in again._parameters if weight.grad is None}
    # LLaVA takes the features of the tower's last layer but one.
    unused = ("model.vision_tower.encoder.layers.1.", "model.vision_tower.post_layernorm.")
    assert all(name.startswith(unused) for name in without)
    assert gap(gradients_of(again), gradients_of(kept)) < 1e-12


def test_the_tower_is_frozen_unless_it_is_trained(maker: PictureMaker) -> None:
    samples = maker.samples()
    for trains_tower in (False, True):
        policy = maker.policy(train_tower=trains_tower)
        tower = [weight for module in tower_of(policy._model) for weight in module.parameters()]
        before = [weight.detach().clone() for weight in tower]
        text_before = policy._model.get_output_embeddings().weight.detach().clone()
        assert not train(policy, [one_batch(samples)]).skipped
        moved = [not torch.equal(weight, old) for weight, old in zip(tower, before, strict=True)]
        assert any(moved) == trains_tower
        assert not torch.equal(policy._model.get_output_embeddings().weight, text_before)


def test_positions_of_a_picture_matter(maker: PictureMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    if not maker.processor.family.has_grid_positions:
        return
    samples = maker.samples()
    policy = maker.policy()
    right = logprobs_by_key(policy, samples)
    body = body_of(policy._model)
    assert body.rope_deltas is None, "the model keeps nothing of a pass"
    whole = type(body).get_rope_index

    def as_text(self: object, input_ids: torch.Tensor, mm_token_type_ids: torch.Tensor, **named: object):
        return whole(self, input_ids, torch.zeros_like(mm_token_type_ids), **named)

    monkeypatch.setattr(type(body), "get_rope_index", as_text)
    wrong = logprobs_by_key(policy, samples)
    assert np.abs(right[2, 0] - wrong[2, 0]).max() > 1e-3
    np.testing.assert_array_equal(right[3, 0], wrong[3, 0])


def test_weights_are_published_under_the_names_of_the_files(maker: PictureMaker) -> None:
    policy = maker.policy(torch.float32)
    with safe_open(maker.folder / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    published = dict(policy.named_parameters_for_export())
    assert set(published) == set(tensors)
    for name, tensor in published.items():
        assert torch.equal(tensor, tensors[name])


@pytest.mark.parametrize(
    "algorithm",
    [
        {"reference": {"model": "frozen"}, "kl": {"place": "loss", "estimator": "k3", "coefficient": 0.1}},
        {"advantage": "gae"},
        {"advantage": "gae", "value": {"model": "own"}},
    ],
    ids=["reference", "value head", "critic"],
)
def test_models_beside_the_policy_see_the_pictures(maker: PictureMaker, algorithm: dict[str, object]) -> None:
    samples = maker.samples()
    policy = maker.policy(algorithm=algorithm)
    columns = policy.precompute(samples)
    plain = maker.plain_model()
    for sample, computed in zip(samples, columns, strict=True):
        reference = computed.get("reference_logprobs")
        if reference is not None:
            with torch.no_grad():
                expected = maker.plain_logprobs(plain, sample).numpy()
            np.testing.assert_allclose(reference, expected, atol=1e-12, rtol=0.0)
        for name, values in computed.items():
            sample.fill(name, values)
        if "values" in computed:
            sample.fill("returns", np.ones(len(sample.mask)))
    policy.accumulate(one_batch(samples))
    assert all(torch.isfinite(gradients_of(policy)))


def test_adapters_are_of_the_language_model_alone(maker: PictureMaker) -> None:
    samples = maker.samples()
    policy = maker.policy(lora={"rank": 2, "target_modules": "all-linear"})
    trained = [name for name, _ in policy._parameters]
    assert trained and all("language_model" in name for name in trained)
    plain = maker.plain_model()
    mine = logprobs_by_key(policy, samples)
    with torch.no_grad():
        expected = maker.plain_logprobs(plain, samples[0]).numpy()
    np.testing.assert_allclose(mine[0, 0], expected, atol=1e-12, rtol=0.0)
    assert not train(policy, [one_batch(samples)]).skipped
    assert np.abs(logprobs_by_key(policy, samples)[0, 0] - expected).max() > 1e-6


def test_adapters_of_a_tower_are_refused(maker: PictureMaker) -> None:
    name = "out_proj" if maker.processor.family.model_type == "llava" else "attn.qkv"
    with pytest.raises(ConfigError, match="tower"):
        maker.policy(lora={"rank": 2, "target_modules": [name]})


def test_a_checkpoint_with_adapters_on_the_tower_is_refused_by_name(maker: PictureMaker) -> None:
    lora = {"rank": 2, "target_modules": "all-linear"}
    state = maker.policy(lora=lora).state()
    name = next(name for name in state.tensors if "language_model" in name and "lora_A" in name)
    of_tower = name.replace("language_model", "a_tower")
    state.tensors[of_tower] = state.tensors[name].clone()
    with pytest.raises(ConfigError, match=r"1 of its weights do not fit the model \(.*a_tower"):
        load_state(maker.policy(lora=lora), state)


def test_a_run_goes_on_to_the_same_bits_from_a_checkpoint(maker: PictureMaker, tmp_path: Path) -> None:
    samples = maker.samples()
    policy = maker.policy(torch.float32, train_tower=True)
    train(policy, [one_batch(samples)])
    save_state(policy, tmp_path)
    resumed = maker.policy(torch.float32, train_tower=True)
    resumed.load_state(tmp_path)
    for each in (policy, resumed):
        train(each, [one_batch(samples)])
    assert policy.digest() == resumed.digest()


def test_a_checkpoint_of_another_processor_is_refused(maker: PictureMaker) -> None:
    state = maker.policy().state()
    settings = maker.settings
    changed_images = ImagesConfig(max_pixels=2 * IMAGES.max_pixels)
    if not maker.processor.family.keeps_size:
        return
    maker.settings = PictureSettings(settings.model_path, changed_images, settings.run_dir)
    try:
        with pytest.raises(ConfigError, match="processor"):
            load_state(maker.policy(), state)
    finally:
        maker.settings = settings


def test_a_sample_that_has_its_picture_twice_reads_it_once(
    maker: PictureMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = png_of(7)
    sample = maker.sample((0, 0), [picture, picture], seed=9)
    digests = note_reads(monkeypatch)
    mine = logprobs_by_key(maker.policy(), [sample])
    assert digests == [sample.images[0].digest]
    with torch.no_grad():
        expected = maker.plain_logprobs(maker.plain_model(), sample).numpy()
    np.testing.assert_allclose(mine[0, 0], expected, atol=1e-12, rtol=0.0)


def test_a_steps_memory_does_not_grow_with_its_pictures(
    maker: PictureMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight large pictures a sample: a pass has two samples of those there are. Pixels that are kept for the
    next passes have a bound of their own."""
    monkeypatch.setattr(images, "CACHED_BYTES", 0)
    pictures = [png_of(seed, 112, 112) for seed in range(16)]
    pairs = [pictures[first : first + 8] for first in range(8)]
    samples = [maker.sample((n, 0), of_sample, seed=n) for n, of_sample in enumerate(pairs)]
    size = 2 * samples[0].num_tokens
    policy = maker.policy(torch.float32, train_tower=True, micro_batch_tokens=size)
    policy.accumulate(one_batch(samples[:1]))  # gradients are there from now on
    peaks = []
    for num, num_passes in ((2, 1), (8, 4)):
        batch = one_batch(samples[:num])
        assert len(policy._plan(batch.samples)) == num_passes
        peaks.append(peak_bytes(partial(policy.accumulate, batch)))
    assert peaks[1] < 1.1 * peaks[0]


def test_a_picture_counts_once_a_pass_for_what_the_tower_does(maker: PictureMaker) -> None:
    samples = maker.samples()
    sums = maker.policy().accumulate(one_batch(samples))
    counts = {image.digest: image.num_tokens for sample in samples for image in sample.images}
    assert len(counts) == 4
    assert sums.picture_tokens == sum(counts.values())
    assert sums.picture_pairs == sum(count**2 for count in counts.values())


def test_pixels_that_are_not_kept_are_read_again(
    maker: PictureMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = maker.samples()
    policy = maker.policy()
    first = logprobs_by_key(policy, samples)
    digests = note_reads(monkeypatch)
    kept = logprobs_by_key(policy, samples)
    assert not digests
    monkeypatch.setattr(images, "CACHED_BYTES", 0)
    not_kept = logprobs_by_key(policy, samples)
    # All but perhaps that which was kept until then.
    assert len(set(digests)) >= 3
    for key, logprobs in first.items():
        np.testing.assert_array_equal(kept[key], logprobs)
        np.testing.assert_array_equal(not_kept[key], logprobs)


def test_pixels_that_a_plan_needs_stay_until_the_next_plan(
    maker: PictureMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks fetch before they meet for a plan's passes: within these, others would wait for what is read."""
    monkeypatch.setattr(images, "CACHED_BYTES", 0)
    policy = maker.policy()
    pictures = option_of(policy, images.Images)
    (first,) = policy._plan([maker.sample((0, 0), [png_of(11)])])
    (last,) = policy._plan([maker.sample((1, 0), [png_of(12)])])
    policy._lay_out(last)
    pictures.fetch([first, last])
    digests = note_reads(monkeypatch)
    for tile in (first, last, first):
        policy._lay_out(tile)
    assert not digests
    pictures.fetch([first])
    digests.clear()
    for tile in (first, last):
        policy._lay_out(tile)
    assert digests == [last.rows[0].images[0].digest]


def test_a_store_that_is_away_is_waited_for_and_one_that_refuses_the_keys_is_not(
    maker: PictureMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = maker.sample((0, 0), [png_of(8)])
    away = maker.store.folder.with_name("away")

    def come_back(pause_s: float) -> None:
        away.rename(maker.store.folder)

    maker.store.folder.rename(away)
    with monkeypatch.context() as clock:
        clock.setattr(images.time, "sleep", come_back)
        assert np.isfinite(logprobs_by_key(maker.policy(), [sample])[0, 0]).all()

    def refuse(store: ImageStore, image: Image) -> bytes:
        raise RefusedError("it refuses this process's keys")

    monkeypatch.setattr(ImageStore, "read", refuse)
    monkeypatch.setattr("tidemill.common.store.claims.REFUSED_S", 0.0)
    with pytest.raises(ConfigError, match="refuses this process's keys"):
        logprobs_by_key(maker.policy(), [sample])


def test_half_precision_computes_about_the_same(maker: PictureMaker) -> None:
    samples = maker.samples()
    wide = logprobs_by_key(maker.policy(torch.float32), samples)
    policy = maker.policy(torch.bfloat16, train_tower=True)
    half = logprobs_by_key(policy, samples)
    for key, logprobs in wide.items():
        np.testing.assert_allclose(half[key], logprobs, atol=0.25)
    assert not train(policy, [one_batch(samples)]).skipped
