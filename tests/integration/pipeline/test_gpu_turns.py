"""Trainer and rollout workers on one device, in turn: real processes, and deaths of who has it."""

from pathlib import Path

import pytest

from tests.support.runs import ServiceRun, simulated_config
from tests.support.training import assert_nothing_lost
from tidemill.common.process.gpu_sharing import LOCKS_DIR_VARIABLE, GpuLock
from tidemill.common.run.state import EVALUATION, METRICS_FILE, read_records

STEPS, GROUPS, SIZE = 5, 2, 3


async def test_two_workers_and_a_trainer_take_turns_and_survive_deaths_of_the_holder(tmp_path: Path) -> None:
    held_out = tmp_path / "held.jsonl"
    held_out.write_text('{"prompt": "w3 w4", "ground_truth": "1"}\n')
    config = simulated_config(
        tmp_path,
        data__eval={"held": str(held_out)},
        rollout__engine="transformers",
        rollout__trainer_gpus="turns",
        rollout__gpu_turn_s=0.1,
        rollout__sampling={"max_tokens": 8},
        trainer__policy="transformers",
        trainer__steps=STEPS,
        trainer__groups_per_step=GROUPS,
        trainer__group_size=SIZE,
        trainer__mini_batches=2,
        trainer__evaluation={"every": 1},
        trainer__checkpoint_every=2,
        streams__lease_s=2.0,
    )
    watcher = GpuLock([tmp_path / "device-0"])
    async with ServiceRun(tmp_path, config) as run:
        for role in ("trainer", "rollout", "reward"):
            run.variables[role] = {LOCKS_DIR_VARIABLE: str(tmp_path)}
        for role, name in (("rollout", "r0"), ("rollout", "r1"), ("reward", ""), ("trainer", "")):
            run.start(role, name)

        await run.reach(1)
        # Whoever dies gives the device back: a place in line is enough to see it.
        run.kill("r0")
        await watcher.acquire()
        run.kill("trainer")
        watcher.release()
        run.start("trainer")
        assert await run.wait("trainer") == 0, run.log_of("trainer")
        await run.stop_all("r1", "reward")
        commits = await assert_nothing_lost(run.broker, run.keys, STEPS * GROUPS)
        await watcher.acquire()  # nobody has it
    assert [commit.step for commit in commits] == list(range(STEPS))
    assert all(commit.metrics["staleness/max"] <= 1.0 for commit in commits)
    assert any(commit.metrics.get("time/wait_device_s", 0.0) > 0.0 for commit in commits)
    evaluated = {r["version"] for r in read_records(run.run_dir / METRICS_FILE) if r["kind"] == EVALUATION}
    assert evaluated == set(range(STEPS + 1))


@pytest.mark.parametrize("staleness", [0, 2])
async def test_an_engine_that_finishes_what_runs_takes_turns_at_any_staleness(
    tmp_path: Path, staleness: int
) -> None:
    config = simulated_config(
        tmp_path,
        rollout__trainer_gpus="turns",
        rollout__gpu_turn_s=0.05,
        trainer__steps=6,
        trainer__groups_per_step=2,
        trainer__max_staleness=staleness,
    )
    async with ServiceRun(tmp_path, config) as run:
        for role in ("rollout", "reward", "trainer"):
            run.variables[role] = {LOCKS_DIR_VARIABLE: str(tmp_path)}
            run.start(role)
        assert await run.wait("trainer") == 0, run.log_of("trainer")
        assert await run.stop("rollout") == 0, run.log_of("rollout")
        commits = await assert_nothing_lost(run.broker, run.keys, 12)
    assert len(commits) == 6
