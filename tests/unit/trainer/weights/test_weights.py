"""A manifest exists only for whole bytes, and a reader loads only the bytes it names.

At the end: the digest that adapters know their base by, of which every bit of every parameter counts.
"""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.numpy import load_file, save_file

from tests.support.full_versions import WritesFull
from tests.support.versions import write_version
from tidemill.common.errors import WeightsError
from tidemill.common.files import StorageError
from tidemill.common.run.weight_files import folder_versions, read_manifest, verified_files
from tidemill.common.wire.messages import WeightFile, WeightManifest
from tidemill.services.trainer.weights import store
from tidemill.services.trainer.weights.store import WeightStore, digest_parameters


class Policy(WritesFull):
    """Writes one value into two shards; its digest is that value."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.fails: OSError | None = None

    def save_weights(self, folder: Path) -> None:
        for name in ("b.safetensors", "a.safetensors"):
            save_file({"w": np.full(8, self.value, np.float32)}, folder / name)
            if self.fails:
                raise self.fails

    def digest(self) -> str:
        return f"{int(self.value):032x}"


def read_value(paths: list[Path]) -> float:
    return float(load_file(paths[0])["w"][0])


def test_written_weights_verify_and_read_back(tmp_path):
    manifest = write_version(WeightStore(tmp_path), 12, Policy(3.0))
    assert manifest.folder == "v00000012" and manifest.digest == f"{3:032x}"
    paths = verified_files(tmp_path, manifest)
    assert [path.name for path in paths] == ["a.safetensors", "b.safetensors"]
    assert read_value(paths) == 3.0
    assert read_manifest(tmp_path, 12) == manifest
    assert read_manifest(tmp_path, 13) is None


def test_the_run_folder_may_itself_be_reached_through_a_link(tmp_path):
    manifest = write_version(WeightStore(tmp_path / "run"), 0, Policy(1.0))
    (tmp_path / "latest").symlink_to("run")
    assert read_value(verified_files(tmp_path / "latest", manifest)) == 1.0


def test_a_failed_write_leaves_no_version_behind(tmp_path):
    store = WeightStore(tmp_path)
    policy = Policy(1.0)
    policy.fails = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StorageError, match=r"the weights of version 4 .*No space left") as caught:
        write_version(store, 4, policy)
    assert caught.value.can_clear
    assert store.versions() == [] and os.listdir(store.folder) == []
    policy.fails = None
    assert read_value(verified_files(tmp_path, write_version(store, 4, policy))) == 1.0


def test_a_version_with_the_same_bytes_is_not_touched_again(tmp_path):
    store = WeightStore(tmp_path)
    first = write_version(store, 1, Policy(1.0))
    before = (store.folder / first.folder).stat().st_ino
    again = write_version(store, 1, Policy(1.0))
    assert (again.files, again.digest) == (first.files, first.digest)
    assert (store.folder / first.folder).stat().st_ino == before
    assert os.listdir(store.folder) == [first.folder]


@pytest.mark.parametrize("damage", ["other bytes", "torn file", "extra file", "no manifest"])
def test_a_version_with_other_bytes_is_replaced(tmp_path, damage):
    store = WeightStore(tmp_path)
    folder = store.folder / write_version(store, 1, Policy(1.0)).folder
    if damage == "torn file":
        os.truncate(folder / "a.safetensors", 10)
    elif damage == "extra file":
        (folder / "c.safetensors").write_bytes(b"x")
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    value = 2.0 if damage == "other bytes" else 1.0
    manifest = write_version(store, 1, Policy(value))
    assert read_value(verified_files(tmp_path, manifest)) == value
    assert sorted(os.listdir(folder)) == ["a.safetensors", "b.safetensors", "manifest.json"]
    assert os.listdir(store.folder) == [folder.name]


def test_opening_the_store_clears_what_a_crash_left(tmp_path):
    torn = tmp_path / "weights" / ".v00000003.0a1b2c3d.aside"
    torn.mkdir(parents=True)
    (torn / "a.safetensors").write_bytes(b"half")
    assert WeightStore(tmp_path).versions() == []
    assert not torn.exists()


def test_only_names_of_versions_count_as_versions(tmp_path):
    for name in ("v00000002", "v1", "v0000000a", "vx", ".v00000009.replaced"):
        (tmp_path / name).mkdir()
    (tmp_path / "v00000005").write_text("a file")
    assert folder_versions(tmp_path) == [2]
    assert folder_versions(tmp_path / "nowhere") == []


def test_a_pruned_version_says_that_a_newer_one_is_coming(tmp_path):
    store = WeightStore(tmp_path)
    manifest = write_version(store, 1, Policy(1.0))
    write_version(store, 2, Policy(2.0))
    store.prune(keep=1)
    with pytest.raises(WeightsError, match=r"not there.*pruned already"):
        verified_files(tmp_path, manifest)


def forged(folder: str, name: str, secret: Path) -> WeightManifest:
    """A manifest that pydantic would refuse, as if a weaker sender had built it."""
    file = WeightFile.model_construct(name=name, num_bytes=secret.stat().st_size, checksum="0" * 32)
    return WeightManifest.model_construct(version=1, folder=folder, files=(file,), digest="0" * 32)


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("v00000001", "../../../secret"),
        ("../..", "secret"),
        ("v00000001", "../../config.yaml"),
        ("v00000001", "{outside}/secret"),
        ("{outside}", "secret"),
    ],
)
def test_a_manifest_cannot_name_a_path_outside_of_the_weights(tmp_path, folder, name):
    run = tmp_path / "run"
    write_version(WeightStore(run), 1, Policy(1.0))
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (run / "config.yaml").write_text("secret")
    manifest = forged(folder.format(outside=tmp_path), name.format(outside=tmp_path), secret)
    with pytest.raises(WeightsError, match="outside of"):
        verified_files(run, manifest)


@pytest.mark.parametrize("target", ["file", "folder"])
def test_a_link_that_leaves_the_run_is_refused(tmp_path, target):
    run = tmp_path / "run"
    elsewhere = tmp_path / "elsewhere"
    manifest = write_version(WeightStore(run), 1, Policy(1.0))
    folder = run / "weights" / manifest.folder
    path = folder / "a.safetensors" if target == "file" else folder
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(WeightsError, match="outside of"):
        verified_files(run, manifest)


def torn(path: Path) -> None:
    os.truncate(path, 50)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def looped(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (torn, "has 50 bytes, the manifest says"),
        (flipped, "has checksum .* damaged"),
        (looped, "is not a usable path"),
    ],
)
def test_a_damaged_file_is_refused_by_its_checksum(tmp_path, damage, message):
    manifest = write_version(WeightStore(tmp_path), 1, Policy(1.0))
    damage(tmp_path / "weights" / manifest.folder / "a.safetensors")
    with pytest.raises(WeightsError, match=message):
        verified_files(tmp_path, manifest)


def test_a_manifest_that_is_none_is_refused(tmp_path):
    manifest = write_version(WeightStore(tmp_path), 1, Policy(1.0))
    for files in ((), manifest.files * 2):
        with pytest.raises(WeightsError, match=r"no files|twice"):
            verified_files(tmp_path, manifest.model_copy(update={"files": files}))
    (tmp_path / "weights" / manifest.folder / "manifest.json").write_text("{")
    with pytest.raises(WeightsError, match="not a weight manifest"):
        read_manifest(tmp_path, 1)


def test_the_digest_is_xxh3_of_the_bytes_in_name_order(monkeypatch):
    torch.manual_seed(0)
    tensors = {
        "b": torch.randn(3, 4),
        "a": torch.randn(5),
        "c": torch.randn(2, 2, dtype=torch.bfloat16),
        "d": torch.tensor(1.0),
        "e": torch.zeros(0),
    }
    hasher = xxhash.xxh3_128()
    for name in sorted(tensors):
        hasher.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    expected = hasher.hexdigest()
    assert digest_parameters(tensors.items()) == expected
    assert digest_parameters(reversed(list(tensors.items()))) == expected
    monkeypatch.setattr(store, "PIECE_BYTES", 7)
    assert digest_parameters(tensors.items()) == expected
    tensors["b"] = tensors["b"].t().contiguous().t()
    assert digest_parameters(tensors.items()) == expected, "whatever its layout in memory"
    tensors["a"].view(torch.int32)[3] ^= 1
    assert digest_parameters(tensors.items()) != expected
