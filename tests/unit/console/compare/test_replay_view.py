"""What a replay says to people: where it differs and by how much, and where to look next."""

import io
import json
from typing import Any

import pytest
from rich.console import Console

from tidemill.common.errors import ConfigError
from tidemill.services.console.commands import ReplayOptions
from tidemill.services.console.compare import replay
from tidemill.services.console.compare.replay import listed_steps, result_tree
from tidemill.services.console.text.tree import print_tree

LOSS = {"name": "loss", "recorded": 0.25, "replayed": 0.25, "difference": 0.0, "equal": True}
LENGTH = LOSS | {"name": "completions/mean_length"}
OFF = LOSS | {"recorded": 0.1, "replayed": 0.1 + 2**-56, "difference": 2**-56, "equal": False}
FIRST = {"ticket": 7, "index": 3, "recorded": 1.0, "replayed": -1.0}


def result(step: int = 12, **changes: Any) -> dict[str, Any]:
    """A step that came out as it was recorded."""
    return {
        "step": step,
        "version": step + 1,
        "equal": True,
        "digest": {"recorded": "a" * 32, "replayed": "a" * 32, "equal": True},
        "metrics": [LOSS, LENGTH],
        "advantages": {"equal": True, "num_different": 0, "first": None},
        "left_out": {"equal": True, "recorded": [], "replayed": []},
        "first_difference": None,
        "from_version": step,
    } | changes


OTHER_WEIGHTS = {
    "digest": {"recorded": "a" * 32, "replayed": "b" * 32, "equal": False},
    "left_out": {"equal": False},
    "first_difference": 9,
    "weights": {"max_abs_difference": 1e-7},
}
OTHER_ADVANTAGES = {"equal": False, "num_different": 2, "first": FIRST}


@pytest.mark.parametrize(("result", "style", "named"), [
    (result(), "bold green", ("2 of 2",)),
    (
        result(equal=False, metrics=[OFF], **OTHER_WEIGHTS), "bold red",
        ("0.1 ", repr(0.1 + 2**-56), "by 1.39e-17", "since step 9", "1e-07", "left out"),
    ),
    (result(equal=False, advantages=OTHER_ADVANTAGES), "yellow", ("7.3: 1.0 recorded, -1.0 replayed",)),
    (result(step=30, from_version=0), "bold green", ("30 steps", "starting model")),
])  # fmt: skip
def test_a_replay_says_what_came_out(result: dict[str, Any], style: str, named: tuple[str, ...]) -> None:
    def shown(shows_all: bool) -> str:
        out = io.StringIO()
        print_tree(Console(file=out, width=200, highlight=False), result_tree(result, shows_all))
        return out.getvalue()

    assert result_tree(result).children[0].style == style
    assert [words for words in named if words not in shown(False)] == []
    assert LENGTH["name"] not in shown(False)
    assert (LENGTH["name"] in shown(True)) == (LENGTH in result["metrics"])


def test_steps_are_numbers_lists_and_ranges() -> None:
    steps_of = {"7": [7], "17,3": [3, 17], "10..12": [10, 11, 12], "1, 0..1": [0, 1]}
    assert {text: listed_steps(text) for text in steps_of} == steps_of
    for text in ("", "x", "3..", "5..2", "-1", "0..99999999", "1,,2"):
        with pytest.raises(ConfigError, match="steps"):
            listed_steps(text)


@pytest.mark.parametrize(("is_equal", "code"), [(True, 0), (False, 1)])
def test_the_exit_code_says_whether_all_came_out(is_equal, code, monkeypatch, capsys):
    def answer(*_: Any) -> list[dict[str, Any]]:
        return [result(equal=is_equal, first_difference=float("nan"))]

    monkeypatch.setattr(replay, "read_run", answer)
    assert replay.replay_steps(ReplayOptions(steps="12", as_json=True)) == code
    assert json.loads(capsys.readouterr().out)[0]["first_difference"] is None, "JSON has no NaN"
