"""Epochs in place of steps."""

from typing import Any

import pytest

from tests.support.checked_runs import make_folder
from tidemill.common.config import RunConfig, parse_config
from tidemill.common.data.dataset import Row
from tidemill.common.data.prompt_lengths import NotMeasuredError, with_steps
from tidemill.common.errors import ConfigError


def rows(count: int, long: int = 0) -> list[Row]:
    texts = ["a b"] * (count - long) + ["a b c a b c"] * long
    return [Row(text, "", None, {}, number, f"row {number}") for number, text in enumerate(texts)]


def config(data: dict[str, Any] | None = None, model: str = "m", **trainer: Any) -> RunConfig:
    tree = {"train": "none", "max_prompt_tokens": 4, **(data or {})}
    return parse_config({"model": {"path": model}, "data": tree, "trainer": trainer}, "test")


def test_an_epoch_is_its_whole_steps_and_a_part_of_one_counts():
    resolved = with_steps(config(epochs=2, groups_per_step=3), rows(10))
    assert (resolved.trainer.steps, resolved.trainer.epochs) == (6, 2.0)  # 10 // 3 * 2
    assert with_steps(config(epochs=1.5, groups_per_step=2), rows(11)).trainer.steps == 7  # 5 * 1.5


def test_dropped_rows_do_not_count(tmp_path):
    folder = make_folder(tmp_path / "model")
    dropping = config({"overlong_prompts": "drop"}, str(folder), epochs=1, groups_per_step=2)
    assert with_steps(dropping, rows(10, long=3)).trainer.steps == 3  # 7 // 2


def test_steps_that_say_the_same_are_accepted_and_others_refused():
    resolved = with_steps(config(epochs=2, groups_per_step=5), rows(10))
    assert with_steps(resolved, rows(10)) == resolved
    with pytest.raises(ConfigError, match=r"trainer.steps is 7"):
        with_steps(config(epochs=2, groups_per_step=5, steps=7), rows(10))
    with pytest.raises(ConfigError, match="not one whole step"):
        with_steps(config(epochs=1, groups_per_step=32), rows(10))


def test_the_tokenizer_of_a_hub_model_is_fetched_where_that_is_allowed(tmp_path, monkeypatch):
    dropping = config({"overlong_prompts": "drop"}, "owner/name", epochs=1, groups_per_step=2)
    with pytest.raises(NotMeasuredError, match=r"Give trainer.steps in its place"):
        with_steps(dropping, rows(10, long=3), fetches=False)
    folder = make_folder(tmp_path / "model")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: str(folder))
    assert with_steps(dropping, rows(10, long=3)).trainer.steps == 3
    assert with_steps(config(None, "owner/name", epochs=1, groups_per_step=2), rows(4)).trainer.steps == 2


def test_a_hub_model_that_cannot_be_had_is_said(monkeypatch):
    def refuse(name, **_):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    dropping = config({"overlong_prompts": "drop"}, "owner/name", epochs=1, groups_per_step=2)
    with pytest.raises(NotMeasuredError, match=r"owner/name.*no network.*or trainer.steps"):
        with_steps(dropping, rows(4))


def test_warm_up_is_held_against_the_steps_of_the_epochs():
    warm = {"optimizer": {"warmup_steps": 150}, "groups_per_step": 1}
    assert with_steps(config(epochs=20, **warm), rows(10)).trainer.steps == 200
    with pytest.raises(ConfigError, match="which is 100 steps"):
        with_steps(config(epochs=10, **warm), rows(10))


def test_without_epochs_nothing_changes():
    plain = config(steps=7)
    assert with_steps(plain) is plain
