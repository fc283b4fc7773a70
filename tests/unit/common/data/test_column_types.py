"""Columns of every type: the value in the row is the one that was written, whichever way it is read."""

import json
import uuid
from datetime import UTC, date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.late_imports import late
from tests.support.rows import read_dataset
from tidemill.common.config import DataConfig
from tidemill.common.data.data_files import open_rows
from tidemill.common.data.dataset import read_training_rows
from tidemill.common.errors import ConfigError

datasets = late("datasets")
MIXED = [
    {"prompt": "capital of France?", "ground_truth": "Paris"},
    {"prompt": "6 * 7?", "ground_truth": 42},
    {"prompt": [{"role": "user", "content": "first two primes?"}], "ground_truth": [2, 3]},
    {"prompt": "as an object?", "ground_truth": {"a": 1, "b": "x", "c": [0.1, True, None]}},
    {"prompt": "true?", "ground_truth": True},
]
"""Two columns whose values are of several types: `datasets` 5 stores both as JSON."""


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def write_column(path: Path, column: pa.Array, name: str = "value") -> str:
    pq.write_table(pa.table({name: column}), path)
    return str(path)


def as_json(*texts: str | None) -> pa.Array:
    return pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts))


def values_of(path: str, is_streamed: bool = False) -> list[Any]:
    return [columns["value"] for _, columns in open_rows(path, is_streamed)]


def mixed_jsonl(folder: Path) -> str:
    path = folder / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in MIXED))
    return str(path)


def mixed_dataset(folder: Path) -> Any:
    return datasets.load_dataset("json", data_files=mixed_jsonl(folder), split="train")


def mixed_parquet(folder: Path) -> str:
    path = folder / "mixed.parquet"
    mixed_dataset(folder).to_parquet(path)
    assert pq.read_schema(path).field("ground_truth").type == pa.json_(), "it is what this test is about"
    return str(path)


def mixed_folder(folder: Path) -> str:
    mixed_dataset(folder).save_to_disk(folder / "saved")
    return str(folder / "saved")


@pytest.mark.parametrize("write", [mixed_jsonl, mixed_parquet, mixed_folder])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_columns_of_mixed_types_have_the_values_that_were_written(tmp_path, write, is_streamed):
    rows = read_training_rows(DataConfig(train=write(tmp_path), stream=is_streamed))[""]
    assert [{"prompt": row.prompt, "ground_truth": row.ground_truth} for row in rows] == MIXED
    assert [type(row.ground_truth) for row in rows] == [str, int, list, dict, bool]


NUMBERS = [0.1, 1234567.123456789, 1.343642441124012e-07, 2**70]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_numbers_in_json_keep_every_digit(tmp_path, is_streamed):
    """`datasets` itself reads the third as 1.344e-07, and the last as text."""
    path = write_column(tmp_path / "a.parquet", as_json(*map(json.dumps, NUMBERS)))
    assert values_of(path, is_streamed) == NUMBERS


FLAT = pa.array([[0, 1, 2, 3, 4, 5]], pa.list_(pa.int32(), 6))
TENSORS = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8).reshape(2, 2, 2))
SOME_ID = uuid.UUID("e3ad37b2-c4b3-4e5e-bd86-61169d3ea9da")
OF_ARROW_ALONE = {
    "uuid": (pa.array([SOME_ID.bytes, None], pa.uuid()), [str(SOME_ID), None]),
    "bool8": (
        pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0, None], pa.int8())),
        [True, False, None],
    ),
    "opaque": (pa.ExtensionArray.from_storage(pa.opaque(pa.string(), "t", "v"), pa.array(["x"])), ["x"]),
    "opaque JSON": (
        pa.ExtensionArray.from_storage(pa.opaque(pa.json_(), "t", "v"), as_json("[1]")),
        [[1]],
    ),
    "tensor": (TENSORS, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
    "tensor of another order": (
        pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int32(), [2, 3], permutation=[1, 0]), FLAT),
        [[[0, 3], [1, 4], [2, 5]]],
    ),
    "map": (
        pa.array([[("a", 1), ("b", 2)], None], pa.map_(pa.string(), pa.int64())),
        [{"a": 1, "b": 2}, None],
    ),
}
"""Types that `datasets` cannot read."""
OF_BOTH = {
    "json": (as_json('"Paris"', "42", None, '{"a": [1]}'), ["Paris", 42, None, {"a": [1]}]),
    "list of json": (
        pa.ListArray.from_arrays([0, 2, 3], as_json('"a"', "1", '{"b": 2}')),
        [["a", 1], [{"b": 2}]],
    ),
    "struct of json": (
        pa.StructArray.from_arrays([as_json('"a"', "1"), pa.array([3, 4])], names=["truth", "n"]),
        [{"truth": "a", "n": 3}, {"truth": 1, "n": 4}],
    ),
    "list of struct of json": (
        pa.ListArray.from_arrays([0, 1], pa.StructArray.from_arrays([as_json("[7]")], names=["x"])),
        [[{"x": [7]}]],
    ),
    "dictionary": (pa.array(["a", "b", "a", None]).dictionary_encode(), ["a", "b", "a", None]),
    "large_string": (pa.array(["a"], pa.large_string()), ["a"]),
    "string_view": (pa.array(["a"], pa.string_view()), ["a"]),
    "text that looks like JSON": (pa.array(['"Paris"', "42"]), ['"Paris"', "42"]),
    "binary": (pa.array([b"\xff"]), [b"\xff"]),
    "decimal": (pa.array([Decimal("1.50")]), [Decimal("1.50")]),
    "date": (pa.array([date(2026, 1, 2)]), [date(2026, 1, 2)]),
    "time": (pa.array([time(1, 2, 3)]), [time(1, 2, 3)]),
    "timestamp": (
        pa.array([datetime(2026, 1, 2, tzinfo=UTC)], pa.timestamp("us", tz="UTC")),
        [datetime(2026, 1, 2, tzinfo=UTC)],
    ),
    "uint64": (pa.array([2**64 - 1], pa.uint64()), [2**64 - 1]),
    "bool": (pa.array([True, None]), [True, None]),
    "nested list": (pa.array([[[1], []], None]), [[[1], []], None]),
}


@pytest.mark.parametrize("name", [*OF_ARROW_ALONE, *OF_BOTH])
def test_each_type_of_arrow_has_its_value(tmp_path, name):
    column, expected = (OF_ARROW_ALONE | OF_BOTH)[name]
    values = values_of(write_column(tmp_path / "a.parquet", column))
    assert values == expected and list(map(type, values)) == list(map(type, expected))


@pytest.mark.parametrize("name", OF_BOTH)
def test_a_streamed_column_has_the_same_values(tmp_path, name):
    column, expected = OF_BOTH[name]
    values = values_of(write_column(tmp_path / "a.parquet", column), is_streamed=True)
    assert values == expected and list(map(type, values)) == list(map(type, expected))


def test_a_tensor_of_a_longer_order_has_each_number_once(tmp_path):
    """Arrow's specification: dimension i of the tensor is dimension `permutation[i]` of what is stored."""
    kind = pa.fixed_shape_tensor(pa.int32(), [2, 3, 2], permutation=[2, 0, 1])
    column = pa.ExtensionArray.from_storage(kind, pa.array([list(range(12))], pa.list_(pa.int32(), 12)))
    # Stored: [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]].
    expected = [[[0, 2, 4], [6, 8, 10]], [[1, 3, 5], [7, 9, 11]]]
    assert values_of(write_column(tmp_path / "a.parquet", column)) == [expected]


@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_a_saved_folder_that_asks_for_tensors_has_plain_values(tmp_path, form):
    rows = [{"prompt": "a", "ground_truth": [1, 2], "level": 3}]
    saved = datasets.Dataset.from_list(rows).with_format(form, columns=["ground_truth"])
    saved.save_to_disk(tmp_path / "saved")
    (row,) = read_dataset(tmp_path / "saved")
    assert (row.prompt, row.ground_truth, row.extra) == ("a", [1, 2], {"level": 3})
    assert type(row.ground_truth) is list and type(row.ground_truth[0]) is int


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_damaged_json_value_is_named_by_file_row_and_column(tmp_path, is_streamed):
    path = write_column(tmp_path / "a.parquet", as_json("1", "{torn"))
    with pytest.raises(ConfigError, match=r"a\.parquet row 1: column 'value' .* not valid JSON"):
        values_of(path, is_streamed)


def test_a_map_with_a_key_twice_is_refused(tmp_path):
    column = pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64()))
    with pytest.raises(ConfigError, match=r"row 0: column 'value' .* a key twice"):
        values_of(write_column(tmp_path / "a.parquet", column))


def twice_parquet(folder: Path) -> str:
    columns = [pa.array(["a"]), pa.array(["1"]), pa.array(["2"])]
    pq.write_table(pa.table(columns, names=["prompt", "answer", "answer"]), folder / "a.parquet")
    return str(folder / "a.parquet")


def twice_struct(folder: Path) -> str:
    struct = pa.StructArray.from_arrays([pa.array(["1"]), pa.array(["2"])], names=["answer", "answer"])
    return write_column(folder / "a.parquet", struct)


def text_file(name: str, text: str) -> Any:
    def write(folder: Path) -> str:
        (folder / name).write_text(text)
        return str(folder / name)

    return write


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (twice_parquet, "more than one column is called 'answer'"),
        (twice_struct, "more than one column is called 'answer'"),
        (
            text_file("a.csv", "prompt,answer,answer\na,1,2\n"),
            "line 1: more than one column is called 'answer'",
        ),
        (
            text_file("a.jsonl", '{"prompt": "a", "answer": "1", "answer": "2"}\n'),
            "line 1 .* 'answer' is there twice",
        ),
        (text_file("a.json", '[{"prompt": "a", "x": {"y": 1, "y": 2}}]'), "'y' is there twice"),
    ],
)
def test_of_two_values_with_one_name_none_is_dropped_in_silence(tmp_path, write, words):
    with pytest.raises(ConfigError, match=words):
        read_dataset(write(tmp_path))


def test_a_row_of_python_code_that_is_no_dict_is_named(tmp_path):
    (tmp_path / "mine.py").write_text("rows = [{'prompt': 'a', 'answer': '1'}, [('prompt', 'b')]]\n")
    with pytest.raises(ConfigError, match=r"mine\.py:rows cannot be read: TypeError: row 1 is a list"):
        read_dataset(f"{tmp_path}/mine.py:rows")


def test_a_line_that_ends_early_is_not_a_row_with_nulls(tmp_path):
    path = text_file("a.csv", "prompt,answer,note\na,1,\nb,2\n")(tmp_path)
    with pytest.raises(ConfigError, match="line 3 has fewer values"):
        read_dataset(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_number_of_more_digits_than_python_reads_is_refused(tmp_path, name):
    row = '{"prompt": "a", "answer": ' + "9" * 5000 + "}"
    path = text_file(name, row if name == "a.jsonl" else f"[{row}]")(tmp_path)
    with pytest.raises(ConfigError, match=name):
        read_dataset(path)
