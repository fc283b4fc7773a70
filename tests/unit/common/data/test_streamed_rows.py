"""Rows that stay on the disk, and datasets of the hub: the same rows as when all are read."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.late_imports import late
from tests.support.rows import read_dataset
from tidemill.common.config import DataConfig
from tidemill.common.data.dataset import read_evaluation_rows, read_training_rows
from tidemill.common.errors import ConfigError

datasets = late("datasets")
ROWS = [{"prompt": f"what is {i}?", "ground_truth": str(i), "level": i % 3} for i in range(7)]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def jsonl(folder: Path, name: str = "rows.jsonl", rows: list[dict[str, Any]] = ROWS) -> Path:
    """With a byte order mark and lines that are empty."""
    lines = ["\ufeff" + json.dumps(rows[0]), "", *(json.dumps(row) for row in rows[1:]), "  "]
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


def parquet(folder: Path) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "rows.parquet")
    return folder / "rows.parquet"


def saved(folder: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return folder / "saved"


@pytest.mark.parametrize("make", [jsonl, parquet, saved])
def test_streamed_rows_are_those_that_are_read_at_once(tmp_path, make):
    path = str(make(tmp_path))
    whole = read_dataset([path, path])
    streamed = read_training_rows(DataConfig(train=[path, path], stream=True))[""]
    assert len(streamed) == len(whole) == 14
    assert [streamed[number] for number in reversed(range(14))] == whole[::-1]
    assert streamed[3:9] == whole[3:9]
    with pytest.raises(IndexError):
        streamed[14]


def test_sources_name_their_rows(tmp_path):
    rows = [{**ROWS[0], "data_source": "own", "environment": "own"}, *ROWS[1:3]]
    path = str(jsonl(tmp_path, rows=rows))
    for is_streamed in (False, True):
        train = [{"name": "a", "path": path}, {"name": "b", "path": path, "data_source": "given"}]
        train[1]["environment"] = "shop"
        data = DataConfig.model_validate({"train": train, "eval": {"held": path}, "stream": is_streamed})
        by_source = read_training_rows(data)
        assert [(row.source, row.data_source) for row in by_source["a"]] == [("a", "own"), *[("a", "a")] * 2]
        assert [row.data_source for row in by_source["b"]] == ["own", "given", "given"]
        assert [row.extra["environment"] for row in by_source["b"]] == ["own", "shop", "shop"]
        assert [row.extra.get("environment") for row in by_source["a"]] == ["own", None, None]
        assert [row.source for row in read_evaluation_rows(data, 1)["held"]] == ["held"]


def test_a_folder_with_splits_is_asked_for_one(tmp_path):
    splits = {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert len(read_dataset(tmp_path / "saved")) == 7
    assert len(read_dataset(f"{tmp_path / 'saved'}@test")) == 2
    with pytest.raises(ConfigError, match="cannot be opened"):
        read_dataset(f"{tmp_path / 'saved'}@other")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("hub:openai/gsm8k/main@test", ("openai/gsm8k", "main", "test")),
        ("hub:openai/gsm8k", ("openai/gsm8k", None, "train")),
        ("hub:squad@train[:10%]", ("squad", None, "train[:10%]")),
    ],
)
def test_a_name_of_the_hub_says_dataset_config_and_split(path, asked, monkeypatch):
    calls: list[Any] = []

    def load(name, config, split):
        calls.append((name, config, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr("datasets.load_dataset", load)
    rows = read_dataset(path)
    assert calls == [asked]
    assert (rows[6].origin, rows[6].ground_truth) == (f"{path} row 6", "6")


def test_a_name_of_another_form_says_what_is_expected():
    with pytest.raises(ConfigError, match="expected hub:OWNER/NAME"):
        read_dataset("hub:a/b/c/d")


def test_without_the_package_the_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'tidemill\[datasets\]'"):
        read_dataset("hub:openai/gsm8k")


def test_a_file_that_is_written_while_it_is_read_is_noticed(tmp_path):
    path = jsonl(tmp_path)
    rows = read_training_rows(DataConfig(train=str(path), stream=True))[""]
    with open(path, "a") as file:
        file.write("{}\n")
    with pytest.raises(ConfigError, match="was changed while the run reads it"):
        rows[0]


@pytest.mark.parametrize(("text", "said"), [("\n \n", "has no rows"), ("[1]\n", "expected a JSON object")])
def test_streamed_files_have_the_errors_of_others(tmp_path, text, said):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=said):
        list(read_training_rows(DataConfig(train=str(tmp_path / "rows.jsonl"), stream=True))[""])


def test_own_names_hold_for_streamed_rows_and_sources(tmp_path):
    path = str(jsonl(tmp_path, rows=[{"text": "hi", "label": "ho"}]))
    columns = {"prompt": "text", "ground_truth": "label"}
    for is_streamed in (False, True):
        data = DataConfig(train=path, columns=columns, stream=is_streamed)
        sources = DataConfig(train=[{"name": "a", "path": path, "columns": columns}], stream=is_streamed)
        assert (read_training_rows(data)[""][0].prompt, read_training_rows(sources)["a"][0].prompt) == (
            "hi",
            "hi",
        )


def test_what_is_read_as_a_whole_is_not_streamed(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\nhi,ho\n")
    with pytest.raises(ConfigError, match="cannot be read row by row"):
        read_training_rows(DataConfig(train=str(tmp_path / "a.csv"), stream=True))
