"""What examples/verifiers/play.py makes of the record of a rollout."""

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[4] / "examples" / "verifiers" / "play.py"
result_of = runpy.run_path(str(EXAMPLE))["result_of"]


def episode(score: Any, **more: Any) -> dict[str, Any]:
    """Of one agent, in the form of verifiers 0.4."""
    trace = {
        "agent": {"trainable": True},
        "ok": True,
        "errors": [],
        "stop_condition": None,
        "rewards": {"correct": score if score is None else {"score": score, "weight": 2.0}},
        "metrics": {"turns": 3.0, "never": None},
    }
    return {"ok": True, "errors": [], "traces": [trace | more]}


def test_the_reward_is_the_weighted_sum_and_says_whether_the_agents_time_was_over() -> None:
    assert result_of(episode(0.5)) == {
        "reward": 1.0,
        "metrics": {"turns": 3.0, "correct": 0.5},
        "timeout": False,
    }
    assert result_of(episode(0.5, stop_condition="agent_timeout"))["timeout"] is True


@pytest.mark.parametrize("score", [None, float("nan"), float("inf"), "high"])
def test_a_rollout_without_a_reward_is_a_fault_with_its_reason(score: Any) -> None:
    """Where scoring is late, verifiers says that all is well, and writes null."""
    with pytest.raises(SystemExit, match=r"correct is .*scoring_timeout"):
        result_of(episode(score, stop_condition="scoring_timeout"))
    broken = episode(0.5)
    broken["traces"][0]["rewards"] = {"correct": {"score": None, "weight": 1.0}}
    with pytest.raises(SystemExit, match="correct is None"):
        result_of(broken)
    with pytest.raises(SystemExit, match="no reward"):
        result_of(episode(0.5, rewards={}))
