"""A whole run on sessions of an agent: real services, a real model, a worker that is killed in the middle."""

from pathlib import Path

import psutil
import pytest

from tests.support.preloaded import REPO
from tests.support.runs import ServiceRun
from tests.support.training import commits_of
from tests.support.waiting import wait_until
from tidemill.common.config import load_config


@pytest.mark.timeout(600)
async def test_a_run_trains_on_all_segments_of_an_agents_sessions_and_leaves_no_process(
    tmp_path: Path,
) -> None:
    config = load_config(
        REPO / "examples/arith/config.yaml",
        [
            "trainer.steps=2",
            "trainer.groups_per_step=2",
            "trainer.group_size=4",
            "trainer.mini_batches=1",
            "trainer.loggers=[]",
            "trainer.evaluation={every: 0, max_prompts: 8}",
            "streams.lease_s=5",
            "rollout.environment={use: agent, agent: 'tests.support.forking_agent:forking'}",
            "reward={rewards: {own: {environment: true}}}",
        ],
    )
    async with ServiceRun(tmp_path, config, "agents") as run:
        killed = run.start("rollout", "first")
        run.start("reward")
        run.start("trainer")
        started = psutil.Process(killed.pid)
        await wait_until(lambda: started.children(recursive=True), 120)
        left = started.children(recursive=True)
        killed.kill()
        run.start("rollout", "second")
        assert await run.wait("trainer", 240) == 0, run.log_of("trainer")
        await wait_until(lambda: not any(process.is_running() for process in left))
        commits = await commits_of(run.broker, run.keys)
    assert [len(set(commit.trained_keys)) for commit in commits] == [8, 8]
