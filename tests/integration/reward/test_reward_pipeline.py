"""Whole runs whose rewards are several, grouped, and fail now and then."""

from pathlib import Path
from textwrap import dedent

from tests.support.runs import ServiceRun, simulated_config
from tests.support.training import commits_of

SOURCE = """
    def flaky(data_source, solution_str, ground_truth, extra_info):
        if int(ground_truth) % 8 == 0:
            raise ValueError("no verdict")
        return {"score": float(len(solution_str) % 3), "length": len(solution_str)}

    def together(completions, completion_ids, **columns):
        return [float(index) for index in range(len(completions))]
"""


async def test_several_rewards_and_a_ranking_train_a_run_and_leave_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(dedent(SOURCE))
    path = f"{tmp_path}/rewards.py"
    rewards = {
        "flaky": {"function": f"{path}:flaky", "on_failure": "drop_group", "max_attempts": 1},
        "place": {"function": f"{path}:together", "per": "group", "weight": 0.1},
    }
    config = simulated_config(
        tmp_path, reward={"rewards": rewards, "group": "rank", "processes": 1}, trainer__steps=3
    )
    async with ServiceRun(tmp_path, config) as run:
        for name in ("rollout", "reward-0", "reward-1"):
            run.start(name.partition("-")[0], name)
        run.start("trainer")
        assert await run.wait("trainer") == 0
        commits = await commits_of(run.broker, run.keys)
        names = await run.broker.execute("KEYS", f"{run.keys.results(0).rpartition(':')[0]}:*")
        tickets = await run.broker.execute("SMEMBERS", run.keys.result_tickets())
    assert len(commits) == 3
    assert all(len(commit.groups) == config.trainer.groups_per_step for commit in commits)
    reasons = [reason for commit in commits for _, _, reason in commit.dropped]
    assert "failed_score" in reasons  # a group with a failure was replaced, as its reward's policy says
    for commit in commits:
        assert {
            "rewards/flaky/mean",
            "rewards/place/std",
            "rewards/before_group/mean",
        } <= commit.metrics.keys()
        assert commit.metrics["rewards/place/mean"] == 1.5
        assert abs(commit.metrics["reward"] - 0.5) < 1e-6  # ranks of a group are 0.5 in the mean
    # Only groups that were still outstanding at the end of the run may have left something.
    trained = {str(ticket).encode() for commit in commits for ticket in commit.groups}
    assert not trained & set(tickets)
    assert len(names) == len(tickets)
