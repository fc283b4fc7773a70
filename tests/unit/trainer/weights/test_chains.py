"""A real policy's versions as chains: bases, deltas, what is kept, and that each chain leads to its digest.

On a device, which a CPU stands in for, the same is compared and written, and it is rarely waited for.
"""

import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.models import make_policy, save_weights
from tests.support.versions import write_version
from tests.support.waits import Waits
from tidemill.common.config.weights import WeightsConfig
from tidemill.common.errors import WeightsError
from tidemill.common.files import StorageError
from tidemill.common.run.weight_files import read_chain, read_manifest, verified_files
from tidemill.common.weights import digest
from tidemill.common.weights.bits import read_safetensors
from tidemill.common.weights.delta import check_whole, write_whole
from tidemill.common.wire.messages import DELTA_ENCODING, WeightManifest
from tidemill.services.trainer.policy.transformers_policy import TransformersPolicy
from tidemill.services.trainer.weights import shadow
from tidemill.services.trainer.weights.shadow import HostCopies, Shadow
from tidemill.services.trainer.weights.store import WeightStore


def policy_in_bf16(**options: object) -> TransformersPolicy:
    return make_policy(dtype=torch.bfloat16, **options)


@torch.no_grad()
def change(policy: TransformersPolicy, share: float, seed: int) -> None:
    """About this share of all weights gets other values, in bfloat16 too."""
    torch.manual_seed(seed)
    for parameter in policy._model.parameters():
        parameter[torch.rand(parameter.shape) < share] += 0.25


def assert_leads_there(run: Path, manifest: WeightManifest, policy: TransformersPolicy) -> None:
    """The chain's bytes are those of a full version of the same weights."""
    chain = [verified_files(run, link) for link in read_chain(run, manifest)]
    base, *deltas = chain
    shutil.rmtree(run / "whole", ignore_errors=True)
    shutil.rmtree(run / "full", ignore_errors=True)
    (run / "whole").mkdir()
    paths = write_whole(base, deltas, run / "whole")
    check_whole(paths, manifest)
    save_weights(policy, run / "full")
    written = {info: bits.tolist() for path in paths for info, bits in read_safetensors(path)}
    expected = read_safetensors(run / "full" / "model.safetensors")
    assert written == {info: bits.tolist() for info, bits in expected}


def kinds(run: Path, versions: range) -> list[tuple[str, int]]:
    manifests = [read_manifest(run, version) for version in versions]
    return [(manifest.encoding, manifest.base) for manifest in manifests if manifest]


def test_what_writes_deltas_is_loaded_with_the_first_comparison_and_not_beside_a_step(monkeypatch):
    """A rank that cannot load it ends in a call of all ranks, which is noticed, and holds nobody up."""
    monkeypatch.setitem(sys.modules, "tidemill.common.weights.delta", None)
    with pytest.raises(ImportError):
        policy_in_bf16().compare_weights()
    make_policy().compare_weights()  # in float32 no version is a delta


def test_versions_are_deltas_until_too_much_changed_or_the_base_is_old(tmp_path):
    store = WeightStore(tmp_path, WeightsConfig(base_every=4))
    store.max_chain_share = 10.0
    policy = policy_in_bf16()
    for version, share in enumerate([0.0, 0.02, 0.0, 0.5, 0.02, 0.02, 0.02, 0.02]):
        change(policy, share, version)
        manifest = write_version(store, version, policy)
        assert manifest.share_changed == pytest.approx(share if version else -1.0, abs=0.01)
        assert manifest.digest == policy.digest()
        assert_leads_there(tmp_path, manifest, policy)
    full = ("full", -1)
    expected = [full, (DELTA_ENCODING, 0), (DELTA_ENCODING, 0), full, *[(DELTA_ENCODING, 3)] * 3, full]
    assert kinds(tmp_path, range(8)) == expected


def test_a_chain_longer_than_its_share_of_a_base_ends(tmp_path):
    store = WeightStore(tmp_path)
    store.max_chain_share = 0.2
    policy = policy_in_bf16()
    for version in range(4):
        change(policy, 0.05, version)
        write_version(store, version, policy)
    # 5 % of the values are about 7 % of the bytes: two deltas are more than a fifth, with their heads.
    assert [kind for kind, _ in kinds(tmp_path, range(4))] == ["full", DELTA_ENCODING, DELTA_ENCODING, "full"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_and_a_base_every_version_write_in_full(tmp_path, dtype):
    store = WeightStore(tmp_path, WeightsConfig(base_every=1 if dtype == torch.bfloat16 else 50))
    policy = make_policy(dtype=dtype)
    for version in range(2):
        change(policy, 0.01, version)
        manifest = write_version(store, version, policy)
        assert not manifest.is_delta and manifest.digest == policy.digest()
        assert_leads_there(tmp_path, manifest, policy)


def test_adapters_and_value_heads_travel_as_far_as_they_go(tmp_path):
    store = WeightStore(tmp_path)
    policy = policy_in_bf16(lora={"rank": 4, "alpha": 8})
    first = write_version(store, 0, policy)
    with torch.no_grad():
        for name, parameter in policy._parameters:
            parameter += 0.01 if "lora_B" in name else 0.0
    state = policy.compare_weights()
    manifest = store.finish(store.begin(1, policy, state))
    assert state.committed.startswith(f"{manifest.digest}+") and policy.digest() == state.committed
    assert first.digest != manifest.digest
    assert_leads_there(tmp_path, manifest, policy)
    assert (tmp_path / "weights" / manifest.folder / "adapter").is_dir()


def test_bits_count_not_values():
    policy = policy_in_bf16()
    before = policy.compare_weights()
    weight = next(policy._model.parameters()).detach().view(-1)
    weight[0] = 0.0
    weight[1] = float("nan")
    policy.compare_weights()
    weight[0] = -0.0
    state = policy.compare_weights()
    num_elements = round(1 / state.share_changed)
    assert num_elements * 2 == before.num_bytes, "the sign of zero changed, and the NaN did not"
    assert policy.compare_weights().share_changed == 0.0


def test_pruning_keeps_what_a_chain_needs_and_no_more(tmp_path):
    store = WeightStore(tmp_path, WeightsConfig(base_every=3))
    store.max_chain_share = 10.0
    policy = policy_in_bf16()
    for version in range(8):
        change(policy, 0.01, version)
        write_version(store, version, policy)
    assert store.prune(keep=1, in_use={4}) == [0, 1, 2, 5]
    assert store.versions() == [3, 4, 6, 7]
    assert store.prune(keep=2) == [3, 4]
    assert store.prune(keep=1, newest=6) == [7]
    assert store.versions() == [6]


def test_a_trainer_that_restarts_writes_the_same_version_again(tmp_path):
    policy = policy_in_bf16()
    store = WeightStore(tmp_path)
    written = [
        write_version(store, version, policy) for version in range(2) if change(policy, 0.01, version) is None
    ]
    again = policy_in_bf16()
    for version in range(2):
        change(again, 0.01, version)
    restarted = WeightStore(tmp_path)
    assert write_version(restarted, 1, again) == written[1], "it is there and whole"
    change(again, 0.01, 2)
    assert write_version(restarted, 2, again).parent == 1
    os.truncate(tmp_path / "weights" / "v00000000" / "model.safetensors", 100)
    third = policy_in_bf16()
    for version in range(2):
        change(third, 0.01, version)
    manifest = write_version(WeightStore(tmp_path), 1, third)
    assert not manifest.is_delta and manifest.digest == written[1].digest
    with pytest.raises(WeightsError, match="torn"):
        verified_files(tmp_path, written[0])


@pytest.mark.parametrize("is_damaged_here", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trainer_that_has_just_started_writes_a_damaged_version_again(tmp_path, dtype, is_damaged_here):
    """Also where only a worker on another host has seen the damage."""
    written = write_version(WeightStore(tmp_path), 0, make_policy(dtype=dtype))
    (path,) = verified_files(tmp_path, written)
    if is_damaged_here:
        os.truncate(path, 100)
    store = WeightStore(tmp_path)
    again = make_policy(dtype=dtype)
    manifest = store.finish(store.begin_again(written, again))
    assert manifest.digest == written.digest
    assert_leads_there(tmp_path, manifest, again)


def test_a_delta_to_weights_that_are_not_there_is_refused(tmp_path):
    policy = policy_in_bf16()
    store = WeightStore(tmp_path)
    write_version(store, 0, policy)
    change(policy, 0.01, 1)
    delta = write_version(store, 1, policy)
    change(policy, 0.01, 2)
    forged = delta.model_copy(update={"parent_digest": "w1:" + "0" * 32})
    with pytest.raises(WeightsError, match="of other weights"):
        read_chain(tmp_path, forged)
    shutil.rmtree(tmp_path / "weights" / "v00000000")
    with pytest.raises(WeightsError, match="not there"):
        read_chain(tmp_path, delta)


def test_a_disk_that_is_full_beside_the_step_is_told_and_can_be_tried_again(tmp_path, monkeypatch):
    policy = policy_in_bf16()
    store = WeightStore(tmp_path)
    write_version(store, 0, policy)
    change(policy, 0.01, 1)
    state = policy.compare_weights()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Shadow, "write_changes", full)
        begun = store.begin(1, policy, state)
        with pytest.raises(StorageError, match="No space left") as caught:
            store.finish(begun)
    assert caught.value.can_clear and os.listdir(store.folder) == ["v00000000"]
    assert_leads_there(tmp_path, store.finish(store.begin(1, policy, state)), policy)


@pytest.mark.parametrize("share", [0.02, 0.9])
def test_a_comparison_on_a_device_finds_the_same_and_waits_once_a_chunk(share, monkeypatch):
    policies = [make_policy(dtype=torch.bfloat16) for _ in range(2)]
    states = []
    for policy, on_device in zip(policies, (False, True), strict=True):
        if on_device:
            monkeypatch.setattr(shadow, "_is_on_device", lambda _: True)
            monkeypatch.setattr(digest, "_is_on_device", lambda _: True)
        policy.compare_weights()
        torch.manual_seed(1)
        for parameter in policy._model.parameters():
            parameter.data[torch.rand(parameter.shape) < share] += 0.25
        with Waits() as waits:
            states.append(policy.compare_weights())
    assert states[0] == states[1] and states[0].share_changed == pytest.approx(share, abs=0.01)
    assert waits.count == len(policies[1]._writer.shadow.pieces), "each piece is one chunk"


@pytest.fixture
def events(monkeypatch):
    """What happens on a device whose copies arrive when they are waited for."""
    log: list[tuple[str, int]] = []

    class Stream:
        def __init__(self, device=None):
            self.num_copies = 0

        def wait_stream(self, stream):
            log.append(("follows training", 0))

        def record_event(self):
            number = self.num_copies
            self.num_copies = self.num_copies + 1
            log.append(("begun", number))
            return SimpleNamespace(synchronize=lambda: log.append(("arrived", number)))

    @contextmanager
    def on(stream):
        assert isinstance(stream, Stream), "never the stream of training"
        yield

    cuda = SimpleNamespace(Stream=Stream, stream=on, current_stream=lambda _: None)
    empty = lambda *sizes, pin_memory=False, **options: torch.empty(*sizes, **options)  # noqa: E731
    monkeypatch.setattr(shadow, "torch", SimpleNamespace(cuda=cuda, empty=empty, uint8=torch.uint8))
    monkeypatch.setattr(shadow, "_is_on_device", lambda _: True)
    return log


def test_copies_wait_for_training_once_and_run_ahead_of_who_writes(events):
    copies = HostCopies()
    tensors = [torch.full((size,), size, dtype=torch.int16) for size in (3, 5, 4)]
    copies.follow(tensors)
    for number, (copy, tensor) in enumerate(zip(copies.read(tensors), tensors, strict=True)):
        events.append(("written", number))
        assert torch.equal(copy, tensor)
    assert events == [
        ("follows training", 0), ("begun", 0), ("begun", 1), ("arrived", 0), ("written", 0), ("begun", 2),
        ("arrived", 1), ("written", 1), ("arrived", 2), ("written", 2),
    ]  # fmt: skip


def test_weights_are_back_on_the_device_when_the_thread_that_writes_them_may_read(monkeypatch):
    """It reads on a stream of its own, which does not wait for copies that are only enqueued."""
    policy = make_policy(dtype=torch.bfloat16)
    is_enqueued = list[bool]()
    to = torch.Tensor.to
    policy.compare_weights()
    policy.device = torch.device("meta")

    def noted(tensor, *args, **kwargs):
        is_enqueued.append(kwargs.get("non_blocking", False))
        return to(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    policy.enter()
    assert is_enqueued and not any(is_enqueued)
