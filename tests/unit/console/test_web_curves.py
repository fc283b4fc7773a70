"""Curves of runs: read from their files, smoothed, thinned; and where their configs differ."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from starlette.datastructures import QueryParams

from tidemill.common.config.section import flatten
from tidemill.services.console.status.series import smooth
from tidemill.services.console.status.snapshot import StepPoint
from tidemill.services.console.web.compare_pages import ABSENT, MAX_METRICS, MAX_RUNS, CompareQuery, differing
from tidemill.services.console.web.curves import chart_trees, columns_in, thin

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
    y, weight = np.random.default_rng(3).normal(size=40), 0.8
    for n, found in enumerate(smooth(y, weight)):
        assert found == pytest.approx(np.average(y[: n + 1], weights=weight ** np.arange(n, -1, -1)))
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
    found = {name: columns.series(name) for name in NAMES}
    assert found["reward"].x.tolist() == [0, 1, 2] and found["reward"].y.tolist() == [1, 0.75, 1.25]
    assert found["reward"].time.tolist() == [0, 1, 2] and found["kl"].x.tolist() == [1]
    assert found["eval/held_out/score"].y.tolist() == [0.25] and found[NAMES[3]].y.tolist() == [2.0]
    assert len(found["none"].x) == 0 and columns_in(tmp_path) is columns, "it is read when it has changed"
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
    lines = {tree["key"]: {one["label"]: one["points"] for one in tree["lines"]} for tree in trees}
    assert len(lines["reward"]["mean"]) <= 500 and lines["reward"]["mean"][-1] == [999, 142.714]
    assert [500, math.nan] not in lines["loss"]["loss"] and lines["idle"] == {"reward": [[0, 0.75]]}
    assert list(lines["evaluation"]) == ["held_out"]
    assert lines["source_reward"] == {"a": [[0, 0.5]], "b": [[0, 1.0]]}
    assert lines["source_passes"] == {"a": [[0, 0.25]]}


def test_configs_are_compared_field_by_field() -> None:
    one = flatten({"run_id": "a", "trainer": {"lr": 1, "sets": [1, 2], "empty": {}}, "old": True})
    other = flatten({"run_id": "b", "trainer": {"lr": 2, "sets": [1, 2], "empty": {}}})
    assert one["trainer.empty"] == {}
    assert differing([one, other]) == [("trainer.lr", [1, 2]), ("old", [True, ABSENT])]
    assert differing([{}, one, one]) == [], "nothing is known of the first"


def test_an_address_is_read_within_bounds() -> None:
    typed = [("run", "../etc"), *(("run", f"r{n}") for n in range(20)), ("smooth", "7"), ("x", "<b>")]
    query = CompareQuery.parse(QueryParams([*typed, *(("metric", f"m{n}") for n in range(40))]))
    assert query.runs == tuple(f"r{n}" for n in range(MAX_RUNS)) and len(query.metrics) == MAX_METRICS
    assert query.smoothing == 0.99 and query.x == "step"
    for smoothing in ("nan", "much", "-1"):
        assert CompareQuery.parse(QueryParams({"smooth": smoothing, "x": "time"})).smoothing == 0.0
