"""Curves of several runs: read from their files, smoothed, thinned; and where their configs differ."""

import json
from pathlib import Path

import numpy as np
import pytest
from starlette.datastructures import QueryParams

from tidemill.services.console.status.snapshot import StepPoint
from tidemill.services.console.web.compare_pages import ABSENT, MAX_METRICS, MAX_RUNS, CompareQuery, differing
from tidemill.services.console.web.curves import Columns, MetricFiles, Series, line_of, smooth, thin
from tidemill.services.console.web.site import flatten

NAMES = ["reward", "kl", "eval/held_out/score", "eval/held_out/rewards/game/mean", "none"]


def step(number: int, **numbers: object) -> str:
    return json.dumps({"kind": "step", "step": number, "time": 100.0 + number, **numbers}) + "\n"


def write(folder: Path, *lines: str) -> Path:
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def evaluation(version: int, **numbers: object) -> str:
    kinds = {"kind": "evaluation", "set": "held_out", "version": version, "time": 101.0}
    return json.dumps({**kinds, **numbers}) + "\n"


LINES = (
    step(0, reward=1, kl=None),
    evaluation(0, score=0.25, **{"rewards/game/mean": 2.0}),
    step(1, reward=0.5, kl=0.25),
    step(1, reward=0.75, kl=0.5),
    step(2, reward=1.25),
)


def test_a_moving_average_has_the_weights_of_its_definition() -> None:
    assert smooth(np.array([1.0, 0.0]), 0.5).tolist() == pytest.approx([1.0, 1 / 3])
    y, weight = np.random.default_rng(3).normal(size=40), 0.8
    for n, found in enumerate(smooth(y, weight)):
        weights = weight ** np.arange(n, -1, -1)
        assert found == pytest.approx(np.average(y[: n + 1], weights=weights))
    assert smooth(y, 0.0) is y and len(smooth(np.empty(0), 0.9)) == 0


def test_no_spike_is_lost_where_a_long_curve_is_thinned() -> None:
    y = np.zeros(10_000)
    y[[777, 4242]] = 9.0, -9.0
    places = thin(y, 100)
    assert len(places) <= 100 and {0, 777, 4242, 9_999} <= set(places.tolist())
    assert (np.diff(places) > 0).all() and thin(y[:100], 100).tolist() == list(range(100))


def test_numbers_are_read_by_step_and_version_and_the_last_of_a_step_stands(tmp_path: Path) -> None:
    files = MetricFiles()
    write(tmp_path, *LINES, '{"kind": "step", "step": 3, "rew')
    assert files.names(tmp_path) == sorted(NAMES[:-1])
    found = files.series(tmp_path, NAMES)
    assert found["reward"].x.tolist() == [0, 1, 2] and found["reward"].y.tolist() == [1, 0.75, 1.25]
    assert found["reward"].time.tolist() == [0, 1, 2] and found["kl"].x.tolist() == [1]
    assert found["eval/held_out/score"].y.tolist() == [0.25] and found[NAMES[3]].y.tolist() == [2.0]
    assert len(found["none"].x) == 0
    write(tmp_path, *LINES, step(3, reward=2))
    assert files.series(tmp_path, ["reward"])["reward"].y.tolist() == [1, 0.75, 1.25, 2], "it is read again"


def test_a_line_that_is_no_record_costs_no_other(tmp_path: Path) -> None:
    write(tmp_path, *LINES[:2], "not JSON\n", '{"kind": "step", "step": 1, "reward": "much"}\n', *LINES[3:])
    found = MetricFiles().series(tmp_path, NAMES)
    assert found["reward"].y.tolist() == [1, 0.75, 1.25] and found["eval/held_out/score"].y.tolist() == [0.25]


def test_a_run_without_a_file_has_no_numbers_or_those_of_its_commits(tmp_path: Path) -> None:
    assert MetricFiles().names(tmp_path) == [] and len(MetricFiles().series(tmp_path, ["kl"])["kl"].x) == 0
    points = [StepPoint(1, {"reward": 0.5, "time": 7.0}, 7.0), StepPoint(0, {"reward": 0.25}, 5.0)]
    found = Columns.of(points).series("reward")
    assert (found.x.tolist(), found.y.tolist(), found.time.tolist()) == ([0, 1], [0.25, 0.5], [0, 2])


def test_a_smoothed_line_keeps_what_it_was_made_of() -> None:
    series = Series(np.array([0.0, 1.0]), np.array([1.0, 0.0]), np.array([0.0, 90.0]))
    assert line_of("a", series, 0.0) == {"label": "a", "points": [[0, 1], [1, 0]]}
    line = line_of("a", series, 0.5, 60.0)
    assert line["points"] == [[0, 1], [1.5, 0.333333]] and line["raw"] == [[0, 1], [1.5, 0]]


def test_configs_are_compared_field_by_field() -> None:
    one = flatten({"run_id": "a", "trainer": {"lr": 1, "sets": [1, 2], "empty": {}}, "old": True})
    other = flatten({"run_id": "b", "trainer": {"lr": 2, "sets": [1, 2], "empty": {}}})
    assert one["trainer.empty"] == {}
    assert differing([one, other]) == [("trainer.lr", [1, 2]), ("old", [True, ABSENT])]
    assert differing([{}, one, one]) == [], "nothing is known of the first"


def test_an_address_is_read_within_bounds_and_written_back() -> None:
    typed = [("run", "../etc"), *(("run", f"r{n}") for n in range(20)), ("smooth", "7"), ("x", "<b>")]
    query = CompareQuery.parse(QueryParams([*typed, *(("metric", f"m{n}") for n in range(40))]))
    assert query.runs == tuple(f"r{n}" for n in range(MAX_RUNS)) and len(query.metrics) == MAX_METRICS
    assert query.smoothing == 0.99 and query.x == "step"
    assert CompareQuery.parse(QueryParams("smooth=nan")).smoothing == 0.0
    again = CompareQuery.parse(QueryParams(query.address))
    assert again == query
