"""Whole runs of all services with real models, and how services stop when asked to."""

import json
from pathlib import Path

from tests.support.runs import SERVICES, ServiceRun, simulated_config
from tests.support.training import messages, num_commits
from tests.support.waiting import wait_until
from tidemill.common.errors import ConfigError
from tidemill.common.process.heartbeats import read_heartbeats
from tidemill.common.run.state import EVALUATION, FINISHED, METRICS_FILE, STEP, read_records, read_state
from tidemill.common.run.weight_files import folder_versions, verified_files
from tidemill.common.streams import group_status
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP
from tidemill.common.wire.messages import Lane, Ticket, Trajectory, WeightManifest
from tidemill.services.trainer.durable.checkpoint import CheckpointStore

STEPS = 4
GROUPS = 2
SIZE = 4


async def test_a_run_with_real_models_leaves_everything_it_promises(tmp_path: Path) -> None:
    held_out = tmp_path / "held.jsonl"
    held_out.write_text('{"prompt": "w3 w4", "ground_truth": "1"}\n{"prompt": "w5", "ground_truth": "2"}\n')
    config = simulated_config(
        tmp_path, data__eval={"held": str(held_out)}, rollout__engine="transformers",
        rollout__sampling={"max_tokens": 8}, trainer__policy="transformers", trainer__deterministic=True,
        trainer__optimizer={"lr": 0.01}, trainer__steps=STEPS, trainer__groups_per_step=GROUPS,
        trainer__group_size=SIZE, trainer__keep_weights=2, trainer__checkpoint_every=2,
        trainer__evaluation={"every": 2},
    )  # fmt: skip
    async with ServiceRun(tmp_path, config, is_forked=False) as run:
        run.start_all()
        commits = await run.trained()
        await run.stop_all("rollout", "reward")
        samples = await messages(run.broker, run.keys.trajectories(), Trajectory)
        manifests = await messages(run.broker, run.keys.weights, WeightManifest)
        tickets = await messages(run.broker, run.keys.prompts(), Ticket)
        state = await read_state(run.broker, run.keys)
        for lane in Lane:
            for key, group in (
                (run.keys.prompts(lane), ROLLOUT_GROUP),
                (run.keys.trajectories(lane), REWARD_GROUP),
            ):
                status = await group_status(run.broker, key, group)
                assert status is not None
                assert (status.pending, status.consumers) == (0, 0), key

    assert [manifest.version for manifest in manifests] == list(range(STEPS + 1))
    assert [manifest.digest for manifest in manifests[1:]] == [commit.digest for commit in commits]
    assert len({manifest.digest for manifest in manifests}) == STEPS + 1, "every step changed the weights"
    assert len(tickets) == STEPS * GROUPS
    for commit in commits:
        assert commit.metrics["staleness/max"] <= 1.0
        assert set(commit.groups) == {ticket.ticket for ticket in tickets if ticket.step == commit.step}
    on_policy = [commit for commit in commits if commit.metrics["staleness/max"] == 0.0]
    assert all(commit.metrics["logprob_gap/max"] < 1e-3 for commit in on_policy)
    assert commits[0] in on_policy, "the first step trains on what version 0 wrote"
    assert {sample.min_version for sample in samples} > {0}, "new weights were used"

    best = json.loads((run.run_dir / "best.json").read_text())["version"]
    assert folder_versions(run.run_dir / "weights") == sorted({best, STEPS - 1, STEPS})
    assert verified_files(run.run_dir, manifests[-1])
    checkpoint = CheckpointStore(run.run_dir, keep=2).load_latest()
    assert checkpoint is not None
    assert checkpoint.state.version == STEPS
    records = read_records(run.run_dir / METRICS_FILE)
    assert [record["step"] for record in records if record["kind"] == STEP] == list(range(STEPS))
    evaluated = [(r["version"], r["set"], r["num_samples"]) for r in records if r["kind"] == EVALUATION]
    assert evaluated == [(0, "held", 2.0), (2, "held", 2.0), (4, "held", 2.0)]
    for record, commit in zip([r for r in records if r["kind"] == STEP], commits, strict=True):
        assert record["reward"] == commit.metrics["reward"]
    assert (state["status"], state["version"], state["tickets_issued"]) == (FINISHED, STEPS, STEPS * GROUPS)


async def test_every_service_stops_when_asked_and_the_run_can_be_resumed_by_one_trainer_alone(tmp_path):
    """SIGTERM in the middle of the work: exit code 0, nothing held, nothing lost. While Redis is away they
    stop without a traceback. A second trainer with a folder of its own is refused, and the first goes on."""
    steps = 40
    config = simulated_config(
        tmp_path,
        trainer__steps=steps,
        trainer__groups_per_step=GROUPS,
        trainer__checkpoint_every=100,
        rollout__simulated={"tokens": 8, "vocab_size": 32, "group_s": 0.05},
        trainer__simulated={"group_s": 0.02},
        streams__drain_s=1.0,
    )
    async with ServiceRun(tmp_path, config) as run:
        run.start("trainer")
        await wait_until(lambda: read_heartbeats(run.broker, run.keys))
        run.variables["trainer"] = {"TIDEMILL_RUNS_DIR": str(tmp_path / "elsewhere")}
        run.start("trainer", "second")
        assert await run.wait("second") == ConfigError.exit_code
        assert "has a trainer already" in run.log_of("second")
        run.variables.clear()
        run.start("rollout")
        run.start("reward")
        await run.reach(3)
        await run.stop_all("trainer", "rollout", "reward")
        assert (await read_state(run.broker, run.keys))["status"] != FINISHED
        for key, group in ((run.keys.prompts(), ROLLOUT_GROUP), (run.keys.trajectories(), REWARD_GROUP)):
            status = await group_status(run.broker, key, group)
            assert status is not None
            assert (status.pending, status.consumers) == (0, 0), key
        stopped_at = await num_commits(run.broker, run.keys)
        assert stopped_at < steps
        checkpoint = CheckpointStore(run.run_dir, keep=2).load_latest()
        assert checkpoint is not None
        assert checkpoint.state.version == stopped_at

        run.start_all()
        await run.reach(stopped_at + 3)
        assert "step replayed" not in run.log_of("trainer"), "the checkpoint of the stop made that needless"
        run.redis.kill()
        for role in SERVICES:
            assert await run.stop(role, 90) in (0, 1), run.log_of(role)
            assert "Traceback" not in run.log_of(role), run.log_of(role)
        assert any("asked to stop" in run.log_of(role) for role in SERVICES)
        run.redis.start()
        run.start_all()
        await run.trained()
        assert (await read_state(run.broker, run.keys))["status"] == FINISHED
