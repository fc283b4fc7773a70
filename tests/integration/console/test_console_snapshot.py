"""Snapshots and summaries of a run that was written into a real Redis by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.numbered import append_numbered
from tests.support.trajectories import make_config, make_trajectory
from tidemill.common.errors import ConfigError
from tidemill.common.process.heartbeats import Heartbeat, publish_heartbeat
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import publish_config, update_state
from tidemill.common.streams import Consumer, append
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Commit, SamplingParams, Ticket, Trajectory
from tidemill.services.console.status.report import summarise
from tidemill.services.console.status.snapshot import MAX_POINTS, SnapshotReader

CONFIG = make_config(trainer={"steps": 3, "groups_per_step": 1, "group_size": 2, "max_staleness": 1})


def ticket(number: int) -> Ticket:
    return Ticket(
        ticket=number, step=number, min_version=0, group_size=2, sampling=SamplingParams(max_tokens=4),
        prompt_ids=np.arange(3, dtype=np.int32),
    )  # fmt: skip


def commit(step: int, **fields: Any) -> Commit:
    values: dict[str, Any] = {
        "mini_batches": ((((step, 0), (step, 1)),),),
        "groups": (step,),
        "metrics": {"reward": step / 4, "staleness/max": min(step, 1), "step_time_s": 2.0,
                    "completion_tokens": 6.0, "trainer_idle_share": 0.25},
    }  # fmt: skip
    return Commit(step=step, version=step + 1, **(values | fields))


async def write_commits(broker: Broker, keys: Keys, *commits: Commit) -> None:
    await append_numbered(broker, keys.commits, ((item.step, item) for item in commits))


async def test_a_run_that_redis_does_not_know_is_refused(broker: Broker, keys: Keys) -> None:
    with pytest.raises(ConfigError, match="has no run"):
        await SnapshotReader.attach(broker, keys.run_id)


async def test_a_run_that_has_not_begun_has_a_snapshot(broker: Broker, keys: Keys) -> None:
    await publish_config(broker, keys, CONFIG)
    snapshot = await (await SnapshotReader.attach(broker, keys.run_id)).read()
    assert (snapshot.status, snapshot.version, snapshot.steps) == ("starting", 0, 3)
    assert snapshot.tokens_per_s is None and snapshot.eta_s is None


async def test_a_snapshot_follows_the_commits(broker: Broker, keys: Keys) -> None:
    await publish_config(broker, keys, CONFIG)
    reader = await SnapshotReader.attach(broker, keys.run_id)
    await write_commits(broker, keys, commit(0), commit(1))
    assert (await reader.read()).curve("reward") == [0.0, 0.25]
    await write_commits(broker, keys, commit(2))
    snapshot = await reader.read()
    assert (snapshot.version, snapshot.metric("reward")) == (3, 0.5)
    assert (snapshot.step_s, snapshot.tokens_per_s) == (2.0, 3.0)


async def test_who_attaches_to_a_long_run_reads_only_its_end(broker: Broker, keys: Keys) -> None:
    await publish_config(broker, keys, CONFIG)
    await write_commits(broker, keys, *(commit(step) for step in range(MAX_POINTS + 40)))
    snapshot = await (await SnapshotReader.attach(broker, keys.run_id)).read()
    assert [snapshot.points[0].step, snapshot.points[-1].step] == [40, MAX_POINTS + 39]


async def test_queues_say_what_waits_and_what_is_held(broker: Broker, keys: Keys) -> None:
    await publish_config(broker, keys, CONFIG)
    reader = await SnapshotReader.attach(broker, keys.run_id)
    await append_numbered(broker, keys.prompts(), ((n, ticket(n)) for n in range(5)))
    await append(broker, keys.trajectories(), *(make_trajectory(0, index) for index in range(4)))
    rollout = Consumer(broker, keys.prompts(), ROLLOUT_GROUP, "r", Ticket, lease_s=60, dead_key=keys.dead)
    reward = Consumer(
        broker, keys.trajectories(), REWARD_GROUP, "s", Trajectory, lease_s=60, dead_key=keys.dead
    )
    async with rollout, reward:
        await rollout.fetch(2, 1.0)
        await reward.fetch(4, 1.0)
        prompts, trajectories, scores = (await reader.read()).queues
    assert (prompts.length, prompts.waiting, prompts.held) == (5, 3, 2)
    assert (trajectories.waiting, trajectories.held) == (0, 4)
    assert scores.length == 0


async def test_a_snapshot_shows_workers_state_and_evaluations(broker: Broker, keys: Keys) -> None:
    await publish_config(broker, keys, CONFIG)
    evaluations = [{"version": 3, "set": "a", "score": 0.9}, {"version": 0, "set": "a", "score": 0.2}]
    await update_state(broker, keys, status="running", evaluations=evaluations)
    for name, idle in (("r0", 0.2), ("r1", 0.4)):
        await publish_heartbeat(broker, keys, Heartbeat(name, "rollout", idle_share=idle))
    snapshot = await (await SnapshotReader.attach(broker, keys.run_id)).read()
    assert snapshot.status == "running"
    assert [item["score"] for item in snapshot.evaluations] == [0.2, 0.9]
    assert snapshot.idle_share("rollout") == pytest.approx(0.3)
    assert snapshot.as_dict()["idle"]["trainer"] is None


async def test_a_summary_is_computed_from_the_commits(broker: Broker, keys: Keys, tmp_path: Path) -> None:
    await write_commits(broker, keys, commit(0), commit(1), commit(2))
    evaluations = [{"version": 0, "set": "a", "score": 0.2}, {"version": 3, "set": "a", "score": 0.9}]
    await update_state(broker, keys, tickets_issued=3, trajectories_seen=7, evaluations=evaluations)
    summary = await summarise(broker, keys, CONFIG, tmp_path, [], wall_s=9.0, rollout_idle=0.5)
    assert (summary["steps"], summary["trajectories_trained"], summary["trajectories_generated"]) == (3, 6, 7)
    assert (summary["eval_before"], summary["eval_after"]) == (0.2, 0.9)
    assert (summary["trainer_idle_share"], summary["rollout_idle_share"]) == (0.25, 0.5)
    assert (summary["lost"], summary["duplicated_in_training"], summary["max_staleness_seen"]) == (0, 0, 1)
    assert summary["ok"]


async def test_a_summary_does_not_take_the_trainers_word(broker: Broker, keys: Keys, tmp_path: Path) -> None:
    await write_commits(broker, keys, commit(0), commit(1, mini_batches=((((0, 0), (1, 0)),),)))
    await update_state(broker, keys, status="finished", version=3, tickets_issued=3, lost=0)
    summary = await summarise(broker, keys, CONFIG, tmp_path, [], wall_s=9.0, rollout_idle=None)
    # ticket 2 never came back, (1, 1) is nowhere, (0, 0) was trained in both steps
    assert (summary["steps"], summary["lost"], summary["duplicated_in_training"]) == (2, 3, 1)
    assert len(summary["failures"]) == 3
