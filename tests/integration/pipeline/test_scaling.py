"""Workers join and leave a run at any time, and Redis dies; nothing is lost and nothing comes twice."""

import asyncio
from pathlib import Path

from tests.support.runs import ServiceRun, simulated_config
from tests.support.training import messages, num_commits
from tests.support.waiting import wait_until
from tidemill.common.wire.messages import Score, Trajectory

STEPS, GROUPS, SIZE = 40, 3, 4
UPDATE_S = 0.5
"""The run must outlast the start of three workers."""


async def test_workers_join_and_leave_during_a_run_and_redis_dies(tmp_path: Path) -> None:
    config = simulated_config(
        tmp_path,
        trainer__steps=STEPS,
        trainer__groups_per_step=GROUPS,
        trainer__group_size=SIZE,
        trainer__simulated={"update_s": UPDATE_S},
        rollout__max_groups_in_flight=3,
        rollout__simulated={"tokens": 8, "vocab_size": 32, "group_s": 0.3, "jitter": 1.0},
        reward__delay_s=(0.0, 0.2),
        streams__lease_s=1.0,
    )
    async with ServiceRun(tmp_path, config) as run:
        run.start("rollout", "rollout-1")
        run.start("reward", "reward-1")
        run.start("trainer")
        await run.reach(1)
        run.start("rollout", "rollout-2")
        run.start("reward", "reward-2")
        await wait_until(lambda: _has_worked(run, "rollout-2"))
        run.kill("rollout-1")
        await wait_until(lambda: _has_worked(run, "reward-2"))
        run.kill("reward-1")
        await run.reach(await num_commits(run.broker, run.keys) + 1)
        run.redis.kill()
        await asyncio.to_thread(run.redis.start)
        run.start("rollout", "rollout-3")
        run.start("reward", "reward-1")  # under the name of the one that was killed
        await wait_until(lambda: _has_worked(run, "rollout-3"))
        assert await run.stop("rollout-2") == 0, run.log_of("rollout-2")
        assert await run.stop("reward-2") == 0, run.log_of("reward-2")
        commits = await run.trained()
        samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
        scores = await messages(run.broker, run.keys.scores(), Score)

    wanted = sorted(key for commit in commits for key in commit.trained_keys)
    assert sorted(sample.key for sample in samples) == wanted, "each trajectory is in the stream once"
    assert sorted(score.key for score in scores) == wanted, "each score is in the stream once"
    assert {sample.worker for sample in samples} == {"rollout-1", "rollout-2", "rollout-3"}
    assert {score.worker for score in scores} == {"reward-1", "reward-2"}
    assert max(commit.metrics["staleness/max"] for commit in commits) <= config.trainer.max_staleness


async def _has_worked(run: ServiceRun, name: str) -> bool:
    key, kind = (
        (run.keys.scores(), Score) if name.startswith("reward") else (run.keys.trajectories(), Trajectory)
    )
    return any(message.worker == name for message in await messages(run.broker, key, kind))
