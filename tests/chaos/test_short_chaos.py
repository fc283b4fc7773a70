"""The short form of `make chaos`: every kind of kill, on services without a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.driver import torment
from tests.chaos.faults import KILLS, SESSION_KILLS, Kind, plan
from tests.chaos.recovery import summary
from tests.support.runs import simulated_config
from tests.support.servers import free_port
from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy

STEPS, SEED = 16, 5
MASKED = {"max_tokens": 16, "top_k": 2}
"""What it leaves of each token is claimed, archived and trained."""
SESSIONS = {
    "rollout__environment": {
        "use": f"{Path(__file__).with_name('sums.py')}:Sums", "max_turns": 2, "processes": 2,
        "options": {"address": f"http://127.0.0.1:{free_port()}"},
    },
    "reward": {"workers": 2, "rewards": {"environment": {"environment": True}}},
}  # fmt: skip


@pytest.mark.timeout(900)  # a dozen starts of processes, on a busy machine
@pytest.mark.parametrize(
    ("played", "kills"),
    [({"reward__workers": 2, "rollout__sampling": MASKED}, KILLS), (SESSIONS, SESSION_KILLS)],
    ids=["turns", "sessions"],
)
async def test_a_run_whose_processes_are_killed_loses_nothing_and_trains_nothing_twice(
    tmp_path: Path, played: dict[str, Any], kills: Sequence[Kind]
) -> None:
    config = simulated_config(
        tmp_path,
        run_id="chaos",
        rollout__workers=2,
        rollout__simulated={"tokens": 8, "vocab_size": 32, "group_s": 0.3, "jitter": 0.8},
        trainer__simulated={"group_s": 0.05},
        trainer__steps=STEPS,
        trainer__checkpoint_every=3,
        streams__lease_s=1.5,
        streams__trim=True,
        streams__archive={"enabled": True, "segment_mb": 0.004},
        **played,
    )
    faults = plan(SEED, len(kills), STEPS, longest_delay_s=1.0, kills=kills)
    outcome = await torment(tmp_path, config, faults, SEED, SimulatedPolicy, print, is_forked=True)
    kinds = [event.kind for event in outcome.watch.events]
    assert {kind: kinds.count(kind) for kind in kills} == dict.fromkeys(kills, 1)
    assert Kind.JOIN in kinds
    assert outcome.verdict.steps == STEPS
    assert outcome.verdict.is_clean, outcome.verdict
    assert outcome.replay.matches, outcome.replay
    assert outcome.num_archiver_kills > 0
    assert not outcome.disagreements
    assert not outcome.misjudged and not outcome.left_over
    assert Kind.REDIS.value in summary([outcome.watch])
