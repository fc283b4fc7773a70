"""A checkpoint is whole or does not count, wherever the machine stops while it is written."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from structlog.testing import capture_logs

from tidemill.common import files
from tidemill.common.files import StorageError
from tidemill.services.trainer.durable import checkpoint as checkpoints
from tidemill.services.trainer.durable.checkpoint import (
    CheckpointError,
    CheckpointStore,
    TrainerState,
    read_checkpoint,
)


class Policy:
    """One number, saved the way a policy saves tensors: more than one file, one of them in a subfolder."""

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def save_state(self, folder: Path) -> None:
        save_file({"w": np.full(64, self.value, np.float32)}, folder / "model.safetensors")
        (folder / "optimizer").mkdir()
        save_file({"m": np.full(64, -self.value, np.float32)}, folder / "optimizer" / "moments.safetensors")

    def load_state(self, folder: Path) -> None:
        self.value = float(load_file(folder / "model.safetensors")["w"][0])
        assert load_file(folder / "optimizer" / "moments.safetensors")["m"][0] == -self.value


def state(version: int, **fields: Any) -> TrainerState:
    return TrainerState(version=version, **fields)


def saved(run_dir: Path, *versions: int, keep: int = 2) -> CheckpointStore:
    """A store with a checkpoint of each version, whose policy's number is the version."""
    store = CheckpointStore(run_dir, keep)
    for version in versions:
        store.save(state(version), Policy(version).save_state)
    return store


def folder_of(run_dir: Path, version: int) -> Path:
    return run_dir / "checkpoints" / f"v{version:08d}"


def loaded(run_dir: Path, keep: int = 2) -> tuple[int, float] | None:
    """Version and policy value after a restart."""
    checkpoint = CheckpointStore(run_dir, keep).load_latest()
    if checkpoint is None:
        return None
    policy = Policy()
    policy.load_state(checkpoint.folder)
    return checkpoint.state.version, policy.value


def test_state_and_tensors_come_back_as_they_were_saved(tmp_path):
    assert read_checkpoint(tmp_path, 20) is None and list(tmp_path.iterdir()) == [], "it only reads"
    assert CheckpointStore(tmp_path, keep=2).load_latest() is None
    before = state(
        12,
        positions={"trajectories": "1700000000000-3", "scores": "0-0"},
        scheduler={"next_ticket": 96, "outstanding": [90, 91]},
        intake={"groups": {"90": [0, 2]}},
        data={"position": 96, "fingerprint": "ab"},
    )
    CheckpointStore(tmp_path, keep=2).save(before, Policy(4.0).save_state)
    checkpoint = CheckpointStore(tmp_path, keep=2).load_latest()
    assert checkpoint is not None and checkpoint.state == before
    assert loaded(tmp_path) == (12, 4.0)


def test_a_restarted_trainer_knows_the_states_of_all_that_can_be_restored(tmp_path):
    saved(tmp_path, 2, 4, 6, keep=3)
    (folder_of(tmp_path, 4) / "checkpoint.json").write_text("{")
    store = CheckpointStore(tmp_path, keep=3)
    store.load_latest()
    assert [state.version for state in store.kept] == [2, 6]


def test_older_ones_are_given_up_only_for_a_newest_that_can_be_read_back(tmp_path):
    store = saved(tmp_path, 2, 4, 6, keep=3)
    spoil(tmp_path, 6)
    assert not store.keep_newest_only()
    assert store.versions() == [2, 4, 6]
    spoil(tmp_path, 6)  # twice is not at all
    assert store.keep_newest_only()
    assert (loaded(tmp_path), store.versions()) == ((6, 6.0), [6])


@pytest.mark.parametrize(
    "fields",
    [
        {"intake": {"groups": {90: [0]}}},
        {"scheduler": {"span": (1, 2)}},
        {"data": {"loss": float("nan")}},
        {"data": {"array": np.zeros(2)}},
    ],
)
def test_a_state_that_json_would_change_is_refused_when_saved(tmp_path, fields):
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(ValueError, match="not plain JSON"):
        store.save(state(1, **fields), Policy().save_state)
    assert os.listdir(store.folder) == []


def test_a_position_that_is_no_entry_id_is_refused():
    with pytest.raises(ValueError, match="scores"):
        state(1, positions={"scores": "$"})


class Crash(BaseException):
    """The machine stopped. Not an Exception, and nothing on the disk can be changed after it."""


class Machine:
    """Stops at the n-th call that changes the disk durably; what was running cannot clean up after itself."""

    CALLS = (
        (os, "rename"), (os, "replace"), (os, "fsync"), (os, "mkdir"), (shutil, "rmtree"), (os, "unlink"),
    )  # fmt: skip

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_at: int | None) -> None:
        self.num_calls = 0
        self.stop_at = stop_at
        for module, name in self.CALLS:
            monkeypatch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self.stop_at is not None and self.num_calls >= self.stop_at:
                raise Crash
            self.num_calls += 1
            return call(*args, **kwargs)

        return counted


def num_calls_of_a_save(folder: Path, version: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        CheckpointStore(folder, keep=1).save(state(1), Policy(1.0).save_state)
        store = CheckpointStore(folder, keep=1)
        machine = Machine(patch, None)
        store.save(state(version), Policy(2.0).save_state)
        return machine.num_calls


@pytest.mark.parametrize("version", [2, 1], ids=["a new version", "the same version again"])
def test_after_a_crash_at_any_point_the_old_or_the_new_checkpoint_is_whole(tmp_path, version):
    num_calls = num_calls_of_a_save(tmp_path / "dry", version)
    assert num_calls > 10
    outcomes = []
    for stop_at in range(num_calls):
        run_dir = tmp_path / str(stop_at)
        CheckpointStore(run_dir, keep=1).save(state(1), Policy(1.0).save_state)
        store = CheckpointStore(run_dir, keep=1)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
            Machine(patch, stop_at)
            store.save(state(version), Policy(2.0).save_state)
        outcome = loaded(run_dir)
        assert outcome in [(1, 1.0), (version, 2.0)], f"stopped at call {stop_at}"
        assert all(name.startswith("v") for name in os.listdir(store.folder)), "the restart clears the rest"
        outcomes.append(outcome)
        CheckpointStore(run_dir, keep=1).save(state(3), Policy(3.0).save_state)
        assert loaded(run_dir) == (3, 3.0), "and the run goes on"
    assert outcomes == sorted(outcomes, key=lambda outcome: outcome == (version, 2.0)), (
        "one point of no return"
    )
    assert outcomes[0] == (1, 1.0) and outcomes[-1] == (version, 2.0)


def flip_a_bit(path: Path) -> None:
    """What a failing disk does: a byte is another one, the size is the same."""
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def spoil(run_dir: Path, version: int) -> None:
    flip_a_bit(folder_of(run_dir, version) / "model.safetensors")


def link_out(path: Path) -> None:
    path.symlink_to(path.rename(path.parents[3] / "elsewhere"))


def edit_the_state(path: Path) -> None:
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "size": ("model.safetensors", lambda path: os.truncate(path, 40)),
    "bytes": ("optimizer/moments.safetensors", flip_a_bit),
    "missing": ("model.safetensors", Path.unlink),
    "a link out of the checkpoint": ("model.safetensors", link_out),
    "no state": ("checkpoint.json", Path.unlink),
    "half a state": ("checkpoint.json", lambda path: os.truncate(path, 60)),
    "another document": ("checkpoint.json", lambda path: path.write_text("[1]")),
    "an empty state": ("checkpoint.json", lambda path: os.truncate(path, 0)),
    "an edited state": ("checkpoint.json", edit_the_state),
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_torn_checkpoint_is_named_in_the_log_and_the_one_before_is_loaded(tmp_path, how):
    saved(tmp_path, 1, 2)
    name, damage = DAMAGES[how]
    damage(folder_of(tmp_path, 2) / name)
    with capture_logs() as logs:
        assert loaded(tmp_path) == (1, 1.0)
    assert logs[0]["log_level"] == "warning" and logs[0]["version"] == 2
    assert name in logs[0]["problem"]


def test_when_no_checkpoint_is_whole_the_run_does_not_silently_start_over(tmp_path):
    store = saved(tmp_path, 1, 2)
    for version in (1, 2):
        spoil(tmp_path, version)
    with pytest.raises(CheckpointError, match=r"v00000002: model.*(.|\n)*v00000001"):
        store.load_latest()


def test_a_checkpoint_under_the_name_of_another_version_is_torn_and_does_not_count(tmp_path):
    store = saved(tmp_path, 1, keep=1)
    shutil.copytree(folder_of(tmp_path, 1), folder_of(tmp_path, 9))
    with capture_logs() as logs:
        assert loaded(tmp_path, keep=1) == (1, 1.0)
    assert logs[0]["version"] == 9
    store.save(state(5), Policy(5.0).save_state)
    assert (store.versions(), loaded(tmp_path, keep=1)) == ([5], (5, 5.0))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change checkpoint.json as another release would write it: with a valid checksum."""
    path = folder / "checkpoint.json"
    document = json.loads(path.read_text())
    del document["checksum"]
    change(document)
    path.write_text(json.dumps({**document, "checksum": checkpoints._checksum(document)}))


def test_a_newer_minor_release_is_read_without_its_fields_and_another_major_refused_and_not_skipped(tmp_path):
    store = saved(tmp_path, 1, 2)
    rewrite(folder_of(tmp_path, 2), lambda document: document.update(schema="2.7"))
    rewrite(folder_of(tmp_path, 2), lambda document: document["state"].update(new=[1]))
    assert loaded(tmp_path) == (2, 2.0)
    for schema in ("1.0", "3.0"):
        rewrite(folder_of(tmp_path, 2), lambda document, schema=schema: document.update(schema=schema))
        with pytest.raises(CheckpointError, match=f"schema {schema}"):
            store.load_latest()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_cannot_be_written_is_told_and_nothing_is_lost(tmp_path, monkeypatch, number):
    store = saved(tmp_path, 1, keep=1)

    def fail(*args):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fail)
        with pytest.raises(StorageError, match="the checkpoint of version 2 ") as caught:
            store.save(state(2), Policy(2.0).save_state)
    assert caught.value.can_clear and caught.value.errno == number
    assert os.listdir(store.folder) == ["v00000001"]
    store.save(state(2), Policy(2.0).save_state)
    assert loaded(tmp_path) == (2, 2.0)


def test_a_torn_checkpoint_does_not_count_as_kept(tmp_path):
    """Or the good one before it would go, and the next damage would end the run."""
    store = saved(tmp_path, 2, 4)
    spoil(tmp_path, 4)
    store.save(state(6), Policy(6).save_state)
    assert [state.version for state in store.kept] == [2, 6]
    spoil(tmp_path, 6)
    assert loaded(tmp_path) == (2, 2.0)
    saved(tmp_path, 3)  # after a restart that went back
    spoil(tmp_path, 3)
    assert loaded(tmp_path) == (2, 2.0)


def test_a_torn_checkpoint_goes_when_enough_whole_ones_are_there(tmp_path):
    store = saved(tmp_path, 2, 4)
    spoil(tmp_path, 2)
    spoil(tmp_path, 4)
    with capture_logs() as logs:
        store.save(state(6), Policy(6).save_state)
    assert [line["version"] for line in logs if line["log_level"] == "error"] == [4, 2]
    assert [state.version for state in store.kept] == [6]
    store.save(state(8), Policy(8).save_state)
    assert store.versions() == [6, 8]


def bytes_read(work: Callable[[], object]) -> int:
    """Bytes that this thread has read meanwhile, as the kernel counts them."""

    def count() -> int:
        lines = dict(line.split(": ") for line in Path("/proc/thread-self/io").read_text().splitlines())
        return int(lines["rchar"])

    before = count()
    work()
    return count() - before


LARGE = 4 << 20


def save_large(store: CheckpointStore, version: int) -> None:
    def write(folder: Path) -> None:
        save_file({"w": np.full(LARGE // 4, version, np.float32)}, folder / "model.safetensors")

    store.save(state(version), write)


def test_a_save_reads_its_own_bytes_and_not_those_of_older_checkpoints(tmp_path):
    store = CheckpointStore(tmp_path, keep=4)
    for version in (1, 2, 3):
        save_large(store, version)
    assert LARGE < bytes_read(lambda: save_large(store, 4)) < 1.5 * LARGE
    assert [kept.version for kept in store.kept] == [1, 2, 3, 4]


def test_checkpoints_of_an_earlier_process_are_read_once(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    for version in (1, 2):
        save_large(store, version)
    later = CheckpointStore(tmp_path, keep=3)
    assert 3 * LARGE < bytes_read(lambda: save_large(later, 3)) < 3.5 * LARGE
    assert LARGE < bytes_read(lambda: save_large(later, 4)) < 1.5 * LARGE


def test_an_older_checkpoint_whose_file_was_changed_is_read_and_does_not_count(tmp_path):
    store = saved(tmp_path, 1, 2, keep=2)
    file = folder_of(tmp_path, 2) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    store.save(state(3), Policy(3.0).save_state)
    assert [kept.version for kept in store.kept] == [1, 3]
    assert store.versions() == [1, 3]
