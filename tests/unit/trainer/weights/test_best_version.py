"""pass@k by hand; the best evaluated version keeps its weights, also over restarts."""

import json
import math
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import trainer_config
from tidemill.common.errors import ConfigError
from tidemill.common.run.weight_files import version_name
from tidemill.services.trainer.evaluation import pass_at_k
from tidemill.services.trainer.service import find_best_version
from tidemill.services.trainer.weights.best_version import BestVersion


def test_pass_at_k_is_the_share_of_all_sets_of_k_samples_that_hold_a_solution():
    assert pass_at_k(5, 2, 3) == pytest.approx(0.9)  # 1 - C(3, 3) / C(5, 3) = 1 - 1 / 10
    for solved, k in product(range(7), (1, 3, 6)):
        sets = list(combinations([i < solved for i in range(6)], k))
        assert pass_at_k(6, solved, k) == pytest.approx(sum(map(any, sets)) / len(sets))
    assert 0.0 < pass_at_k(1024, 1, 512) < 1.0, "binomials of this size overflow a float"
    with pytest.raises(ValueError, match="pass@3"):
        pass_at_k(2, 1, 3)


def weights(run_dir: Path, *versions: int) -> None:
    for version in versions:
        (run_dir / "weights" / version_name(version)).mkdir(parents=True, exist_ok=True)


def record(version: int, score: float | None, name: str = "test") -> dict[str, Any]:
    return {"kind": "evaluation", "version": version, "set": name, "score": score}


def test_the_best_version_is_kept_and_named_in_best_json(tmp_path):
    best = BestVersion(tmp_path, "score", [])
    assert best.in_use == frozenset()
    for version, score in ((0, 0.1), (5, 0.7), (10, 0.7), (15, math.nan), (20, 0.6)):
        best.consider(version, {"test": {"score": score}})
    assert best.in_use == {5}
    best_json = json.loads((tmp_path / "best.json").read_text())
    assert (best_json["version"], best_json["value"], best_json["weights"]) == (5, 0.7, "weights/v00000005")


def test_a_metric_is_the_mean_over_datasets_or_that_of_one(tmp_path):
    results = [
        {"a": {"score": 0.9, "pass_at_4": 0.1}, "b": {"score": 0.2, "pass_at_4": 0.9}},
        {"a": {"score": 0.5, "pass_at_4": 0.5}, "b": {"score": 0.7, "pass_at_4": 0.8}},
    ]
    for metric, version in (("score", 1), ("a/score", 0), ("pass_at_4", 1), ("b/pass_at_4", 0)):
        best = BestVersion(tmp_path, metric, [])
        for number, result in enumerate(results):
            best.consider(number, result)
        assert best.in_use == {version}, metric


def test_a_restart_finds_the_same_version_from_what_is_on_record(tmp_path):
    weights(tmp_path, 5, 19, 20)
    records = [record(0, 0.9), record(5, 0.7), record(20, 0.6), record(19, None)]
    assert BestVersion(tmp_path, "score", records).in_use == {5}, "the weights of version 0 are gone"
    # A run that goes on without its evaluation sets keeps what it has found.
    without_sets = trainer_config()
    best = find_best_version(tmp_path, without_sets, records)
    assert best is not None and best.in_use == {5}
    assert find_best_version(tmp_path, without_sets, []) is None
    with_sets = trainer_config(data__train="train.jsonl", data__eval={"held": "held.jsonl"})
    assert find_best_version(tmp_path, with_sets, []) is not None, "its first evaluation is still to come"


def test_a_version_that_will_be_trained_again_is_best_no_more(tmp_path):
    weights(tmp_path, 5, 20)
    (tmp_path / "best.json").write_text('{"version": 20}')
    best = BestVersion(tmp_path, "score", [record(5, 0.3)])
    best.consider(10, {"test": {"score": 0.2}})
    assert json.loads((tmp_path / "best.json").read_text())["version"] == 5


def test_without_a_metric_nothing_is_kept(tmp_path):
    best = BestVersion(tmp_path, "", [])
    best.consider(0, {"test": {"score": 1.0}})
    assert best.in_use == frozenset() and not (tmp_path / "best.json").exists()


@pytest.mark.parametrize(
    ("evaluation", "reason"),
    [
        ({"keep_best": "pass_at_4", "samples": 4}, "keep_best"),
        ({"keep_best": "mean_length"}, "keep_best"),
        ({"keep_best": "nowhere/score"}, "names the dataset 'nowhere'"),
    ],
)
def test_what_cannot_be_measured_is_refused(evaluation, reason):
    with pytest.raises(ConfigError, match=reason):
        trainer_config(evaluation=evaluation)


def result(score: float, num_samples: int, num_failed: int = 0) -> dict[str, dict[str, float]]:
    return {"test": {"score": score, "num_samples": float(num_samples), "num_failed": float(num_failed)}}


def test_an_evaluation_with_too_many_failures_is_no_candidate(tmp_path):
    """The mean over what a broken judge left says nothing about the version."""
    best = BestVersion(tmp_path, "score", [])
    best.consider(0, result(0.9, 4, 96))
    assert best.best is None
    best.consider(1, result(0.5, 98, 2))
    best.consider(2, result(0.8, 97, 3))
    assert best.in_use == {1}
    weights(tmp_path, 1, 2)
    records = [
        {"kind": "evaluation", "version": version, "set": "test", **scores["test"]}
        for version, scores in ((1, result(0.5, 98, 2)), (2, result(0.8, 97, 3)))
    ]
    assert BestVersion(tmp_path, "score", records).in_use == {1}


def test_evaluations_of_other_samples_are_not_compared(tmp_path):
    """A resumed run may evaluate more rows; what was best of the fewer ones is not held against them."""
    best = BestVersion(tmp_path, "score", [])
    best.consider(1, result(0.9, 10))
    best.consider(2, result(0.6, 100))
    assert best.in_use == {2}
    best.consider(3, result(0.7, 99, 1))
    assert best.in_use == {3}
