"""Delta files: what goes in comes out, and what is damaged is refused."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tidemill.common.errors import WeightsError
from tidemill.common.files import file_checksum
from tidemill.common.weights.bits import TensorInfo, safetensors_layout
from tidemill.common.weights.delta import WINDOW, DeltaWriter, delta_name, merge, read_delta, write_whole

pytestmark = pytest.mark.unit

BIG = TensorInfo("embedding", "BF16", (3, WINDOW))
WIDE = TensorInfo("scale", "F32", (8,))


def write(path: Path, *records: tuple[TensorInfo, list[int] | int, list[int]]) -> Path:
    writer = DeltaWriter(path)
    for info, places, values in records:
        bits = np.array(values, info.bits_dtype)
        if isinstance(places, int):
            writer.add_run(info, places, bits)
        else:
            writer.add(info, np.array(places, np.int64), bits)
    file = writer.write()
    assert (file.num_bytes, file.checksum) == (path.stat().st_size, file_checksum(path))
    return path


def read(*deltas: Path) -> dict[str, dict[int, int]]:
    values: dict[str, dict[int, int]] = {}
    for patch in merge([[path] for path in deltas]):
        pairs = zip(patch.all_positions().tolist(), patch.values.tolist(), strict=True)
        values.setdefault(patch.info.name, {}).update(pairs)
    return values


def test_values_come_out_as_bits_at_their_places_also_across_windows(tmp_path):
    # Gaps wider than 16 bits; NaN, -0.0; both sides of a window.
    places = [0, 65534, 131069, 196605, WINDOW - 1, WINDOW, 3 * WINDOW - 1]
    values = [0x7FC0, 0x8000, 0x0000, 0xFFFF, 1, 2, 3]
    path = write(tmp_path / delta_name(1, 2), (BIG, places, values), (WIDE, 2, [0x7FC00001, 0x80000000]))
    assert read(path) == {
        "embedding": dict(zip(places, values, strict=True)),
        "scale": {2: 0x7FC00001, 3: 2**31},
    }
    assert [record.window for record in read_delta(path)] == [0, 1, 2, 0]


def test_a_delta_without_changes_is_a_whole_file(tmp_path):
    assert read(write(tmp_path / "a.safetensors", (BIG, [], []))) == {}


def test_of_several_deltas_the_last_value_stands(tmp_path):
    first = write(tmp_path / "a.safetensors", (BIG, [5, 7, WINDOW], [1, 1, 1]), (WIDE, [0], [9]))
    second = write(tmp_path / "b.safetensors", (BIG, 6, [2, 2]))
    assert read(first, second) == {"embedding": {5: 1, 6: 2, 7: 2, WINDOW: 1}, "scale": {0: 9}}
    assert read(second, first)["embedding"] == {5: 1, 6: 2, 7: 1, WINDOW: 1}


def test_damage_anywhere_is_refused_or_changes_no_value(tmp_path):
    path = write(tmp_path / "a.safetensors", (BIG, [5, 70000], [1, 2]), (WIDE, 0, [3]))
    whole = path.read_bytes()
    values = read(path)
    for position in range(len(whole)):
        path.write_bytes(whole[:position])
        with pytest.raises(WeightsError, match=r"a\.safetensors"):
            read(path)
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x10]) + whole[position + 1 :])
        with suppress(WeightsError):  # a deflate stream ends with some bits that mean nothing
            assert read(path) == values


@pytest.mark.parametrize(
    ("info", "position"), [(TensorInfo("scale", "F32", (4,)), 3), (TensorInfo("scale", "F7", (8,)), 0)]
)
def test_records_that_cannot_be_are_refused(tmp_path, info, position):
    writer = DeltaWriter(tmp_path / "a.safetensors")
    writer._add(info, position, 2, bytes(8), is_sparse=False)
    writer.write()
    with pytest.raises(WeightsError):
        read_delta(writer.path)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (b'"00000001":', b'"00000002":', "records and headers do not match: 2 and 2"),
        (b'"shape"', b'"shade"', "its header lacks 'shape'"),
        (b'"dtype":"U8"', b'"dtype":"U7"', "00000000 has the dtype U7"),
    ],
)
def test_a_header_that_is_damaged_is_refused_in_plain_words(tmp_path, before, after, said):
    path = write(tmp_path / "a.safetensors", (BIG, [5], [1]), (WIDE, 0, [3]))
    whole = path.read_bytes()
    assert before in whole
    path.write_bytes(whole.replace(before, after, 1))
    with pytest.raises(WeightsError, match=said):
        read_delta(path)


def test_a_record_without_a_header_is_not_left_out(tmp_path):
    writer = DeltaWriter(tmp_path / "a.safetensors")
    writer.add(BIG, np.array([5]), np.array([1], np.uint16))
    writer.add(BIG, np.array([WINDOW]), np.array([2], np.uint16))
    del writer._headers[1]
    writer.write()
    with pytest.raises(WeightsError, match="records and headers do not match: 2 and 1"):
        read_delta(writer.path)


def test_deltas_of_different_tensors_under_one_name_are_refused(tmp_path):
    first = write(tmp_path / "a.safetensors", (WIDE, [0], [1]))
    second = write(tmp_path / "b.safetensors", (TensorInfo("scale", "F32", (9,)), [0], [1]))
    with pytest.raises(WeightsError, match=r"b\.safetensors"):
        list(merge([[first], [second]]))


def test_files_that_do_not_fit_are_refused_in_plain_words(tmp_path):
    head, _ = safetensors_layout([WIDE])
    full = tmp_path / "full.safetensors"
    full.write_bytes(head + bytes(WIDE.num_bytes))
    folder = tmp_path / "whole"
    folder.mkdir()
    with pytest.raises(WeightsError, match="it is no delta: its metadata lack records"):
        read_delta(full)
    for info, said in (
        (BIG, r"changes .*embedding.*, which the full version does not have"),
        (TensorInfo("scale", "F32", (9,)), r"changes .*\(9,\).*; the full version has .*\(8,\)"),
    ):
        delta = write(tmp_path / f"{info.name}.safetensors", (info, [0], [1]))
        with pytest.raises(WeightsError, match=said):
            write_whole([full], [[delta]], folder)
