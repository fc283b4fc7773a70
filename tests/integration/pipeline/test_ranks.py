"""A trainer of two ranks is one trainer: it can be killed and started again, and ends alone."""

from pathlib import Path

import psutil

from tests.support.runs import ServiceRun, hold_scores, simulated_config
from tests.support.waiting import has_ended, wait_until
from tidemill.common.run.state import FINISHED, read_state

STEPS = 5
GROUPS = 2
PATIENCE_OF_RANKS_S = 240.0
"""Two ranks had not trained their first step after 120 s where forty processes wanted two cores."""


async def test_two_ranks_train_a_run_and_replay_it_bit_by_bit_after_a_kill(tmp_path: Path) -> None:
    config = simulated_config(
        tmp_path, trainer__policy="transformers", trainer__device="cpu", trainer__num_ranks=2,
        trainer__deterministic=True, trainer__optimizer={"lr": 0.01}, trainer__steps=STEPS,
        trainer__groups_per_step=GROUPS, trainer__mini_batches=2, trainer__checkpoint_every=2,
        trainer__micro_batch_tokens=64, trainer__max_staleness=1, reward__timeout_s=600.0,
    )  # fmt: skip
    # Those of four steps: the run may not end before its trainer is killed.
    gate = hold_scores(tmp_path, 4 * GROUPS * config.trainer.group_size)
    async with ServiceRun(tmp_path, config) as run:
        run.start("rollout")
        run.start("reward")
        trainer = run.start("trainer")
        await run.reach(3, PATIENCE_OF_RANKS_S)
        (follower,) = psutil.Process(trainer.pid).children()
        run.kill("trainer")
        await wait_until(lambda: has_ended(follower))
        gate.touch()
        trainer = run.start("trainer")
        await run.reach(4, PATIENCE_OF_RANKS_S)
        commits = await run.trained()
        assert "weights differ" not in run.log_of("trainer")
        assert len({commit.digest for commit in commits}) == STEPS, "every step changed the weights"
        assert (await read_state(run.broker, run.keys))["status"] == FINISHED
