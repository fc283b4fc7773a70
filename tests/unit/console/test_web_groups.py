"""The rows, filters and curves of `tidemill web`, without a run."""

import math

import numpy as np
import pytest

from tests.support.trajectories import make_trajectory
from tests.support.web_runs import commit_of, completion, make_ticket, score_of
from tidemill.common.wire.messages import Lane, Score, ScoreStatus
from tidemill.services.console.status.snapshot import StepPoint
from tidemill.services.console.text.formats import took, when
from tidemill.services.console.web import texts
from tidemill.services.console.web.curves import chart_trees
from tidemill.services.console.web.groups import (
    MAX_TEXT_CHARACTERS,
    GroupIndex,
    GroupQuery,
    GroupRow,
    Spread,
    range_of,
)
from tidemill.services.console.web.texts import sendable, visible


def test_a_spread_is_that_of_all_numbers() -> None:
    values = [1e6 + 0.1, 1e6 + 0.2, 1e6 + 0.4]
    spread = Spread()
    for value in values:
        spread.add(value)
    assert spread.mean == pytest.approx(np.mean(values)) and spread.std == pytest.approx(
        np.std(values, ddof=1)
    )
    assert (spread.count, spread.least, spread.most) == (3, values[0], values[2])


def test_the_first_of_two_entries_of_a_key_counts() -> None:
    row = GroupRow(3)
    for entry in ("5-0", "9-0"):
        row.add_trajectory(entry, completion(3, 1, "text"))
        row.add_score(entry, score_of(3, 1))
    assert row.lengths.count == row.rewards.count == 1
    assert row.trajectories == ("5-0", "5-0")


def test_a_group_has_come_as_far_as_its_entries_say() -> None:
    index = GroupIndex()
    index.add(Lane.TRAIN, "1-0", make_ticket(1))
    row = index.get(1, Lane.TRAIN)
    assert row is not None and row.state == "issued"
    for i in range(4):
        index.add(Lane.TRAIN, f"{i + 1}-1", completion(1, i, "text"))
        assert row.state == ("generating" if i < 3 else "generated")
    for i in range(4):
        index.add(Lane.TRAIN, f"{i + 1}-2", score_of(1, i))
    assert row.state == "scored" and row.num_failed == 1 and row.rewards.count == 3
    index.add(Lane.TRAIN, "1-0", commit_of(0))
    assert row.state == "trained" and row.known_places(False).step == 0 and row.num_dropped == 1


def test_a_row_is_bounded_whatever_its_completions_hold() -> None:
    row = GroupRow(0)
    for i in range(4096):
        row.add_trajectory(
            f"{i + 1}-0", make_trajectory(0, i, "x" * 10_000, worker=f"worker-{i}", prompt_text="y" * 9999)
        )
    assert len(row.text) <= MAX_TEXT_CHARACTERS and len(row.workers) == 4 and len(row.prompt) <= 240


def test_only_the_newest_groups_are_kept_and_the_rest_is_counted() -> None:
    index = GroupIndex(max_groups=10)
    for ticket in range(25):
        index.add(Lane.TRAIN, f"{ticket + 1}-0", make_ticket(ticket))
    for ticket in range(25):
        index.add(Lane.TRAIN, f"{ticket + 1}-1", completion(ticket, 0, "text"))
    assert sorted(index.groups[Lane.TRAIN]) == list(range(15, 25)) and index.num_forgotten == 15


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("12", (12, 12)),
        ("1..2", (1, 2)),
        ("..-0.5", (None, -0.5)),
        ("3..", (3, None)),
        ("x", None),
        ("..", None),
    ],
)
def test_ranges_are_read_as_people_type_them(typed: str, found: object) -> None:
    assert range_of(typed) == found


def test_an_address_says_all_of_a_query_and_no_default() -> None:
    query = GroupQuery.parse(
        {"lane": "eval", "reward": "..1", "text": "a&b", "sort": "std", "order": "up", "page": "3"}
    )
    assert query.address() == "?lane=eval&reward=..1&text=a%26b&sort=std&order=up&page=3"
    assert GroupQuery.parse({}).address() == "?"
    odd = GroupQuery.parse({"page": "-1", "sort": "nothing", "state": "x", "order": "sideways", "lane": "x"})
    assert odd.address() == "?"


def test_unseen_characters_become_marks_and_everything_is_escaped() -> None:
    assert visible("a<b>\x1b\x7f&\u202e") == (
        'a&lt;b&gt;<span class="ctl">ESC DEL</span>&amp;<span class="ctl">U+202E</span>'
    )
    assert visible("y" * 2000, 1000).endswith('y…<span class="hint"> 1,000 more characters</span>')
    assert visible("x" * 100, 10) == "x" * 10 + "…"
    assert visible("line\n\ttab") == "line\n\ttab"
    assert sendable("half \ud800") == "half ?"


def test_curves_are_thinned_and_keep_their_last_point() -> None:
    steps = {step: StepPoint(step, {"reward": step / 7, "loss": math.pi}) for step in range(1000)}
    evaluations = [{"set": "held_out", "version": v, "score": 0.5, "time": 1.0} for v in range(3)]
    trees = {tree["key"]: tree for tree in chart_trees(steps, evaluations)}
    points = trees["reward"]["lines"][0]["points"]
    assert len(points) <= 500 and points[-1] == [999, 142.714]
    assert trees["evaluation"]["lines"][0]["label"] == "held_out"
    assert set(trees) == {"reward", "loss", "evaluation"}


def test_what_is_not_a_number_is_left_out_of_curves() -> None:
    steps = {
        step: StepPoint(step, {"loss": value}) for step, value in enumerate((1.0, math.nan, math.inf, 2.0))
    }
    assert chart_trees(steps, [])[0]["lines"][0]["points"] == [[0, 1.0], [3, 2.0]]


def test_each_source_has_a_line_where_the_run_has_several() -> None:
    steps = {0: StepPoint(0, {"source/a/reward": 0.5, "source/a/pass_rate": 0.25, "source/b/reward": 1.0})}
    rewards, passes = chart_trees(steps, [])
    assert (rewards["key"], passes["key"]) == ("source_reward", "source_passes")
    assert rewards["lines"] == [{"label": "a", "points": [[0, 0.5]]}, {"label": "b", "points": [[0, 1.0]]}]
    assert passes["lines"] == [{"label": "a", "points": [[0, 0.25]]}]


def test_a_score_of_an_impossible_index_takes_no_memory() -> None:
    row = GroupRow(0)
    row.add_score("1-0", Score(ticket=0, index=1 << 40, status=ScoreStatus.OK, value=1.0))
    assert row.rewards.count == 0


def test_numbers_read_well() -> None:
    assert texts.number(-0.00123456, 3) == "−0.00123" and texts.number(12345.0) == "12\u202f345"
    assert texts.number(None) == "–" and texts.number(math.nan) == "nan" and texts.signed(0.5) == "+0.5"
    assert took(0.0123) == "12 ms" and took(3700) == "1 h 01 min" and took(math.nan) == "–"
    assert when(1e300) == "–"
