"""The short form of `make chaos`: every kind of kill, on services without a model; and workers that die
between a payload of choices and its entry."""

import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.driver import torment
from tests.chaos.faults import KILLS, SESSION_KILLS, Kind, plan
from tests.chaos.recovery import summary
from tests.support.picture_runs import draw_rows, picture_config
from tests.support.runs import ServiceRun, simulated_config
from tests.support.servers import free_port
from tests.support.training import assert_full_steps, commits_of, messages
from tests.support.waiting import wait_until
from tidemill.common.archive.archiver import archive_run, check
from tidemill.common.history import History, StreamName
from tidemill.common.wire.choices import KEPT
from tidemill.common.wire.messages import CLAIMS_FOLDER, Trajectory
from tidemill.services.trainer.policy.simulated_policy import SimulatedPolicy
from tidemill.services.trainer.policy.transformers_policy import load_policy

STEPS = 16
SEED = 5
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
    tmp_path, played, kills
):
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


@pytest.mark.timeout(1200)  # processes with a model, on a busy machine
async def test_a_run_with_pictures_loses_nothing_and_its_versions_are_those_of_undisturbed_training(tmp_path):
    """Engine and trainer with a model that sees: what is trained again has the same pixels."""
    config = picture_config(
        tmp_path,
        draw_rows(tmp_path, 8),
        run_id="chaos",
        rollout__engine="transformers",
        rollout__workers=2,
        rollout__num_threads=1,
        rollout__sampling={"max_tokens": 8},
        trainer__policy="transformers",
        trainer__train_tower=True,
        trainer__deterministic=True,
        trainer__num_threads=1,
        trainer__steps=STEPS,
        trainer__checkpoint_every=3,
        streams__lease_s=1.5,
        streams__trim=True,
        streams__archive={"enabled": True, "segment_mb": 0.004},
    )
    faults = plan(SEED, len(KILLS), STEPS, longest_delay_s=1.0)
    load = partial(load_policy, run_dir=tmp_path / "chaos")
    outcome = await torment(tmp_path, config, faults, SEED, load, print, is_forked=True)
    kinds = [event.kind for event in outcome.watch.events]
    assert {kind: kinds.count(kind) for kind in KILLS} == dict.fromkeys(KILLS, 1)
    assert outcome.verdict.steps == STEPS
    assert outcome.is_good, (outcome.verdict, outcome.replay, outcome.disagreements)


FEW_STEPS = 6
GROUPS = 4
SIZE = 4


@pytest.mark.parametrize("keeps", [True, False])
async def test_choices_are_neither_lost_nor_twice(tmp_path: Path, keeps: bool) -> None:
    config = simulated_config(
        tmp_path,
        rollout__sampling={"max_tokens": 16, "top_k": 2},
        rollout__simulated={"tokens": 8, "vocab_size": 32, "group_s": 0.2, "jitter": 0.8},
        trainer__steps=FEW_STEPS,
        trainer__groups_per_step=GROUPS,
        trainer__group_size=SIZE,
        streams__trim=True,
        streams__archive={"enabled": True, "segment_mb": 0.004, "keep_choices": keeps},
    )
    async with ServiceRun(tmp_path, config) as run:
        store = run.run_dir / CLAIMS_FOLDER
        orphans = set[str]()
        run.start("trainer")
        run.start("reward")
        for life in range(2):
            run.start("tests.chaos.mortal_rollout", f"mortal-{life}")
            assert await run.wait(f"mortal-{life}") == -signal.SIGKILL
            entries = await messages(run.broker, run.keys.trajectories(), Trajectory)
            assert not any(entry.choices.rows for entry in entries), "never in Redis"  # type: ignore[union-attr]
            claimed = {claim.pointer for entry in entries for claim in entry.claims}
            unclaimed = {path.name for path in store.iterdir()} - claimed
            assert unclaimed - orphans, f"life {life} ended before it had written any"
            orphans |= unclaimed
        run.start("rollout")
        await run.reach(2)
        store.rename(store.with_name("away"))
        await wait_until(lambda: "waiting for the store of choices" in run.log_of("rollout"))
        store.with_name("away").rename(store)
        assert await run.wait("trainer") == 0, run.log_of("trainer")
        await run.stop_all("rollout", "reward")

        commits = await commits_of(run.broker, run.keys)
        assert_full_steps(commits, GROUPS)
        assert len(commits) == FEW_STEPS and not [drop for commit in commits for drop in commit.dropped]
        names = {path.name for path in store.iterdir()}
        assert not names & orphans, "they went with the tickets that nobody needs any more"
        await archive_run(run.broker, run.keys, run.run_dir, config.streams.archive, is_last=True)
        shutil.rmtree(store)
        archived = History(run.keys.run_id, run.run_dir, None)
        samples = [sample async for sample in archived.messages(StreamName.TRAJECTORIES, Trajectory)]
        trained = {key for commit in commits for key in commit.trained_keys}
        assert not check(run.run_dir) and {sample.key for sample in samples} >= trained
        assert len({sample.key for sample in samples}) == len(samples), "one is published twice"
        for sample in samples:
            assert sample.choices and sample.choices.claim
            assert bool(sample.choices.rows) == keeps
            if keeps:  # the engine keeps each token, and the one after it
                kept = sample.choices.rows[KEPT].values.reshape(-1, 2).T
                ids = sample.completion_ids
                assert kept.tolist() == [ids.tolist(), ((ids + 1) % 32).tolist()]
