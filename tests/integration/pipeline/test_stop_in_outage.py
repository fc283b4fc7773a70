"""Redis is away and does not come back; services that are asked to stop do stop, and nothing is lost."""

from pathlib import Path

from tests.support.runs import ServiceRun, simulated_config
from tests.support.training import assert_nothing_lost

STEPS, GROUPS = 12, 2


async def test_services_stop_also_while_redis_is_away(tmp_path: Path) -> None:
    config = simulated_config(
        tmp_path,
        trainer__steps=STEPS,
        trainer__groups_per_step=GROUPS,
        rollout__simulated={"tokens": 8, "vocab_size": 32, "group_s": 0.1},
        trainer__simulated={"group_s": 0.05},
        streams__drain_s=1.0,
    )
    roles = ("rollout", "reward", "trainer")

    async with ServiceRun(tmp_path, config) as run:
        run.start_all()
        await run.reach(3)
        run.redis.kill()
        for role in roles:
            assert await run.stop(role, 90) in (0, 1), run.log_of(role)
            assert "Traceback" not in run.log_of(role), run.log_of(role)
        assert any("asked to stop" in run.log_of(role) for role in roles)
        run.redis.start()
        run.start_all()
        assert await run.wait("trainer") == 0, run.log_of("trainer")
        commits = await assert_nothing_lost(run.broker, run.keys, STEPS * GROUPS)
        assert len(commits) == STEPS
