"""What `tidemill check` says of the values that reward functions get."""

from dataclasses import replace
from typing import Any

import pytest

from tidemill.common.data.dataset import Row
from tidemill.common.images.sources import ImageSource
from tidemill.services.console.check.ground_truths import describe_arguments, find_odd_truths


def row(truth: Any, number: int = 0, prompt: Any = "a", **extra: Any) -> Row:
    return Row(prompt, "math", truth, extra, number, f"train.jsonl line {number + 1}")


@pytest.mark.parametrize(
    ("truth", "text"),
    [
        (42, "42 (int)"),
        ("42", "'42' (str)"),
        (4.5, "4.5 (float)"),
        (True, "True (bool)"),
        (None, "null (NoneType)"),
        ([1, 2], "[1, 2] (list of 2)"),
        ({"a": 1}, "{'a': 1} (dict of 1)"),
        (b"\xff", "b'\\xff' (bytes of 1)"),
        ("x" * 100, f"'{'x' * 29} ... {'x' * 29}' (str)"),
    ],
)
def test_a_ground_truth_is_shown_with_its_type(truth: Any, text: str) -> None:
    assert describe_arguments(row(truth))[0] == f"ground_truth: {text}"


def test_source_and_keys_are_shown_too() -> None:
    lines = describe_arguments(row(42, level=3, split="train"))
    assert lines[1:] == ["data_source: 'math' (str)", "extra_info: level, split"]
    assert describe_arguments(row(42))[2] == "extra_info: no keys of the data"
    seen = replace(row(42), images=(ImageSource(path="a.png"),))
    assert describe_arguments(seen)[3] == "images: 1, for functions that name images"


def test_rows_whose_truths_are_of_another_type_or_missing_are_counted() -> None:
    rows = [row(truth, number) for number, truth in enumerate(["1", None, "2", 3, "4", None])]
    (note,) = find_odd_truths({"train": rows})
    assert note.startswith("train: the ground truth is text in 3 rows")
    assert "null in 2 (first: train.jsonl line 2, null (NoneType))" in note
    assert "a number in 1 (first: train.jsonl line 4, 3 (int))" in note


@pytest.mark.parametrize("truths", [[1, 1.5], ["a", "b"], [None, None], [True, False], []])
def test_truths_of_one_type_are_not_worth_a_note(truths: list[Any]) -> None:
    assert not list(find_odd_truths({"train": [row(truth) for truth in truths]}))
