"""Rows that lack a column without which a reward gives no score."""

from typing import Any

import pytest

from tests.support.trajectories import make_config
from tidemill.common.data.dataset import Row
from tidemill.common.errors import ConfigError
from tidemill.services.console.check.missing_columns import find_missing_columns


def rows(*have_level: bool, data_source: str = "") -> list[Row]:
    return [
        Row("p", data_source, "t", {"level": 1} if has else {}, number, f"line {number}")
        for number, has in enumerate(have_level, start=1)
    ]


def notes(members: dict[str, list[Row]], **reward: Any) -> list[str]:
    named = {"f": {"function": "my.py:f", **reward}, "g": {"function": "my.py:g"}}
    return find_missing_columns(make_config(reward={"rewards": named}), {"f": ["level"]}, members)


def test_rows_that_lack_a_column_are_counted_by_data_set_and_the_first_is_named() -> None:
    members = {"train": rows(True, False, False, True), "eval a": rows(False), "eval b": rows(True)}
    train, evaluation = notes(members)
    assert "2 of 4 rows of train" in train and "line 2" in train
    assert "1 of 1 rows of eval a" in evaluation
    assert not notes({"train": rows(True, True)})


def test_what_no_training_row_has_is_an_error_and_what_no_evaluation_row_has_is_none() -> None:
    with pytest.raises(ConfigError, match="none of the 3 training rows"):
        notes({"train a": rows(False, False), "train b": rows(False), "eval": rows(True)})
    assert len(notes({"train": rows(True), "eval": rows(False)})) == 1


def test_only_rows_that_the_reward_scores_count() -> None:
    members = {"train": rows(False, data_source="x") + rows(True, data_source="y"), "eval": rows(False)}
    (note,) = notes(members, lanes=["train"])
    assert "1 of 2 rows of train" in note
    assert not notes(members, lanes=["train"], applies_to=["y"])
    assert not notes({"train": rows(True)}, lanes=["train"], applies_to=["z"])


def test_a_number_that_stands_for_failures_is_told() -> None:
    (note,) = notes({"train": rows(True, False)}, on_failure=0.25)
    assert "0.25" in note
