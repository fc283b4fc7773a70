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
from tidemill.services.trainer.durable.checkpoint import CheckpointError, CheckpointStore, TrainerState


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


def loaded(run_dir: Path, keep: int = 2) -> tuple[int, float] | None:
    """Version and policy value after a restart."""
    checkpoint = CheckpointStore(run_dir, keep).load_latest()
    if checkpoint is None:
        return None
    policy = Policy()
    policy.load_state(checkpoint.folder)
    return checkpoint.state.version, policy.value


def test_a_run_without_checkpoints_starts_from_nothing(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path, keep=2).load_latest() is None


def test_state_and_tensors_come_back_as_they_were_saved(tmp_path: Path) -> None:
    saved = state(
        12,
        positions={"trajectories": "1700000000000-3", "scores": "0-0"},
        scheduler={"next_ticket": 96, "outstanding": [90, 91]},
        intake={"groups": {"90": [0, 2]}},
        data={"position": 96, "fingerprint": "ab"},
        counters={"tokens": 123_456_789, "seconds": 1.5},
        digest="0" * 32,
    )
    CheckpointStore(tmp_path, keep=2).save(saved, Policy(4.0).save_state)
    checkpoint = CheckpointStore(tmp_path, keep=2).load_latest()
    assert checkpoint is not None and checkpoint.state == saved
    assert loaded(tmp_path) == (12, 4.0)


def test_a_restarted_trainer_knows_the_states_of_all_that_can_be_restored(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for version in (2, 4, 6):
        store.save(state(version), Policy(version).save_state)
    (tmp_path / "checkpoints" / "v00000004" / "checkpoint.json").write_text("{")
    assert [known.version for known in CheckpointStore(tmp_path, keep=3).states()] == [2, 6]


def test_older_ones_are_given_up_only_for_a_newest_that_can_be_read_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for version in (2, 4, 6):
        store.save(state(version), Policy(version).save_state)
    tensors = tmp_path / "checkpoints" / "v00000006" / "model.safetensors"
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:-1] + b"?")
    assert not store.keep_only(6)
    assert store.versions() == [2, 4, 6]
    tensors.write_bytes(whole)
    assert store.keep_only(6)
    assert loaded(tmp_path) == (6, 6.0)
    assert store.versions() == [6]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for version in (2, 4, 6):
        store.save(state(version), Policy(version).save_state)
    assert store.versions() == [4, 6]
    assert sorted(os.listdir(store.folder)) == ["v00000004", "v00000006"]


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"intake": {"groups": {90: [0]}}}, "intake would come back different"),
        ({"scheduler": {"span": (1, 2)}}, "scheduler would come back different"),
        ({"extra": {"loss": float("nan")}}, "not plain JSON"),
        ({"extra": {"array": np.zeros(2)}}, "not plain JSON"),
    ],
)
def test_a_state_that_json_would_change_is_refused_when_saved(
    tmp_path: Path, fields: dict[str, Any], match: str
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(ValueError, match=match):
        store.save(state(1, **fields), Policy().save_state)
    assert os.listdir(store.folder) == []


def test_a_position_that_is_no_entry_id_is_refused() -> None:
    with pytest.raises(ValueError, match="not an entry id"):
        state(1, positions={"scores": "$"})


class Crash(BaseException):
    """The machine stopped. Not an Exception, and nothing on the disk can be changed after it."""


class Machine:
    """Stops at the n-th call that changes the disk durably; what was running cannot clean up after itself."""

    CALLS = (
        (os, "rename"),
        (os, "replace"),
        (os, "fsync"),
        (os, "mkdir"),
        (shutil, "rmtree"),
        (os, "unlink"),
    )

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
def test_after_a_crash_at_any_point_the_old_or_the_new_checkpoint_is_whole(
    tmp_path: Path, version: int
) -> None:
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


def truncate_tensors(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 40)


def flip_a_bit(folder: Path) -> None:
    path = folder / "optimizer" / "moments.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)


def edit_the_state(folder: Path) -> None:
    path = folder / "checkpoint.json"
    path.write_text(path.read_text().replace('"version": 2', '"version": 1'))


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (truncate_tensors, "model.safetensors has 40 bytes instead of"),
    (flip_a_bit, "optimizer/moments.safetensors does not match its checksum"),
    (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    (lambda folder: (folder / "checkpoint.json").unlink(), "checkpoint.json is missing"),
    (lambda folder: os.truncate(folder / "checkpoint.json", 60), "checkpoint.json is cut off"),
    (lambda folder: (folder / "checkpoint.json").write_text("[1]"), "checkpoint.json is cut off or not JSON"),
    (lambda folder: os.truncate(folder / "checkpoint.json", 0), "checkpoint.json is cut off"),
    (edit_the_state, "checkpoint.json does not match its own checksum"),
]


@pytest.mark.parametrize(("damage", "problem"), DAMAGES, ids=[problem for _, problem in DAMAGES])
def test_a_torn_checkpoint_is_named_in_the_log_and_the_one_before_is_loaded(
    tmp_path: Path, damage: Callable[[Path], object], problem: str
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(state(1), Policy(1.0).save_state)
    damage(store.save(state(2), Policy(2.0).save_state))
    with capture_logs() as logs:
        assert loaded(tmp_path) == (1, 1.0)
    assert logs[0]["log_level"] == "warning" and logs[0]["version"] == 2
    assert problem in logs[0]["problem"]


def test_a_file_that_is_a_link_out_of_the_checkpoint_is_not_read(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(state(1), Policy(1.0).save_state)
    folder = store.save(state(2), Policy(2.0).save_state)
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    assert loaded(tmp_path) == (1, 1.0)


def test_when_no_checkpoint_is_whole_the_run_does_not_silently_start_over(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for version in (1, 2):
        truncate_tensors(store.save(state(version), Policy(version).save_state))
    with pytest.raises(
        CheckpointError, match=r"none of the 2 checkpoint\(s\)(.|\n)*v00000002: model.*(.|\n)*v00000001"
    ):
        store.load_latest()


def test_a_checkpoint_under_the_name_of_another_version_is_passed_over(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    folder = store.save(state(1), Policy(1.0).save_state)
    shutil.copytree(folder, store.folder / "v00000009")
    with capture_logs() as logs:
        checkpoint = store.load_latest()
    assert checkpoint is not None and checkpoint.folder == folder
    assert logs[0]["problem"] == "checkpoint.json is that of version 1"


def test_a_torn_checkpoint_does_not_count_among_those_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(state(1), Policy(1.0).save_state)
    shutil.copytree(store.folder / "v00000001", store.folder / "v00000009")  # that of another version: torn
    assert loaded(tmp_path, keep=1) == (1, 1.0)
    store.save(state(5), Policy(5.0).save_state)
    assert store.versions() == [5]
    assert loaded(tmp_path, keep=1) == (5, 5.0)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change checkpoint.json as another release would write it: with a valid checksum."""
    from tidemill.services.trainer.durable import checkpoint

    path = folder / "checkpoint.json"
    document = json.loads(path.read_text())
    del document["checksum"]
    change(document)
    path.write_text(json.dumps({**document, "checksum": checkpoint._checksum(document)}))


def test_a_checkpoint_of_a_newer_minor_release_is_read_without_its_new_fields(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path, keep=2).save(state(1), Policy(1.0).save_state)
    rewrite(
        folder, lambda document: (document.update(schema="2.7"), document["state"].update(curriculum=[1]))
    )
    assert loaded(tmp_path) == (1, 1.0)


@pytest.mark.parametrize("schema", ["1.0", "3.0"])
def test_a_checkpoint_of_another_major_release_is_refused_and_not_skipped(
    tmp_path: Path, schema: str
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.save(state(1), Policy(1.0).save_state)
    rewrite(store.save(state(2), Policy(2.0).save_state), lambda document: document.update(schema=schema))
    with pytest.raises(CheckpointError, match=f"schema {schema}"):
        store.load_latest()


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device; free some space"),
        (errno.EROFS, "Read-only file system; mount it writable"),
        (errno.EACCES, "Permission denied; give this user permission"),
    ],
)
def test_a_disk_that_cannot_be_written_is_told_in_plain_words_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(state(1), Policy(1.0).save_state)

    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "fsync", fail)
        with pytest.raises(StorageError, match=f"the checkpoint of version 2 .*{words}") as caught:
            store.save(state(2), Policy(2.0).save_state)
    assert caught.value.can_clear
    assert os.listdir(store.folder) == ["v00000001"]
    store.save(state(2), Policy(2.0).save_state)
    assert loaded(tmp_path) == (2, 2.0)


def spoil(run_dir: Path, version: int) -> None:
    """What a failing disk does: a byte is another one, the size is the same."""
    tensors = run_dir / "checkpoints" / f"v{version:08d}" / "model.safetensors"
    content = tensors.read_bytes()
    tensors.write_bytes(content[:-1] + bytes([content[-1] ^ 0xFF]))


def test_a_torn_checkpoint_does_not_count_as_kept(tmp_path: Path) -> None:
    """Or the good one before it would go, and the next damage would end the run."""
    store = CheckpointStore(tmp_path, keep=2)
    for version in (2, 4):
        store.save(state(version), Policy(version).save_state)
    spoil(tmp_path, 4)
    store.save(state(6), Policy(6).save_state)
    assert [known.version for known in store.kept] == [2, 6]
    spoil(tmp_path, 6)
    assert loaded(tmp_path) == (2, 2.0)


def test_two_damages_in_a_row_leave_one_to_continue_from_after_a_restart(tmp_path: Path) -> None:
    for version in (2, 4):
        CheckpointStore(tmp_path, keep=2).save(state(version), Policy(version).save_state)
    spoil(tmp_path, 4)
    assert loaded(tmp_path) == (2, 2.0)
    CheckpointStore(tmp_path, keep=2).save(state(3), Policy(3).save_state)
    spoil(tmp_path, 3)
    assert loaded(tmp_path) == (2, 2.0)


def test_a_torn_checkpoint_goes_when_enough_whole_ones_are_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for version in (2, 4):
        store.save(state(version), Policy(version).save_state)
    spoil(tmp_path, 2)
    spoil(tmp_path, 4)
    with capture_logs() as logs:
        store.save(state(6), Policy(6).save_state)
    assert [line["version"] for line in logs if line["log_level"] == "error"] == [4, 2]
    assert [known.version for known in store.kept] == [6]
    store.save(state(8), Policy(8).save_state)
    assert store.versions() == [6, 8]
