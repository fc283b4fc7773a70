"""Pictures of rows: verl's and TRL's columns, parts of messages, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.vision import file_of, noise
from tidemill.common.config.data import DataConfig
from tidemill.common.config.run import RunConfig
from tidemill.common.data.dataset import Row, read_training_rows
from tidemill.common.data.image_columns import with_parts
from tidemill.common.data.prompt_text import chat_messages
from tidemill.common.errors import BrokenImageError, ConfigError
from tidemill.common.images.sources import ImageSource

PNG = file_of(noise(4, 4))
QUESTION = [{"role": "user", "content": "<image>How many?"}]
VERL: dict[str, Any] = {
    "data_source": "shapes",
    "prompt": QUESTION,
    "images": [{"bytes": PNG, "path": None}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
}


def section(train: str, has_images: bool = True, **fields: Any) -> DataConfig:
    data = DataConfig.model_validate({"train": train, **fields})
    if has_images:
        data.with_images()
    return data


def rows_of(tmp_path: Path, *rows: dict[str, Any], is_parquet: bool = True, **fields: Any) -> list[Row]:
    path = tmp_path / ("a.parquet" if is_parquet else "a.jsonl")
    if is_parquet:
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_training_rows(section(str(path), **fields))[""])


def contents(row: Row, **fields: Any) -> list[Any]:
    """For each message, its parts: text as it is, a picture as None."""
    messages = chat_messages(row, section("unused.jsonl", **fields))
    texts = []
    for message in messages:
        texts.append([content.get("text") for content in message["content"]])
    return texts


@pytest.mark.parametrize("is_streamed", [False, True])
def test_verls_bytes_in_parquet_and_its_marks_in_the_text(tmp_path, is_streamed):
    second = {
        **VERL,
        "prompt": [{"role": "user", "content": "<image> or <image>\n?"}],
        "images": VERL["images"] * 2,
    }
    first, two = rows_of(tmp_path, VERL, second, stream=is_streamed)
    assert first.images == (ImageSource(content=PNG),)
    assert contents(first) == [[None, "How many?"]]
    assert contents(two) == [[None, " or ", None, "\n?"]]
    assert "images" not in first.extra, "pixels never go through Redis"
    assert first.ground_truth == "2"


@pytest.mark.parametrize("name", ["image", "images"])
def test_trls_column_without_marks_puts_pictures_first(tmp_path, name):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
    rows = [{"prompt": prompt, name: "a.png", "solution": "2"} for prompt in ("How many?", chat)]
    plain, dialogue = rows_of(tmp_path, *rows, is_parquet=False)
    assert plain.images == (ImageSource(path=str(tmp_path / "a.png"), label="PNG"),)
    assert contents(plain) == [[None, "How many?"]]
    assert contents(dialogue) == [["Be brief."], [None, "How many?"]]
    assert name not in plain.extra and plain.ground_truth == "2"


def test_parts_of_messages_have_pictures_or_take_those_of_the_column(tmp_path):
    parts = [
        {"type": "image_url", "image_url": {"url": "https://a.example/1.png"}},
        {"type": "text", "text": "and <image>"},
        {"type": "image"},
        {"type": "image", "image": "two.png"},
    ]
    row: dict[str, Any] = {
        "messages": [{"role": "user", "content": parts}],
        "images": ["column.png"],
        "answer": "2",
    }
    (row_read,) = rows_of(tmp_path, row, is_parquet=False)
    assert [source.name.rpartition("/")[2] for source in row_read.images] == [
        "1.png",
        "column.png",
        "two.png",
    ]
    assert contents(row_read) == [[None, "and <image>", None, None]], "a mark in a text is text beside parts"
    kinds = [content["type"] for content in row_read.extra["prompt"][0]["content"]]
    assert kinds == ["image", "text", "image", "image"]
    assert "a.example" not in json.dumps(row_read.extra)


def test_parts_in_parquet_have_nulls_for_the_keys_of_others(tmp_path):
    parts = [{"type": "image", "image": {"bytes": PNG}}, {"type": "text", "text": "How many?"}]
    row = {"prompt": [{"role": "user", "content": parts}], "solution": "2"}
    (row_read,) = rows_of(tmp_path, row)
    assert row_read.images == (ImageSource(content=PNG),)
    assert contents(row_read) == [[None, "How many?"]]


def test_a_chat_that_ends_with_its_answer_is_a_question_with_a_truth(tmp_path):
    answer = {"role": "assistant", "content": [{"type": "text", "text": "two"}]}
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
    (row,) = rows_of(tmp_path, {"messages": [question, answer], "images": ["a.png"]}, is_parquet=False)
    assert (row.ground_truth, contents(row)) == ("two", [[None, "?"]])


def test_a_column_of_another_name_is_named_and_never_sent(tmp_path):
    row = {
        "prompt": "How many?",
        "solution": "2",
        "meta": {"picture": "a.png"},
        "shot": VERL["images"],
        "level": 3,
    }
    (row_read,) = rows_of(tmp_path, row, columns={"images": "shot"})
    assert row_read.images == (ImageSource(content=PNG),)
    assert row_read.extra == {"solution": "2", "meta": {"picture": "a.png"}, "level": 3}
    (row_read,) = rows_of(tmp_path, row, columns={"images": "meta.picture"})
    assert row_read.images[0].path == str(tmp_path / "a.png")
    assert row_read.extra == {"solution": "2", "level": 3}, (
        "what holds the picture, and other pictures, stay out"
    )


def test_suffix_and_system_prompt_are_parts_too(tmp_path):
    (row,) = rows_of(tmp_path, VERL)
    fields = {"system_prompt": "Be brief.", "prompt_suffix": " Think."}
    assert contents(row, **fields) == [["Be brief."], [None, "How many?", " Think."]]


def test_a_row_of_text_in_a_run_with_pictures_has_parts_of_text(tmp_path):
    (row,) = rows_of(tmp_path, {"prompt": "1 + 1 <image>?", "solution": "2"}, is_parquet=False)
    assert contents(row) == [["1 + 1 <image>?"]]


def test_places_and_pictures_are_counted_for_each_row():
    user = {"role": "user", "content": "<image> <image>"}
    for messages, count in (
        ([user], 1),
        ([user], 3),
        ([{"role": "user", "content": [{"type": "image"}]}], 2),
    ):
        with pytest.raises(BrokenImageError, match="places"):
            with_parts(messages, count)
    with pytest.raises(BrokenImageError, match="role user"):
        with_parts([{"role": "system", "content": "x"}], 1)
    assert len(with_parts([user, user], 4)[1]["content"]) == 3


def test_a_part_without_a_picture_has_its_reason(tmp_path):
    row: dict[str, Any] = {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "2"}
    (row_read,) = rows_of(tmp_path, row, is_parquet=False)
    assert "no picture" in row_read.images[0].fault


def test_what_is_no_part_is_refused_by_its_place(tmp_path):
    for wrong in ({"type": "video", "video": "a.mp4"}, {"type": "text"}, "text", {"text": "x"}):
        row: dict[str, Any] = {"prompt": [{"role": "user", "content": [wrong]}], "answer": "2"}
        with pytest.raises(ConfigError, match=r"line 1: prompt\[0\]\.content\[0\]"):
            rows_of(tmp_path, row, is_parquet=False)


def test_a_run_without_the_section_refuses_pictures_and_says_what_to_add(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([VERL]), path)
    with pytest.raises(ConfigError, match=r"column 'images' holds pictures.*images: {}"):
        read_training_rows(section(str(path), has_images=False))
    parts = [{"role": "user", "content": [{"type": "image"}]}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": parts, "answer": "2"}))
    with pytest.raises(ConfigError, match="need the section `images`"):
        read_training_rows(section(str(tmp_path / "a.jsonl"), has_images=False))
    for value in (["a.png"], "shots/a.JPEG", ["http://a.example/7"], "data:image/png;base64,aGk="):
        (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x", "answer": "2", "images": value}))
        with pytest.raises(ConfigError, match=r"column 'images' holds pictures.*images: {}"):
            read_training_rows(section(str(tmp_path / "a.jsonl"), has_images=False))
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "x", "answer": "2", "image": "ubuntu:24.04"}))
    (row,) = read_training_rows(section(str(tmp_path / "b.jsonl"), has_images=False))[""]
    assert row.extra["image"] == "ubuntu:24.04" and not row.images, (
        "a text of that name is a column like others"
    )


def test_demonstrations_with_pictures_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{**VERL, "completion": "2"}]), path)
    source = {"name": "a", "kind": "demonstrations", "path": str(path)}
    with pytest.raises(ConfigError, match="demonstrations with pictures"):
        read_training_rows(section([source]))  # type: ignore[arg-type]


def test_the_run_notes_that_its_rows_may_have_pictures_and_refuses_what_is_blind():
    sections: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "a.jsonl"}, "images": {}}
    assert RunConfig.model_validate(sections).data.has_images
    assert not RunConfig.model_validate({**sections, "images": None}).data.has_images
    server = {"environment": {"use": "openenv:http://localhost:1"}}
    judge = {"servers": "s", "template": "{{ completion }}"}
    servers = {"s": {"base_urls": ["http://localhost:1/v1"], "model": "m"}}
    local = {"s": {"local": {}, "model": "m"}}

    def asked(of: Any = servers, **reward: Any) -> dict[str, Any]:
        return {"reward": {"rewards": {"seen": reward}}, "servers": of}

    for changes in (
        asked(judge=judge),
        asked(model={"servers": "s"}),
        asked(local, judge=judge),
        asked({"s": {"local": {"engine": "vllm"}, "model": "m"}}, model={"servers": "s"}),
    ):
        assert RunConfig.model_validate(sections | changes).reward.named.keys() == {"seen"}
    for changes, words in (
        ({"rollout": server}, "observations of OpenEnv's servers are read as text"),
        (asked(judge=judge | {"api": "completions"}), "reward.rewards.seen would .* take chat"),
        (asked(model={"servers": "s", "input": "ids"}), "reward.rewards.seen would .* take chat"),
        (asked(model={"servers": "s", "input": "text"}), "reward.rewards.seen would .* take chat"),
        (asked(local, model={"servers": "s"}), "takes text alone"),
        (asked(teacher={"servers": "s"}), "teachers get none"),
        ({"data": {"train": "a.jsonl", "chat_template": "never"}}, "chat_template"),
        ({"images": {"min_pixels": 10, "max_pixels": 9}}, "exceeds max_pixels"),
    ):
        with pytest.raises(ValueError, match=words):
            RunConfig.model_validate(sections | changes)
