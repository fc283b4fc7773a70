"""The staleness bound holds over a whole run, recomputed from what the streams hold."""

from pathlib import Path

import pytest

from tests.support.runs import ServiceRun, simulated_config
from tests.support.training import messages
from tidemill.common.wire.messages import Commit, Ticket, Trajectory

STEPS, GROUPS, SIZE = 8, 4, 4


@pytest.mark.parametrize("order", ["in_order", "as_ready"])
@pytest.mark.parametrize("max_staleness", [0, 1, 4])
async def test_no_trained_token_is_staler_than_the_bound(
    tmp_path: Path, max_staleness: int, order: str
) -> None:
    """Two rollout workers, one of them twenty times slower, while the trainer is faster than both."""
    config = simulated_config(
        tmp_path,
        trainer__steps=STEPS,
        trainer__groups_per_step=GROUPS,
        trainer__group_size=SIZE,
        trainer__max_staleness=max_staleness,
        trainer__batch_order=order,
        rollout__max_groups_in_flight=3,
        rollout__simulated__jitter=0.5,
    )
    async with ServiceRun(tmp_path, config) as run:
        run.start("rollout", "fast", "rollout.simulated.group_s=0.02")
        run.start("rollout", "slow", "rollout.simulated.group_s=0.4")
        run.start("reward")
        run.start("trainer")
        assert await run.wait("trainer") == 0
        commits = await messages(run.broker, run.keys.commits, Commit)
        samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
        tickets = await messages(run.broker, run.keys.prompts(), Ticket)

    by_key = {sample.key: sample for sample in samples}
    assert len(by_key) == len(samples), "a sample was published twice"
    assert [commit.step for commit in commits] == list(range(STEPS))
    trained = [key for commit in commits for key in commit.trained_keys]
    assert sorted(trained) == sorted(by_key), "every trajectory is trained exactly once"
    assert len(tickets) == STEPS * GROUPS

    staleness = [
        commit.step - version
        for commit in commits
        for key in commit.trained_keys
        for version in by_key[key].token_versions().tolist()
    ]
    assert min(staleness) >= 0, "a token cannot come from a version that was not there yet"
    assert max(staleness) <= max_staleness
    if max_staleness == 0:
        assert set(staleness) == {0}
    assert {sample.worker for sample in samples} == {"fast", "slow"}
