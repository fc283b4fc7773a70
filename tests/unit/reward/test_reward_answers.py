"""The table of answers `benchmarks/graders/answers.jsonl`: each earns its score from the built-in rewards."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tidemill.common.config.reward_kinds import VerdictConfig
from tidemill.services.reward.builtin import BUILTINS
from tidemill.services.reward.outcome import AttemptError
from tidemill.services.reward.remote.judge import Verdict

TABLE = Path(__file__).parents[3] / "benchmarks" / "graders" / "answers.jsonl"
ROWS: list[dict[str, Any]] = [json.loads(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
FIELDS = {"name", "kind", "reward", "prompt", "completion", "ground_truth", "extra", "expected"}
FAILED = "failed"


def score_of(row: dict[str, Any]) -> float | str | None:
    reward = row["reward"]
    try:
        if "judge" in reward:
            verdict = Verdict("judge", VerdictConfig(**reward["judge"]["verdict"]))
            return verdict.read(row["extra"]["judgement"], row["completion"]).value
        function = BUILTINS[reward["function"]].function
        score: float = function(
            "", row["completion"], row["ground_truth"], row["extra"], **reward.get("kwargs", {})
        )
        return score
    except AttemptError:
        return FAILED


def test_the_table_has_right_wrong_and_hostile_answers_for_each_reward() -> None:
    assert all(row.keys() == FIELDS for row in ROWS)
    assert len({row["name"] for row in ROWS}) == len(ROWS) >= 60
    kinds = Counter((row["name"].partition(":")[0], row["kind"]) for row in ROWS)
    for reward in ("math", "gsm8k", "exact_match", "judge"):
        assert min(kinds[reward, kind] for kind in ("right", "wrong", "hostile")) >= 2, reward


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_each_answer_earns_its_score(row: dict[str, Any]) -> None:
    assert score_of(row) == row["expected"]
