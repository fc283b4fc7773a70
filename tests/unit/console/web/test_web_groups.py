"""What the pages hold in memory and make of it, without a run: groups, queries, texts, chats, curves,
configs."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from starlette.datastructures import QueryParams

from tests.support.recorded_sessions import as_session
from tests.support.trajectories import make_trajectory
from tests.support.web_runs import commit_of, completion, question, score_of
from tidemill.common.config.section import flatten
from tidemill.common.wire.messages import FIRST_DEMONSTRATION, Lane, Score, ScoreStatus
from tidemill.services.console.look.series import smooth
from tidemill.services.console.look.snapshot import StepPoint
from tidemill.services.console.text.formats import duration, took, when
from tidemill.services.console.web import texts
from tidemill.services.console.web.compare_pages import ABSENT, MAX_METRICS, MAX_RUNS, CompareQuery, differing
from tidemill.services.console.web.curves import chart_trees, columns_in, thin
from tidemill.services.console.web.group_pages import shown_tokens
from tidemill.services.console.web.groups import (
    MAX_TEXT_CHARACTERS,
    GroupIndex,
    GroupQuery,
    GroupRow,
    Spread,
    range_of,
)
from tidemill.services.console.web.site import dots
from tidemill.services.console.web.texts import TokenTexts, prompt_messages, visible


def test_a_spread_is_that_of_all_numbers() -> None:
    values = [1e6 + 0.1, 1e6 + 0.2, 1e6 + 0.4]
    spread = Spread()
    for value in values:
        spread.add(value)
    assert spread.mean == pytest.approx(np.mean(values))
    assert spread.std == pytest.approx(np.std(values, ddof=1))
    assert (spread.count, spread.least, spread.most) == (3, values[0], values[2])


def test_a_group_has_come_as_far_as_the_first_entries_of_its_keys_say() -> None:
    index = GroupIndex()
    index.add(Lane.TRAIN, "1-0", question(1))
    row = index.get(1)
    assert row is not None and row.state == "issued"
    for entry in range(8):  # each of four comes twice
        index.add(Lane.TRAIN, f"{entry + 1}-1", completion(1, entry // 2, "text"))
        assert row.state == ("generating" if entry < 6 else "generated")
    for entry in range(8):
        index.add(Lane.TRAIN, f"{entry + 1}-2", score_of(1, entry // 2))
    assert (row.state, row.lengths.count, row.num_failed, row.rewards.count) == ("scored", 4, 1, 3)
    assert (row.trajectories, row.scores) == (("1-1", "7-1"), ("1-2", "7-2"))
    index.add(Lane.TRAIN, "1-0", commit_of(0))
    assert row.state == "trained" and row.places.step == 0
    index.add(Lane.TRAIN, "2-0", commit_of(1).model_copy(update={"dropped": ((9, -1, "zero_variance"),)}))
    left_out = index.get(9)
    assert left_out is not None and (left_out.state, left_out.step) == ("dropped", 1)


def test_memory_is_bounded_whatever_entries_hold() -> None:
    row = GroupRow(0)
    for i in range(4096):
        trajectory = make_trajectory(0, i, "x" * 10_000, worker=f"worker-{i}", prompt_text="y" * 9999)
        row.add_trajectory(f"{i + 1}-0", trajectory)
    assert len(row.text) <= MAX_TEXT_CHARACTERS and len(row.workers) == 4 and len(row.prompt) <= 240
    row.add_score("1-0", Score(ticket=0, index=1 << 40, status=ScoreStatus.OK, value=1.0))
    assert row.rewards.count == 0, "an impossible index takes no memory"
    index = GroupIndex(max_groups=10)
    for ticket in range(25):
        index.add(Lane.TRAIN, f"{ticket + 1}-0", question(ticket))
    for ticket in range(25):
        index.add(Lane.TRAIN, f"{ticket + 1}-1", completion(ticket, 0, "text"))
    assert sorted(index.groups[Lane.TRAIN]) == list(range(15, 25)) and index.num_forgotten == 15


def test_an_address_is_read_as_people_type_it_and_says_all_of_a_query_and_no_default() -> None:
    ranges = {"12": (12, 12), "1..2": (1, 2), "..-0.5": (None, -0.5), "3..": (3, None), "x": None, "..": None}
    assert {typed: range_of(typed) for typed in ranges} == ranges
    typed = {"lane": "eval", "reward": "..1", "text": "a&b", "sort": "std", "order": "up", "page": "3"}
    assert GroupQuery.parse(typed).address() == "?lane=eval&sort=std&order=up&reward=..1&text=a%26b&page=3"
    assert GroupQuery.parse({}).address() == "?"
    assert (
        GroupQuery.parse(typed).address(page=None, sort="time", order=None)
        == "?lane=eval&sort=time&reward=..1&text=a%26b"
    )
    odd = {"sort": "nothing", "state": "x", "order": "sideways", "lane": "x", "text": " "}
    assert GroupQuery.parse(odd).address() == "?" and GroupQuery.parse({"page": "-1"}).page == 1
    assert GroupQuery.parse({"step": "many", "reward": "1"}).misunderstood == ["step"]


def test_unseen_characters_become_marks_and_everything_is_escaped() -> None:
    assert visible("a<b>\x1b\x7f&\u202e") == (
        'a&lt;b&gt;<span class="ctl">ESC DEL</span>&amp;<span class="ctl">U+202E</span>'
    )
    assert visible("y" * 2000, 1000).endswith('y…<span class="hint"> 1,000 more characters</span>')
    assert visible("x" * 100, 10) == "x" * 10 + "…" and visible(None) == ""
    assert visible("line\n\ttab") == "line\n\ttab" and texts.sendable("half \ud800") == "half ?"


def test_numbers_read_well() -> None:
    assert texts.number(-0.00123456, 3) == "−0.00123" and texts.number(12345.0) == "12\u202f345"
    assert texts.number(12345.6) == "12\u202f346" and texts.signed(1234.5) == "+1\u202f234"
    assert texts.number(None) == "–" and texts.number(math.nan) == "nan" and texts.signed(0.5) == "+0.5"
    assert texts.span(1, 1) == "1" and texts.span(1, 2.5) == "1–2.5"
    assert took(0.0123) == "12 ms" and took(3700) == "1 h 01 min" and took(math.nan) == "–"
    assert when(1e300) == "–"
    durations = {41.6: "42 s", 185: "3 min 05 s", 7620: "2 h 07 min", 59.7: "1 min 00 s"}
    assert {seconds: duration(seconds) for seconds in durations} == durations


def test_a_prompt_is_a_chat_where_its_row_has_one() -> None:
    for text in ("2 + 3 =", "<|im_start|>user\nHi<|im_end|>\n", ""):
        assert prompt_messages(question(0).model_copy(update={"prompt_text": text})) == []
    chat = [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, "no message"]
    row = {"prompt_text": "x", "extra": {"prompt": chat}}
    assert prompt_messages(question(0).model_copy(update=row)) == chat[:1]


def test_a_token_says_how_likely_and_how_old_it_was_and_whose_it_is() -> None:
    trajectory = completion(0, 0, "")
    unknown = trajectory.model_copy(
        update={"logprobs": np.array([np.nan, *trajectory.logprobs[1:]], np.float32)}
    )
    tokens = list(shown_tokens(unknown.segments[0], TokenTexts(None), 5, 0, 99))
    assert [token.kinds.split() for token in tokens] == [
        ["t", level, age, trained, "id"]
        for level, age, trained in (
            ("l0", "v4", "trained"), ("l1", "v4", "trained"), ("l2", "v4", "trained"),
            ("l3", "v4", "trained"), ("l4", "v4", "trained"), ("l5", "v4", "untrained"),
        )
    ]  # fmt: skip
    assert [token.text for token in tokens] == ["5", "6", "7", "8", "9", "10"]
    assert [token.begins for token in tokens] == ["0", "", "", "", "1", ""]
    assert "logprob unknown" in tokens[0].tip and "token 4 · id 9" in tokens[4].tip
    assert "(1.83 %) · version 1, 4 steps old" in tokens[4].tip and tokens[5].tip.endswith("not trained")
    (last,) = shown_tokens(trajectory.segments[0], TokenTexts(None), -1, 5, 1)
    assert (last.text, last.begins) == ("10", "") and "old" not in last.tip
    played = as_session(completion(0, 0, "")).segments[0]
    tokens = list(shown_tokens(played, TokenTexts(None), 1, 3, 5))
    assert ["environment" in token.kinds for token in tokens] == [False, True, True, True, False]
    assert "the environment's" in tokens[1].tip and "turn 1 · " in tokens[4].tip


def test_a_demonstration_has_no_version_and_its_tokens_no_logprob() -> None:
    """Those in its trajectory are placeholders."""
    demonstration = make_trajectory(FIRST_DEMONSTRATION, 0, worker="trainer", spans=((3, 0),))
    logprobs = np.zeros(demonstration.num_tokens, np.float32)
    demonstration = demonstration.model_copy(update={"logprobs": logprobs})
    index = GroupIndex()
    index.add(Lane.TRAIN, "1-0", demonstration)
    row = index.get(FIRST_DEMONSTRATION)
    assert row is not None and (row.min_version, row.max_version) == (-1, -1)
    tokens = list(shown_tokens(demonstration.segments[0], TokenTexts(None), 5, 0, 9, is_sampled=False))
    assert {token.begins for token in tokens} == {""}
    assert {token.kinds for token in tokens} == {"t l0 v0 trained id"}
    assert tokens[0].tip.endswith("the demonstration's")


def test_rewards_are_dots_on_one_scale_and_equal_ones_pile_up() -> None:
    assert list(dots([[0.0, 1.0, 1.0, math.nan], [0.5], []])) == ["M4 9h0M86 9h0M86 8h0", "M45 9h0", ""]
    assert list(dots([[3.0]])) == ["M4 9h0"]


NAMES = ["reward", "kl", "eval/held_out/score", "eval/held_out/rewards/game/mean", "none"]


def line(kind: str, number: int, **numbers: object) -> str:
    of = {"step": number} if kind == "step" else {"set": "held_out", "version": number}
    return json.dumps({"kind": kind, "time": 100.0 + number, **of, **numbers}) + "\n"


LINES = (
    line("step", 0, reward=1, kl=None),
    line("evaluation", 0, score=0.25, **{"rewards/game/mean": 2.0}),
    line("step", 1, reward=0.5, kl=0.25),
    line("step", 1, reward=0.75, kl=0.5),
    line("step", 2, reward=1.25),
)


def test_a_moving_average_has_the_weights_of_its_definition() -> None:
    assert smooth(np.array([1.0, 0.0]), 0.5).tolist() == pytest.approx([1.0, 1 / 3])
    y = np.random.default_rng(3).normal(size=40)
    weight = 0.8
    for n, mean in enumerate(smooth(y, weight)):
        assert mean == pytest.approx(np.average(y[: n + 1], weights=weight ** np.arange(n, -1, -1)))
    assert smooth(y, 0.0) is y and len(smooth(np.empty(0), 0.9)) == 0


def test_no_spike_is_lost_where_a_long_curve_is_thinned() -> None:
    y = np.zeros(10_000)
    y[[777, 4242]] = 9.0, -9.0
    places = thin(y, 100)
    assert len(places) <= 100 and {0, 777, 4242, 9_999} <= set(places.tolist())
    assert (np.diff(places) > 0).all() and thin(y[:100], 100).tolist() == list(range(100))


def test_each_complete_line_is_read_and_the_last_of_a_step_stands(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert not columns_in(tmp_path).numbers
    odd = ["not JSON\n", '{"kind": "step", "step": 1, "reward": "much"}\n']
    file.write_text("".join([*LINES[:2], *odd, *LINES[2:], '{"kind": "step", "step": 3, "rew']))
    columns = columns_in(tmp_path)
    assert sorted(columns.numbers) == sorted(NAMES[:-1])
    series = {name: columns.series(name) for name in NAMES}
    assert series["reward"].x.tolist() == [0, 1, 2] and series["reward"].y.tolist() == [1, 0.75, 1.25]
    assert series["reward"].time.tolist() == [0, 1, 2] and series["kl"].x.tolist() == [1]
    assert series["eval/held_out/score"].y.tolist() == [0.25] and series[NAMES[3]].y.tolist() == [2.0]
    assert len(series["none"].x) == 0 and columns_in(tmp_path) is columns, "it is read when it has changed"
    with file.open("a") as more:
        more.write('ard": 2, "time": 103}\n')
    assert columns_in(tmp_path).series("reward").y.tolist() == [1, 0.75, 1.25, 2]


def test_charts_have_what_is_a_number_and_a_line_for_each_source() -> None:
    steps = {step: StepPoint(step, {"reward": step / 7, "loss": math.pi}) for step in range(1000)}
    steps[500].metrics["loss"] = math.nan
    workers = {"stages/reward_workers": 2.0, "stages/reward_busy_s": 1.0, "step_time_s": 2.0}
    sources = {"source/a/reward": 0.5, "source/a/pass_rate": 0.25, "source/b/reward": 1.0}
    steps[0].metrics.update(workers | sources)
    evaluations = [{"set": "held_out", "version": v, "score": 0.5, "time": 1.0} for v in range(3)]
    trees = chart_trees(steps, evaluations)
    assert [tree["key"] for tree in trees] == [
        "reward", "evaluation", "loss", "idle", "time", "source_reward", "source_passes"
    ]  # fmt: skip
    lines = {}
    for tree in trees:
        lines[tree["key"]] = {line["label"]: line["points"] for line in tree["lines"]}
    assert len(lines["reward"]["mean"]) <= 500 and lines["reward"]["mean"][-1] == [999, 142.714]
    assert [500, math.nan] not in lines["loss"]["loss"] and lines["idle"] == {"reward": [[0, 0.75]]}
    assert list(lines["evaluation"]) == ["held_out"]
    assert lines["source_reward"] == {"a": [[0, 0.5]], "b": [[0, 1.0]]}
    assert lines["source_passes"] == {"a": [[0, 0.25]]}


def test_configs_are_compared_field_by_field() -> None:
    first = flatten({"run_id": "a", "trainer": {"lr": 1, "sets": [1, 2], "empty": {}}, "old": True})
    second = flatten({"run_id": "b", "trainer": {"lr": 2, "sets": [1, 2], "empty": {}}})
    assert first["trainer.empty"] == {}
    assert differing([first, second]) == [("trainer.lr", [1, 2]), ("old", [True, ABSENT])]
    assert differing([{}, first, first]) == [], "nothing is known of the first"


def test_an_address_is_read_within_bounds() -> None:
    typed = [("run", "../etc"), *(("run", f"r{n}") for n in range(20)), ("smooth", "7"), ("x", "<b>")]
    query = CompareQuery.parse(QueryParams([*typed, *(("metric", f"m{n}") for n in range(40))]))
    assert query.runs == tuple(f"r{n}" for n in range(MAX_RUNS)) and len(query.metrics) == MAX_METRICS
    assert query.smoothing == 0.99 and query.x == "step"
    for smoothing in ("nan", "much", "-1"):
        assert CompareQuery.parse(QueryParams({"smooth": smoothing, "x": "time"})).smoothing == 0.0
