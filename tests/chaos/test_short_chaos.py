"""The short form of `make chaos`: every kind of kill, on services without a model."""

from pathlib import Path

import pytest

from tests.chaos.driver import torment
from tests.chaos.faults import KILLS, Kind, plan
from tests.chaos.recovery import summary
from tests.support.runs import simulated_config
from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy

STEPS, SEED = 16, 5


@pytest.mark.timeout(900)  # a dozen starts of processes, on a busy machine
async def test_a_run_whose_processes_are_killed_loses_nothing_and_trains_nothing_twice(
    tmp_path: Path,
) -> None:
    config = simulated_config(
        tmp_path,
        run_id="chaos",
        rollout__workers=2,
        reward__workers=2,
        rollout__simulated={"tokens": 8, "vocab_size": 32, "group_s": 0.3, "jitter": 0.8},
        trainer__simulated={"group_s": 0.05},
        trainer__steps=STEPS,
        trainer__checkpoint_every=3,
        streams__lease_s=1.5,
        streams__trim=True,
        streams__archive={"enabled": True, "segment_mb": 0.004},
    )
    faults = plan(SEED, len(KILLS), STEPS, longest_delay_s=1.0)
    outcome = await torment(tmp_path, config, faults, SEED, SimulatedPolicy, print, is_forked=True)
    kinds = [event.kind for event in outcome.watch.events]
    assert {kind: kinds.count(kind) for kind in KILLS} == dict.fromkeys(KILLS, 1)
    assert Kind.JOIN in kinds
    assert outcome.verdict.steps == STEPS
    assert outcome.verdict.is_clean, outcome.verdict
    assert outcome.replay.matches, outcome.replay
    assert outcome.num_archiver_kills > 0
    assert not outcome.disagreements
    assert Kind.REDIS.value in summary([outcome.watch])
