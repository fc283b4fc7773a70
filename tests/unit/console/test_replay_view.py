"""What a replay says to people: where it differs and by how much, and where to look next."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from tidemill.common.errors import ConfigError
from tidemill.services.console.compare import replay
from tidemill.services.console.compare.replay import parse_steps, result_tree
from tidemill.services.console.options import ReplayOptions
from tidemill.services.console.text.tree import print_tree


def result(step: int = 12, **changes: Any) -> dict[str, Any]:
    """A step that came out as it was recorded."""
    row = {"name": "loss", "recorded": 0.25, "replayed": 0.25, "difference": 0.0, "equal": True}
    length = {"name": "completions/mean_length", "recorded": 8.0, "replayed": 8.0, "difference": 0.0}
    found: dict[str, Any] = {
        "step": step,
        "version": step + 1,
        "equal": True,
        "digest": {"recorded": "a" * 32, "replayed": "a" * 32, "equal": True},
        "metrics": [row, length | {"equal": True}],
        "advantages": {"equal": True, "num_different": 0, "first": None},
        "left_out": {"equal": True, "recorded": [], "replayed": []},
        "first_difference": None,
        "from_version": step,
    }
    return found | changes


def shown(found: dict[str, Any], shows_all: bool = False) -> str:
    out = io.StringIO()
    print_tree(Console(file=out, width=200, highlight=False), result_tree(found, shows_all))
    return out.getvalue()


def test_a_step_that_came_out_is_bit_identical() -> None:
    text = shown(result())
    assert "step 12, which made version 13: bit-identical" in text
    assert "2 of 2 metrics are the same" in text and "completions/mean_length" not in text
    assert "completions/mean_length" in shown(result(), shows_all=True)


def test_a_difference_is_told_with_all_digits_and_its_size() -> None:
    row = {"name": "loss", "recorded": 0.1, "replayed": 0.1 + 2**-56, "difference": 2**-56, "equal": False}
    found = result(
        equal=False,
        metrics=[row],
        digest={"recorded": "a" * 32, "replayed": "b" * 32, "equal": False},
        first_difference=9,
        weights={"max_abs_difference": 1e-7, "mean_abs_difference": 1e-9},
    )
    text = shown(found)
    assert "differs from what was recorded" in text
    assert "0.1 " in text and repr(0.1 + 2**-56) in text and "differs by 1.39e-17" in text
    assert "the weights differ since step 9" in text
    assert "max abs difference 1e-07" in text


def test_an_advantage_that_differs_is_named() -> None:
    first = {"ticket": 7, "index": 3, "recorded": 1.0, "replayed": -1.0}
    text = shown(result(equal=False, advantages={"equal": False, "num_different": 2, "first": first}))
    assert "the same weights, but the advantages differ" in text
    assert "2 advantages differ, the first is that of 7.3: 1.0 recorded, -1.0 replayed" in text


def test_a_long_way_from_the_checkpoint_is_told_with_what_shortens_it() -> None:
    assert "keep_checkpoints" not in shown(result(step=12, from_version=8))
    assert "30 steps before it were trained again, from the starting model" in shown(
        result(step=30, from_version=0)
    )


@pytest.mark.parametrize(
    ("text", "steps"), [("7", [7]), ("17,3", [3, 17]), ("10..12", [10, 11, 12]), ("1, 0..1", [0, 1])]
)
def test_steps_are_numbers_lists_and_ranges(text: str, steps: list[int]) -> None:
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["", "x", "3..", "5..2", "-1", "0..99999999", "1,,2"])
def test_what_names_no_steps_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="steps"):
        parse_steps(text)


@pytest.mark.parametrize(("is_equal", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_says_whether_all_came_out(
    is_equal: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(*_: Any) -> list[dict[str, Any]]:
        return [result(equal=is_equal, first_difference=float("nan"))]

    monkeypatch.setattr(replay, "_replay", answer)
    assert replay.replay_steps(ReplayOptions(steps="12", as_json=True)) == code
    assert json.loads(capsys.readouterr().out)[0]["first_difference"] is None, "JSON has no NaN"
