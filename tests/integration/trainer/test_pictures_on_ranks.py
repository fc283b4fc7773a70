"""Samples with pictures on several ranks: losses, gradients, weights are those of one, in float64 to 1e-12.

Ranks gather the layers of the tower from each other, so they pass through it together: also those whose part
of a micro-batch has no picture, or nothing at all.
"""

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from examples.small_vision_models import SMALL_FAMILIES, make_vision_model
from tests.support.models import run_config, save_state
from tests.support.picture_samples import IMAGES, PictureMaker, compute_in_float64
from tests.support.rank_runs import on_ranks
from tests.support.versions import write_version
from tidemill.common.config.run import RunConfig
from tidemill.common.run.weight_files import verified_files
from tidemill.common.wire.images import Image
from tidemill.services.trainer.algorithm.losses.sums import Sums
from tidemill.services.trainer.groups.bins import form_micro_batches
from tidemill.services.trainer.groups.micro_batch import MicroBatch
from tidemill.services.trainer.policy import images
from tidemill.services.trainer.policy.fsdp.rank_policy import RankPolicy
from tidemill.services.trainer.policy.fsdp.ranks import Ranks
from tidemill.services.trainer.policy.loading import open_policy
from tidemill.services.trainer.policy.policy import UpdateResult
from tidemill.services.trainer.policy.tile import Tile
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy
from tidemill.services.trainer.weights.peers import pack, unpack
from tidemill.services.trainer.weights.store import WeightStore, whole_tensor

TOLERANCE = 1e-12
SGD_LIKE: dict[str, Any] = {"optimizer": {"lr": 1e-2, "eps": 1e-3}}
KL: dict[str, Any] = {"kl": {"place": "loss", "coefficient": 0.1}}
CASES: dict[str, dict[str, Any]] = {
    "frozen tower": {},
    "trained tower": {"train_tower": True},
    "a sum with every micro-batch": {"train_tower": True, "sum_gradients": "micro_batch"},
    "padded rows, layers computed again": {
        "train_tower": True, "packing": False, "gradient_checkpointing": True,
    },
    "one pass shared": {"train_tower": True, "context_ranks": 2},
    "adapters": {"lora": {"rank": 2, "target_modules": "all-linear"},
        "algorithm": {"reference": {"model": "frozen"}, **KL}},
    "reference and critic": {"train_tower": True, "algorithm": {"advantage": "gae",
        "value": {"model": "own"}, "reference": {"model": "frozen"}, **KL}},
}  # fmt: skip
ALL_OF = "qwen3_vl"
"""The family that has all cases: its tower gives features to several layers of the text."""
FIRST_CASES = ("frozen tower", "trained tower", "adapters")
STEPS = 2
OF_PASSES = ("positions", "picture_tokens", "picture_pairs")


def batches_of(maker: PictureMaker) -> list[MicroBatch]:
    """Of all samples; of a picture beside a text; of a session that shows a picture beside a text; of one
    picture, one text and one session with two of them, each of which is one rank's."""
    samples = maker.samples()
    text = samples[6]
    session, forked = samples[7:]
    assert (len(session.images), len(forked.segments), len(forked.images)) == (2, 2, 4)
    return [
        *form_micro_batches(samples, 60, 2),
        MicroBatch((text, samples[3])),
        MicroBatch((session, text)),
        MicroBatch((samples[0],)),
        MicroBatch((text,)),
        MicroBatch((forked,)),
    ]


def train(policy: TransformersPolicy, maker: PictureMaker) -> dict[str, Any]:
    """What some steps give, the digest of each, and the weights after them."""
    numbers: list[Any] = []
    digests = [policy.digest()]
    for _ in range(STEPS):
        sums = Sums()
        for batch in batches_of(maker):
            fill(policy, batch)
            sums = sums + policy.accumulate(batch)
        result = policy.update(sums.denominator)
        # What shares a pass differs.
        same = {name: value for name, value in sums.items() if name not in OF_PASSES}
        numbers.append((same, result))
        digests.append(policy.digest())
    weights = {name: whole_tensor(weight.detach()).clone() for name, weight in policy._parameters}
    return {"numbers": numbers, "weights": weights, "digests": digests}


def fill(policy: TransformersPolicy, batch: MicroBatch) -> None:
    """Give the samples the columns that the policy computes of them."""
    columns: Sequence[Any] = policy.precompute(batch.samples)
    if isinstance(policy, RankPolicy):  # rank 0 has them
        columns = unpack(policy._ranks.broadcast(pack(columns)))
    for sample, computed in zip(batch.samples, columns, strict=True):
        for name, values in computed.items():
            sample.fill(name, values)
        if "values" in computed:
            sample.fill("returns", computed["values"] + 0.5)


def train_cases(ranks: Ranks | None, maker: PictureMaker, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    outcomes = {}
    for name, case in cases.items():
        fields = SGD_LIKE | case
        if ranks is None:
            fields.pop("context_ranks", None)
        outcomes[name] = train(maker.policy(ranks=ranks, **fields), maker)
    return outcomes


@pytest.fixture(scope="module")
def in_float64():
    with pytest.MonkeyPatch.context() as patch:
        compute_in_float64(patch)
        yield


@pytest.fixture(scope="module", params=SMALL_FAMILIES)
def maker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PictureMaker:
    run_dir = tmp_path_factory.mktemp("run")
    return PictureMaker(make_vision_model(run_dir / "model", request.param), run_dir)


def cases_of(maker: PictureMaker) -> dict[str, dict[str, Any]]:
    has_all = maker.processor.family.model_type == ALL_OF
    return CASES if has_all else {name: CASES[name] for name in FIRST_CASES}


@pytest.fixture(scope="module")
def of_two(maker, in_float64, tmp_path_factory):
    work = partial(train_cases, maker=maker, cases=cases_of(maker))
    return on_ranks(2, work, tmp_path_factory.mktemp("two"))


def assert_same(mine: dict[str, Any], expected: dict[str, Any]) -> None:
    for (sums, result), (other_sums, other_result) in zip(mine["numbers"], expected["numbers"], strict=True):
        assert sums == pytest.approx(other_sums, rel=TOLERANCE, abs=TOLERANCE)
        assert result.grad_norm == pytest.approx(other_result.grad_norm, rel=TOLERANCE)
        assert not result.skipped
    assert mine["digests"][0] == expected["digests"][0]
    assert len(set(mine["digests"])) == STEPS + 1
    assert mine["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(mine["weights"][name], weight, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def test_two_ranks_are_one(maker, of_two):
    expected = train_cases(None, maker, cases_of(maker))
    for name, outcome in expected.items():
        assert_same(of_two[name], outcome)


def run_of(maker: PictureMaker, num_ranks: int) -> RunConfig:
    trainer = {
        "num_ranks": num_ranks,
        "device": "cpu",
        "train_tower": True,
        "optimizer": {"lr": 1e-2, "eps": 1e-2},
        "algorithm": {"reference": {"model": "frozen"}, **KL},
    }
    images = IMAGES.model_dump(exclude_unset=True)
    return run_config(maker.folder, model={"max_model_len": 256}, trainer=trainer, images=images)


def step(policy: Any, maker: PictureMaker) -> tuple[dict[str, Any], UpdateResult]:
    sums = Sums()
    for batch in batches_of(maker):
        fill(policy, batch)
        sums = sums + policy.accumulate(batch)
    return dict(sums), policy.update(sums.denominator)


def test_ranks_that_rank_0_starts_train_write_and_continue_as_one_does(tmp_path):
    maker = PictureMaker(make_vision_model(tmp_path / "model", "qwen3_vl"), tmp_path)
    alone: Any = open_policy(run_of(maker, 1), run_dir=tmp_path)
    started: Any = open_policy(run_of(maker, 2), run_dir=tmp_path)
    with closing(started) as policy:
        assert policy.digest() == alone.digest()
        assert policy.processor == alone.processor != ""
        of_ranks = step(policy, maker)[1]
        of_one = step(alone, maker)[1]
        assert of_ranks.grad_norm == pytest.approx(of_one.grad_norm, rel=1e-5)
        save_state(policy, tmp_path / "state")
        trained = policy.digest()
        numbers = step(policy, maker)
        policy.load_state(tmp_path / "state")
        assert policy.digest() == trained
        assert step(policy, maker) == numbers, "bit by bit"
        policy.load_state(tmp_path / "state")
        alone.load_state(tmp_path / "state")
        assert alone.digest() == trained
        store = WeightStore(tmp_path)
        published = write_version(store, 0, policy)
        assert trained.startswith(published.digest)
    tensors = {}
    for path in verified_files(tmp_path, published):
        tensors |= load_file(path)
    expected_tensors = dict(alone.named_parameters_for_export())
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in expected_tensors.items():
        assert torch.equal(tensors[name], tensor), name


def reads_in_passes(ranks: Ranks, maker: PictureMaker) -> int:
    """How often a rank reads from the store while it makes the passes that others wait in."""
    policy = maker.policy(ranks=ranks)
    pictures = next(option for option in policy.options if isinstance(option, images.Images))
    num_reads = [0]
    read = pictures._read

    def count(image: Image) -> bytes:
        num_reads[0] += 1
        return read(image)

    accumulate = policy._accumulate

    def watched(batch: MicroBatch, plan: Sequence[Tile]) -> Sums:
        pictures._read = count
        sums = accumulate(batch, plan)
        pictures._read = read
        return sums

    policy._accumulate = watched
    batches = batches_of(maker)
    for batch in batches:
        policy.accumulate(batch)
    # Also where pixels of the last plan are evicted for those of this one.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "CACHED_BYTES", 0)
        for batch in [*batches, *reversed(batches)]:
            policy.accumulate(batch)
    return sum(unpack(packed) for packed in ranks.gather(pack(num_reads[0])))


def test_pictures_are_read_before_ranks_wait_for_each_other_in_a_pass(maker, tmp_path):
    assert on_ranks(2, partial(reads_in_passes, maker=maker), tmp_path) == 0
