"""Delta files: what goes in comes out, and what is damaged is refused."""

from pathlib import Path

import numpy as np
import pytest

from tidemill.common.errors import WeightsError
from tidemill.common.files import file_checksum
from tidemill.common.weights.bits import TensorInfo
from tidemill.common.weights.delta import WINDOW, DeltaReader, DeltaWriter, delta_name
from tidemill.common.weights.merge import merge

pytestmark = pytest.mark.unit

BIG = TensorInfo("embedding", "BF16", (3, WINDOW))
WIDE = TensorInfo("scale", "F32", (8,))


def write(path: Path, *records: tuple[TensorInfo, list[int] | int, list[int]], version: int = 2) -> Path:
    writer = DeltaWriter(path, version, version - 1, rank=1, size=2)
    for info, places, values in records:
        bits = np.array(values, info.bits_dtype)
        if isinstance(places, int):
            writer.add_run(info, places, bits)
        else:
            writer.add(info, np.array(places, np.int64), bits)
    file = writer.close()
    assert (file.num_bytes, file.checksum) == (path.stat().st_size, file_checksum(path))
    return path


def read(*deltas: Path) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = {}
    for patch in merge([[path] for path in deltas]):
        pairs = zip(patch.all_positions().tolist(), patch.values.tolist(), strict=True)
        found.setdefault(patch.info.name, {}).update(pairs)
    return found


def test_values_come_out_as_bits_at_their_places_also_across_escapes_and_windows(tmp_path: Path) -> None:
    # Gaps of 65,534, 65,535 and 65,536 from one element to the next; NaN, -0.0; both sides of a window.
    places = [0, 65534, 131069, 196605, WINDOW - 1, WINDOW, 3 * WINDOW - 1]
    values = [0x7FC0, 0x8000, 0x0000, 0xFFFF, 1, 2, 3]
    path = write(tmp_path / delta_name(1, 2), (BIG, places, values), (WIDE, 2, [0x7FC00001, 0x80000000]))
    assert read(path) == {
        "embedding": dict(zip(places, values, strict=True)),
        "scale": {2: 0x7FC00001, 3: 2**31},
    }
    with DeltaReader(path) as reader:
        assert (reader.version, reader.parent, reader.rank, reader.size) == (2, 1, 1, 2)
        assert [record.window for record in reader.records()] == [0, 1, 2, 0]


def test_a_delta_without_changes_is_a_whole_file(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.tmd", (BIG, [], []))) == {}


def test_of_several_deltas_the_last_value_stands(tmp_path: Path) -> None:
    first = write(tmp_path / "a.tmd", (BIG, [5, 7, WINDOW], [1, 1, 1]), (WIDE, [0], [9]))
    second = write(tmp_path / "b.tmd", (BIG, 6, [2, 2]))
    assert read(first, second) == {"embedding": {5: 1, 6: 2, 7: 2, WINDOW: 1}, "scale": {0: 9}}
    assert read(second, first)["embedding"] == {5: 1, 6: 2, 7: 1, WINDOW: 1}


def test_a_file_that_is_cut_short_or_damaged_anywhere_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tmd", (BIG, [5, 70000], [1, 2]), (WIDE, 0, [3]))
    whole = path.read_bytes()
    for place in range(len(whole)):
        for bad in (whole[:place], whole[:place] + bytes([whole[place] ^ 0x10]) + whole[place + 1 :]):
            path.write_bytes(bad)
            with pytest.raises(WeightsError, match=r"delta file .*a\.tmd"), DeltaReader(path) as reader:
                list(reader.records())
                list(reader.patches())


@pytest.mark.parametrize(
    ("info", "place"),
    [(TensorInfo("scale", "F32", (4,)), 3), (TensorInfo("scale", "F7", (8,)), 0)],
)
def test_records_that_cannot_be_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, info: TensorInfo, place: int
) -> None:
    path = tmp_path / "a.tmd"
    writer = DeltaWriter(path, 2, 1)
    writer._record(info, place, 2, "dense", bytes(8))
    writer.close()
    with pytest.raises(WeightsError, match="record 0"), DeltaReader(path) as reader:
        list(reader.records())


def test_deltas_of_different_tensors_under_one_name_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "a.tmd", (WIDE, [0], [1]))
    second = write(tmp_path / "b.tmd", (TensorInfo("scale", "F32", (9,)), [0], [1]))
    with pytest.raises(WeightsError, match="in an earlier delta"):
        list(merge([[first], [second]]))
