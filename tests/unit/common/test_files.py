"""Files are whole or absent, whatever fails while they are written."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from safetensors import SafetensorError

from tests.support.disks import largest_file
from tidemill.common import files
from tidemill.common.files import (
    StorageError,
    append_durably,
    aside_file,
    aside_folder,
    clear_aside,
    did_you_mean,
    file_checksum,
    publish_file,
    publish_folder,
    retire_folder,
    storage_errors,
    write_atomically,
)


def fail_with(number: int):
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_an_atomic_write_replaces_the_whole_file_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, "a long first content")
    write_atomically(path, b"short")
    assert path.read_bytes() == b"short"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch, call):
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    monkeypatch.setattr(files.os, call, fail_with(errno.ENOSPC))
    with pytest.raises(StorageError, match="No space left on device; free some space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize(
    ("number", "can_clear"),
    [
        (errno.ENOSPC, True),
        (errno.EDQUOT, True),
        (errno.EROFS, True),
        (errno.EACCES, True),
        (errno.ENOTDIR, False),
    ],
)
def test_a_storage_error_says_whether_waiting_makes_sense(number, can_clear):
    with (
        pytest.raises(StorageError, match="cannot write the weights to /x: ") as caught,
        storage_errors("the weights", Path("/x")),
    ):
        fail_with(number)()
    assert caught.value.can_clear is can_clear
    assert caught.value.errno == number


def test_a_full_disk_inside_safetensors_is_the_same_error():
    with (
        pytest.raises(StorageError, match="No space left on device") as caught,
        storage_errors("x", Path("/x")),
    ):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert caught.value.errno == errno.ENOSPC and caught.value.can_clear


class Flushes:
    """What has been flushed, and what had been when each name was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inodes: set[int] = set()
        self.at_rename: list[set[int]] = []
        fsync = os.fsync
        replace = os.replace
        rename = os.rename

        def note_fsync(descriptor: int) -> None:
            self.inodes.add(os.fstat(descriptor).st_ino)
            fsync(descriptor)

        def noting(give_name: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
            def note_name(source: Any, target: Any) -> None:
                self.at_rename.append(set(self.inodes))
                give_name(source, target)

            return note_name

        monkeypatch.setattr(files.os, "fsync", note_fsync)
        monkeypatch.setattr(files.os, "replace", noting(replace))
        monkeypatch.setattr(files.os, "rename", noting(rename))


def write_whole_file(target: Path) -> None:
    write_atomically(target, "new")


def publish_one_file(target: Path) -> None:
    with aside_file(target) as aside:
        aside.write_text("new")
        publish_file(aside, target)


def publish_filled_folder(target: Path) -> None:
    was_there = target.exists()
    with aside_folder(target) as aside:
        (aside / "below").mkdir()
        (aside / "a").write_text("a")
        (aside / "below" / "b").write_text("b")
        assert target.exists() == was_there
        publish_folder(aside, target)


@pytest.mark.parametrize("publish", [write_whole_file, publish_one_file, publish_filled_folder])
def test_a_name_is_given_by_one_rename_after_all_below_it_is_flushed(tmp_path, monkeypatch, publish):
    """After a power failure a name must not refer to bytes that were lost."""
    flushes = Flushes(monkeypatch)
    target = tmp_path / "v1"
    publish(target)
    inodes = {path.stat().st_ino for path in (target, *target.rglob("*"))}
    assert len(flushes.at_rename) == 1 and inodes <= flushes.at_rename[0]
    folder = tmp_path.stat().st_ino
    assert folder in flushes.inodes - flushes.at_rename[0], "the rename itself must be flushed too"
    assert os.listdir(tmp_path) == ["v1"]


def test_an_old_folder_keeps_its_name_until_the_new_one_is_flushed(tmp_path, monkeypatch):
    publish_filled_folder(tmp_path / "v1")
    flushes = Flushes(monkeypatch)
    publish_filled_folder(tmp_path / "v1")
    inodes = {path.stat().st_ino for path in (tmp_path / "v1").rglob("*")}
    assert [inodes <= flushed for flushed in flushes.at_rename] == [True, True]


def test_a_removed_folder_has_lost_its_name_for_good_before_its_bytes_go(tmp_path, monkeypatch):
    publish_filled_folder(tmp_path / "v1")
    flushes = Flushes(monkeypatch)
    there_at_flush: list[list[Path]] = []
    fsync = files.fsync_folder

    def note(folder: Path) -> None:
        there_at_flush.append(sorted(folder.rglob("b")))
        fsync(folder)

    monkeypatch.setattr(files, "fsync_folder", note)
    retire_folder(tmp_path / "v1")
    assert [len(paths) for paths in there_at_flush] == [1]
    assert tmp_path.stat().st_ino in flushes.inodes
    assert os.listdir(tmp_path) == []


def test_published_files_are_readable_by_whoever_may_read_the_folder(tmp_path):
    target = tmp_path / "v1"
    with aside_folder(target) as aside:
        (aside / "model.safetensors").touch(mode=0o600)
        publish_folder(aside, target)
    assert (target / "model.safetensors").stat().st_mode & 0o777 == target.stat().st_mode & 0o666


def test_an_error_while_a_folder_is_filled_leaves_the_old_one(tmp_path):
    target = tmp_path / "v1"
    target.mkdir()
    (target / "a").write_text("old")
    with (
        pytest.raises(StorageError, match="the weights of version 1"),
        aside_folder(target, "the weights of version 1") as aside,
    ):
        (aside / "a").write_text("new")
        fail_with(errno.ENOSPC)()
    assert (target / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["v1"]


def test_what_a_crash_left_is_cleared_and_everything_else_stays(tmp_path):
    (tmp_path / ".v1.0a1b2c3d.aside").mkdir()
    (tmp_path / ".a.json.0a1b2c3d.aside").write_text("x")
    (tmp_path / ".hidden").write_text("the user's own")
    (tmp_path / "v2").mkdir()
    assert clear_aside(tmp_path) == [".a.json.0a1b2c3d.aside", ".v1.0a1b2c3d.aside"]
    assert sorted(os.listdir(tmp_path)) == [".hidden", "v2"]


def test_a_crash_between_the_two_renames_of_a_replacement_brings_the_old_folder_back(tmp_path):
    (tmp_path / ".v1.replaced").mkdir()
    (tmp_path / ".v1.replaced" / "a").write_text("old")
    clear_aside(tmp_path)
    assert (tmp_path / "v1" / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["v1"]


@pytest.mark.parametrize("size", [0, 1, 1000, (1 << 16) + 7])
def test_the_checksum_is_xxh3_128_of_all_bytes_however_they_are_read(tmp_path, monkeypatch, size):
    monkeypatch.setattr(files, "CHUNK_BYTES", 1 << 10)
    data = bytes(i % 251 for i in range(size))
    (tmp_path / "f").write_bytes(data)
    assert file_checksum(tmp_path / "f") == xxhash.xxh3_128_hexdigest(data)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_what_a_full_disk_does_not_take_whole_is_not_appended_in_part(tmp_path, share):
    path = tmp_path / "lines"
    data = b"x" * 9999 + b"\n"
    append_durably(path, data)
    with largest_file(int((1 + share) * len(data))), pytest.raises(StorageError):
        append_durably(path, data)
    assert path.read_bytes() == data
    append_durably(path, b"y")
    append_durably(path, b"z", end=len(data))
    assert path.read_bytes() == data + b"z"


def test_a_missing_file_is_compared_with_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "model").mkdir()
    assert did_you_mean(tmp_path / "trian.jsonl") == f" Did you mean {tmp_path / 'train.jsonl'}?"
    assert did_you_mean(tmp_path / "modle", Path.is_dir) == f" Did you mean {tmp_path / 'model'}?"
    assert did_you_mean(tmp_path / "modle") == "", "a file was meant"
    assert did_you_mean(tmp_path / "data" / "train.jsonl") == ""
