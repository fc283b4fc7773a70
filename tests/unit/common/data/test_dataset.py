"""Datasets: two layouts, two formats, and errors that name the line."""

import json
import re
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.rows import read_dataset
from tidemill.common.config.data import DataConfig
from tidemill.common.config.run import RunConfig
from tidemill.common.data.dataset import Row, gsm8k_answer, read_training_rows
from tidemill.common.errors import ConfigError
from tidemill.common.process.programs import ROOT

SAMPLE = ROOT / "tests" / "data" / "gsm8k_sample.jsonl"

VERL: dict[str, Any] = {
    "data_source": "math",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "sums",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 0},
}


LINE = json.dumps(VERL).encode()


def write_jsonl(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def write_parquet(path: Path, *rows: dict[str, Any]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def only(path: Path, **kwargs: Any) -> Row:
    (row,) = read_dataset(path, **kwargs)
    return row


def error_of(path: Path, **kwargs: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read_dataset(path, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_verls_columns_are_read_from_either_format(tmp_path, write):
    path = write(
        tmp_path / f"a.{'jsonl' if write is write_jsonl else 'parquet'}", VERL, {**VERL, "ability": None}
    )
    first, second = read_dataset(path)
    assert first.prompt == [{"role": "user", "content": "1+1?"}]
    assert (first.data_source, first.ground_truth, first.number) == ("math", "2", 0)
    chat = {"prompt": [{"role": "user", "content": "1+1?"}]}  # reward functions may want it as it is
    assert first.extra == {"ability": "sums", "split": "train", "index": 0, **chat}
    assert second.extra == {"split": "train", "index": 0, **chat}
    assert second.origin == f"{path} {'line 2' if write is write_jsonl else 'row 1'}"


def test_where_the_environment_alone_rewards_no_truth_is_asked_for(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {"prompt": "Win.", "level": 3})
    sections: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": str(path)}}
    sections["rollout"] = {"environment": {"use": "my_env.py:MyEnv"}}
    of_environment = {"environment": True}
    judged = {"function": "gsm8k"}
    for is_streamed in (False, True):
        sections["data"]["stream"] = is_streamed
        alone = RunConfig.model_validate({**sections, "reward": {"rewards": {"own": of_environment}}})
        (row,) = read_training_rows(alone.data)[""]
        assert row.ground_truth is None and row.extra == {"level": 3}
    both = RunConfig.model_validate(
        {**sections, "reward": {"rewards": {"own": of_environment, "other": judged}}}
    )
    with pytest.raises(ConfigError, match="truth"):
        list(read_training_rows(both.data)[""])


ENVIRONMENT = """
class Game:
    more = [{"prompt": "Win twice."}]

    @staticmethod
    def rows():
        for level in range(2):
            yield {"prompt": "Win.", "ground_truth": None, "level": level}

def failing():
    raise KeyError("level")
"""


def test_an_environment_may_own_its_rows(tmp_path):
    (tmp_path / "own_game.py").write_text(ENVIRONMENT)
    name = f"{tmp_path}/own_game.py"
    assert [row.extra for row in read_dataset(f"{name}:Game.rows")] == [{"level": 0}, {"level": 1}]
    (row,) = read_dataset(f"{name}:Game.more", needs_truth=False)
    assert row.prompt == "Win twice." and row.origin.endswith("row 0")
    for wrong in ("Game.row", "failing", "Game"):
        assert f"own_game.py:{wrong}" in error_of(f"{name}:{wrong}")
    streamed = DataConfig(train=f"{name}:Game.rows", stream=True)
    with pytest.raises(ConfigError):
        read_training_rows(streamed)


def test_several_files_are_one_dataset_with_rows_counted_on(tmp_path):
    files = [write_jsonl(tmp_path / f"{name}.jsonl", VERL, VERL) for name in "ab"]
    assert [(row.number, row.origin[-8:]) for row in read_dataset(files)] == [
        (0, "l line 1"), (1, "l line 2"), (2, "l line 1"), (3, "l line 2"),
    ]  # fmt: skip
    assert len(read_dataset(files, max_rows=3)) == 3


def test_blank_lines_and_a_byte_order_mark_are_skipped_but_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINE + b"\r\n\r\n" + LINE)
    assert [row.origin for row in read_dataset(path)] == [f"{path} line 1", f"{path} line 3"]


def test_separators_inside_text_do_not_end_a_line(tmp_path):
    prompt = "one\u2028two\x85three"
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({**VERL, "prompt": prompt}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert [row.prompt for row in read_dataset(path)] == [prompt]


def test_parquet_fills_messages_with_nulls_that_do_not_reach_the_template(tmp_path):
    messages = [{"role": "system", "content": "Be brief.", "name": "s"}, {"role": "user", "content": "1+1?"}]
    path = write_parquet(tmp_path / "a.parquet", {**VERL, "prompt": messages})
    assert read_dataset(path)[0].prompt == messages


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": f"smile {HALF}"}, "prompt holds"),
        ({"prompt": [{"role": "user", "content": HALF}]}, r"prompt\[0\].content holds"),
        (
            {"prompt": [{"role": "user", "content": "a", "tools": [{"name": HALF}]}]},
            r"prompt\[0\].tools\[0\].name holds",
        ),
        ({"data_source": HALF}, "data_source holds"),
        ({"reward_model": {"ground_truth": f"a{HALF}"}}, "reward_model.ground_truth holds .* at character 1"),
        ({"extra_info": {"notes": ["a", {"b": HALF}]}}, r"extra_info.notes\[1\].b holds"),
        ({"tags": {HALF: 1}}, r"the name tags.\? holds"),
    ],
)
def test_half_of_a_surrogate_pair_is_refused_with_file_line_field_and_remedy(tmp_path, changes, field):
    path = write_jsonl(tmp_path / "a.jsonl", VERL, {**VERL, **changes})
    said = error_of(path)
    assert re.search(rf"a.jsonl line 2: {field}", said)
    assert r"\ud83d" in said
    assert "take it out" in said


def test_whole_characters_beyond_the_first_plane_are_text(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", {**VERL, "prompt": "smile \U0001f600"})
    assert only(path).prompt == "smile \U0001f600"


def test_values_become_what_a_message_can_carry(tmp_path):
    extra = {"day": date(2026, 1, 2), "price": Decimal("1.50"), "tags": ["a", None]}
    path = write_parquet(tmp_path / "a.parquet", {**VERL, "extra_info": extra})
    assert read_dataset(path)[0].extra == {
        "ability": "sums", "day": "2026-01-02", "price": "1.50", "tags": ["a", None],
        "prompt": VERL["prompt"],
    }  # fmt: skip


@pytest.mark.parametrize("truth", ["NaN", "-Infinity", "1e999"])
def test_a_truth_that_is_no_finite_number_is_refused(tmp_path, truth):
    path = write_jsonl(tmp_path / "a.jsonl", LINE.decode(), f'{{"prompt": "a", "answer": {truth}}}')
    assert error_of(path).startswith(f"{path} line 2: the ground truth is ")


def test_gsm8k_is_read_as_it_comes():
    rows = read_dataset(SAMPLE)
    assert len(rows) == 40
    first = rows[0]
    assert isinstance(first.prompt, str) and first.prompt.startswith("Natalia sold clips")
    assert (first.data_source, first.ground_truth) == ("openai/gsm8k", "72")
    assert first.extra["question"] == first.prompt
    assert first.extra["answer"].endswith("#### 72")
    assert all(row.ground_truth.lstrip("-").isdigit() for row in rows)


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("6 * 7 = 42\n#### 42", "42"),
        ("#### 1,080", "1080"),
        ("#### 109,200,000 ", "109200000"),
        ("#### -3", "-3"),
        ("#### $2.50", "2.50"),
        ("#### .5", ".5"),
        ("#### 1\n#### 2", "2"),
        ("####5", "5"),
        ("#### forty-two", None),
        ("42", None),
        ("#### 42 apples", None),
        ("#### ", None),
        ("#### ,", None),
    ],
)
def test_the_answer_is_the_number_at_the_end_without_commas(answer, number):
    assert gsm8k_answer(answer) == number


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "1+1?", "answer": "#### two"}, "'answer' must end in '#### <number>' (GSM8K)"),
        ({"question": " ", "answer": "#### 2"}, "'question' is empty"),
        ({"Promt": "1+1?", "label": 2}, "column 'prompt' (the prompt) is missing; the columns are 'Promt', "
         "'label'. 'Promt' looks like 'prompt'. A prompt is looked for in prompt, messages, question, "),
        ({"prompt": "1+1?", "answers": 2}, "the truth, 'reward_model.ground_truth' (write null where the "
         "reward needs none), is missing; the columns are 'prompt', 'answers'. 'answers' looks like"),
        ({}, "is missing; the columns are none"),
        ({**VERL, "prompt": None}, "column 'prompt' is null, and a prompt is text or a list of"),
        ({"question": None, "messages": None, "answer": 1}, "columns 'messages' and 'question' are null, "),
        ({"prompt": "1+1?", "reward_model": None}, "'reward_model.ground_truth' (reward_model is null; "),
        ({**VERL, "prompt": ""}, "column 'prompt' is empty"),
        ({**VERL, "prompt": []}, "prompt must be text or a list of chat messages, got a list []"),
        ({**VERL, "prompt": 7}, "prompt must be text or a list of chat messages, got a number 7"),
        ({**VERL, "prompt": ["hi"]}, "prompt[0] must be an object with role and content, got text 'hi'"),
        ({**VERL, "prompt": [{"content": "hi"}]}, "prompt[0].role must be text, got null"),
        ({**VERL, "prompt": [{"role": "user", "content": [{"type": "image"}]}]},
         "prompt[0].content must be text, got a list"),
        ({**VERL, "data_source": 3}, "data_source must be text, got a number 3"),
        ({**VERL, "extra_info": "x"}, "extra_info must be an object, got text 'x'"),
        ({**VERL, "reward_model": "2"}, "reward_model must be an object with ground_truth, got text '2'"),
        ({**VERL, "reward_model": {"style": "rule"}}, "'reward_model.ground_truth' (write null where"),
        ({"prompt": "1+1?"}, "is missing; the columns are 'prompt'."),
        ({**VERL, "extra_info": {"n": [2**70]}}, "extra_info.n[0] holds 1180591620717411303424, more"),
        ("{\"prompt\": ", "is not valid JSON: Expecting value at column"),
        ("[1, 2]", "holds a list [1, 2]; expected a JSON object"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_by_file_and_line_and_told_in_plain_words(tmp_path, row, words):
    path = write_jsonl(tmp_path / "train.jsonl", VERL, "", row, VERL)
    message = error_of(path)
    assert message.startswith(f"{path} line 3")
    assert words in message


def test_a_bad_parquet_row_is_named_by_file_and_row(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", VERL, {**VERL, "reward_model": None})
    assert error_of(path).startswith(f"{path} row 1: the truth, 'reward_model.ground_truth'")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", b"", "has no rows"),
        ("a.jsonl", b"\n \n", "has no rows"),
        ("a.parquet", b"", "is not a whole Parquet file"),
        ("a.parquet", b"PAR1 torn", "is not a whole Parquet file"),
        ("a.jsonl", LINE + b'\n{"prompt": "caf\xe9"}\n', "line 2 is not UTF-8 text (byte 16 of the line)"),
        ("a.txt", b"hi", "ends in .txt; expected .jsonl, .json, .csv, .tsv or .parquet"),
        ("a", b"x", "ends in nothing; expected .jsonl"),
        ("a.json", b"[3]", "row 0 is no JSON object"),
        ("a.json", b'[{"prompt": "x"}', "is not valid JSON: Expecting"),
        ("a.json", b'{\n"prompt": "x"}', "is not valid JSON: Expecting property name"),
        ("a.csv", b"prompt,answer\na,b,c\n", "line 2 has more values than the first line has names"),
        ("a.csv", b"prompt,answer\ncaf\xe9,1\n", "is not UTF-8 text"),
        ("a.csv", b"prompt,answer\n", "has no rows"),
    ],
)
def test_a_file_that_is_no_dataset_is_told_in_plain_words(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    message = error_of(tmp_path / name)
    assert str(tmp_path / name) in message and words in message


def test_missing_files_and_folders_are_told_apart(tmp_path):
    assert "does not exist" in error_of(tmp_path / "a.jsonl")
    assert "is a folder; name the files in it, such as" in error_of(tmp_path)
    with pytest.raises(ConfigError, match="at least one file"):
        read_dataset([])


def test_an_empty_file_among_others_is_an_error_too(tmp_path):
    (tmp_path / "b.jsonl").touch()
    with pytest.raises(ConfigError, match=r"b\.jsonl has no rows"):
        read_dataset([write_jsonl(tmp_path / "a.jsonl", VERL), tmp_path / "b.jsonl"])


USER = {"role": "user", "content": "1+1?"}
ASSISTANT = {"role": "assistant", "content": "2"}


@pytest.mark.parametrize(
    ("row", "prompt", "truth", "extra"),
    [
        ({"prompt": "1+1?", "answer": "2"}, "1+1?", "2", {"answer": "2"}),
        ({"question": "1+1?", "answer": "2"}, "1+1?", "2", {"answer": "2"}),
        ({"question": "1+1?", "answer": 2}, "1+1?", 2, {"answer": 2}),
        ({"problem": "1+1=", "ground_truth": 2, "level": 3}, "1+1=", 2, {"level": 3}),
        ({"problem": "?", "solution": "so 2", "answer": "2"}, "?", "so 2", {"solution": "so 2",
         "answer": "2"}),
        ({"prompt": "?", "solution": "$2$"}, "?", "$2$", {"solution": "$2$"}),  # as datasets for TRL have it
        ({"messages": [USER], "ground_truth": "2", "answer": "3"}, [USER], "2", {"answer": "3"}),
        ({"messages": [USER, ASSISTANT]}, [USER], "2", {}),
        ({"messages": [USER, ASSISTANT], "solution": "two"}, [USER], "two", {"solution": "two"}),
        ({"prompt": [USER, ASSISTANT], "answer": "2"}, [USER, ASSISTANT], "2", {"answer": "2"}),
        # Null is for rewards that need no truth.
        ({"prompt": "Write.", "reward_model": {"ground_truth": None}}, "Write.", None, {}),
        ({"prompt": "?", "answer": 2, "extra_info": {"n": 0}, "n": 7}, "?", 2, {"answer": 2, "n": 0}),
    ],
)  # fmt: skip
def test_columns_are_found_by_the_names_that_people_use(tmp_path, row, prompt, truth, extra):
    path = write_jsonl(tmp_path / "a.jsonl", row)
    chat = {"prompt": prompt} if isinstance(prompt, list) else {}
    assert read_dataset(path) == [Row(prompt, "", truth, extra | chat, 0, f"{path} line 1")]


def test_own_names_are_mapped_also_inside_of_columns(tmp_path):
    row = {"instruction": "1+1?", "meta": {"label": "2"}, "kind": "sums", "a.b": 1, "reward_model": {}}
    names = {"prompt": "instruction", "ground_truth": "meta.label", "data_source": "kind"}
    renamed = only(write_jsonl(tmp_path / "a.jsonl", row), names=names)
    assert (renamed.prompt, renamed.ground_truth, renamed.data_source) == ("1+1?", "2", "sums")
    assert renamed.extra == {"meta": {"label": "2"}, "a.b": 1, "instruction": "1+1?", "kind": "sums"}
    assert only(tmp_path / "a.jsonl", names={**names, "ground_truth": "a.b"}).ground_truth == 1
    assert "column 'meta.lable' (data.columns: {ground_truth: meta.lable}) is missing" in error_of(
        tmp_path / "a.jsonl", names={**names, "ground_truth": "meta.lable"}
    )
    path = write_jsonl(tmp_path / "nulls.jsonl", {**row, "meta": None})
    assert "column 'meta' is null, and 'meta.label' (data.columns) is read from it" in error_of(
        path, names=names
    )
    path = write_jsonl(tmp_path / "nulls.jsonl", {**row, "instruction": None})
    assert "column 'instruction' is null, and a prompt is text" in error_of(path, names=names)


@pytest.mark.parametrize("theirs", ["meta.labels.label", "meta.labels.labels"])
def test_of_columns_inside_of_columns_the_one_that_is_null_is_named(tmp_path, theirs):
    path = write_jsonl(tmp_path / "nulls.jsonl", {"prompt": "1+1?", "meta": {"labels": None}})
    assert "column 'meta.labels' is null" in error_of(path, names={"ground_truth": theirs})


def test_tables_and_lists_hold_the_same_rows_as_lines(tmp_path):
    rows = [{"prompt": "one,\ntwo?", "answer": "3"}, {"prompt": 'say "hi"', "answer": "hi"}]
    (tmp_path / "a.csv").write_text('\ufeffprompt,answer\r\n"one,\ntwo?",3\r\n"say ""hi""",hi\r\n')
    (tmp_path / "a.tsv").write_text('prompt\tanswer\n"one,\ntwo?"\t3\n"say ""hi"""\thi\n')
    (tmp_path / "a.json").write_text(" \n" + json.dumps(rows, indent=1))
    write_jsonl(tmp_path / "b.json", *rows)
    for name in ("a.csv", "a.tsv", "a.json", "b.json"):
        table = read_dataset(tmp_path / name)
        assert [(row.prompt, row.ground_truth) for row in table] == [("one,\ntwo?", "3"), ('say "hi"', "hi")]
    assert [row.origin[-6:] for row in read_dataset(tmp_path / "a.csv")] == ["line 2", "line 4"]


def test_an_empty_value_of_a_table_is_none(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,ground_truth,level\nhi,,\n")
    assert (only(tmp_path / "a.csv").ground_truth, only(tmp_path / "a.csv").extra) == (None, {})


def test_a_pattern_names_files_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", {"prompt": name, "answer": name})
    (tmp_path / "notes.md").write_text("no data")
    assert [row.prompt for row in read_dataset(tmp_path / "*")] == ["a", "b", "c"]
    assert [row.prompt for row in read_dataset([tmp_path / "[bc].jsonl"])] == ["b", "c"]
    assert "no file has such a name" in error_of(tmp_path / "*.csv")
