"""Snapshots and the report of a run that was written into a real Redis by hand."""

import asyncio
import json
from typing import Any

import pytest

from tests.support.histories import commits, small_config, tickets, trajectories, write_small_run
from tests.support.numbered import append_numbered
from tidemill.common.config import RunConfig
from tidemill.common.errors import ConfigError
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.embedded import EmbeddedRedis
from tidemill.common.run.state import FINISHED, RUNNING, publish_config, read_config, update_state
from tidemill.common.streams import append
from tidemill.common.streams.consumer import Consumer
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import Ticket, Trajectory
from tidemill.services.console.commands import StatusOptions
from tidemill.services.console.look.report import show_report
from tidemill.services.console.look.snapshot import MAX_POINTS, SnapshotReader


@pytest.fixture(autouse=True)
def on_this_server(redis_server: EmbeddedRedis, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIDEMILL_REDIS_URL", redis_server.url)
    monkeypatch.setenv("TIDEMILL_RUN_ID", keys.run_id)


async def reader_of(broker: Broker, keys: Keys, **sections: Any) -> SnapshotReader:
    config = RunConfig.model_validate({**small_config().model_dump(), **sections})
    await publish_config(broker, keys, config)
    return await SnapshotReader.attach(broker, keys.run_id)


async def test_a_config_of_a_newer_release_is_refused_with_the_field(broker: Broker, keys: Keys) -> None:
    """So workers are updated before the trainer, which publishes the config."""
    tree: dict[str, Any] = small_config().model_dump(mode="json")
    tree["trainer"]["shiny"] = 1
    await broker.execute("SET", keys.config, json.dumps(tree))
    with pytest.raises(ConfigError, match=r"trainer\.shiny: no such field") as caught:
        await read_config(broker, keys)
    assert caught.value.exit_code == 2


async def test_a_snapshot_follows_the_commits(broker: Broker, keys: Keys) -> None:
    with pytest.raises(ConfigError, match="has no run"):
        await SnapshotReader.attach(broker, keys.run_id)
    reader = await reader_of(broker, keys, reward={"on_failure": 0.0})
    snapshot = await reader.read()
    assert (snapshot.status, snapshot.version, snapshot.steps) == ("starting", 0, 2)
    assert [warning.partition(":")[0] for warning in snapshot.config_warnings] == ["reward.on_failure is 0"]
    assert snapshot.tokens_per_s is None and snapshot.eta_s is None

    first, second = commits()
    await append_numbered(broker, keys.commits, [(0, first)])
    assert (await reader.read()).curve("reward") == [0.5]
    await append_numbered(broker, keys.commits, [(1, second)])
    snapshot = await reader.read()
    assert (snapshot.version, snapshot.metric("reward"), snapshot.step_s) == (2, 0.25, 10.0)

    steps = range(2, MAX_POINTS + 40)
    many = ((n, first.model_copy(update={"step": n, "version": n + 1})) for n in steps)
    await append_numbered(broker, keys.commits, many)
    snapshot = await (await reader_of(broker, keys)).read()
    ends = [snapshot.points[0].step, snapshot.points[-1].step]
    assert ends == [40, MAX_POINTS + 39], "who attaches to a long run reads only its end"


async def test_queues_say_what_waits_and_what_is_held(broker: Broker, keys: Keys) -> None:
    reader = await reader_of(broker, keys)
    await append_numbered(broker, keys.prompts(), ((item.ticket, item) for item in tickets()))
    samples = trajectories()
    await append(broker, keys.trajectories(), *samples)
    rollout = Consumer(broker, keys.prompts(), ROLLOUT_GROUP, "r", Ticket, lease_s=60, dead_key=keys.dead)
    reward = Consumer(
        broker, keys.trajectories(), REWARD_GROUP, "s", Trajectory, lease_s=60, dead_key=keys.dead
    )
    async with rollout, reward:
        await rollout.fetch(2, 1.0)
        await reward.fetch(len(samples), 1.0)
        prompts, trajectories_queue, scores = (await reader.read()).queues
    assert (prompts.length, prompts.waiting, prompts.held) == (5, 3, 2)
    assert (trajectories_queue.waiting, trajectories_queue.held, scores.length) == (0, len(samples), 0)


async def test_the_report_of_a_run_is_computed_from_its_commits_and_kept_in_its_folder(
    broker, keys, tmp_path, capsys
):
    async def report() -> int:
        return await asyncio.to_thread(show_report, StatusOptions(as_json=True, runs_dir=tmp_path))

    await write_small_run(broker, keys)
    # Of its own losses the trainer says nothing that counts.
    evaluations = [{"version": 0, "set": "a", "score": 0.2}, {"version": 2, "set": "a", "score": 0.9}]
    state = {"version": 1, "tickets_issued": 6, "trajectories_seen": 10, "lost": 0}
    await update_state(broker, keys, status=RUNNING, evaluations=evaluations, **state)
    with pytest.raises(ConfigError, match=r"has not finished \(1 of 2 steps"):
        await report()
    await update_state(broker, keys, status=FINISHED, version=2)
    assert await report() == 1
    tree = json.loads(capsys.readouterr().out)
    assert (tree["ok"], tree["lost"], len(tree["failures"])) == (False, 2, 1)
    assert not (tmp_path / keys.run_id).exists(), "the folder of the run is on another machine"
    await update_state(broker, keys, tickets_issued=5)
    (tmp_path / keys.run_id).mkdir()
    assert await report() == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["ok"], tree["steps"], tree["lost"], tree["duplicated_in_training"]) == (True, 2, 0, 0)
    assert (tree["trajectories_trained"], tree["trajectories_generated"], tree["wall_s"]) == (7, 10, 19.5)
    assert (tree["eval_before"], tree["eval_after"], tree["max_staleness_seen"]) == (0.2, 0.9, 1)
    assert json.loads((tmp_path / keys.run_id / "summary.json").read_text()) == tree
    # Of its scores, which are there when the workers are gone: sample 1.1 failed.
    (failure,) = tree["failed_rewards"]
    assert (failure["kind"], failure["reason"], failure["count"]) == ("timeout", "no answer within 5 s", 1)
    await asyncio.to_thread(show_report, StatusOptions(runs_dir=tmp_path))
    printed = capsys.readouterr().out
    assert "left out: failed score" in printed and "failed once (timeout): no answer within 5 s" in printed
