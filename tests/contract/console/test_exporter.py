"""What the exporter tells of a run, and where it sends Prometheus, on real servers of each kind; also
where heartbeats mean harm: they hide no other, and end no reader."""

import io
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.letters import make_ticket
from tests.support.numbered import append_numbered
from tests.support.rewards import announce_replica
from tests.support.trajectories import make_commit, make_config, make_trajectory
from tidemill.common.process.heartbeats import GONE_AFTER_S, Heartbeat, publish_heartbeat, read_heartbeats
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import publish_config, update_state
from tidemill.common.streams import append
from tidemill.common.streams.consumer import Consumer
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, Keys
from tidemill.common.wire.messages import DeadLetter, Ticket, Trajectory
from tidemill.services.console.look import exporter
from tidemill.services.console.look.dashboard import dashboard
from tidemill.services.console.look.exporter import (
    RunReading,
    _set_workers,
    read_run,
    set_gauges,
    targets_json,
)
from tidemill.services.console.look.snapshot import RunSnapshot, SnapshotReader
from tidemill.services.console.run.folder import RunFolder


@pytest.fixture
def snapshots(broker: Broker, keys: Keys) -> SnapshotReader:
    return SnapshotReader(broker, keys, 0, 0)


@pytest.fixture(autouse=True)
def clean_gauges() -> Iterator[None]:
    yield
    set_gauges(RunReading())


def value(name: str, **labels: str) -> float | None:
    return metrics.RUN.get_sample_value(name, labels)


def consumer(broker: Broker, keys: Keys, stream: str) -> Consumer:
    key, group, kind = {
        "prompts": (keys.prompts(), ROLLOUT_GROUP, Ticket),
        "trajectories": (keys.trajectories(), REWARD_GROUP, Trajectory),
    }[stream]
    return Consumer(broker, key, group, "c", kind, lease_s=30, dead_key=keys.dead)


async def test_a_run_that_redis_does_not_know_is_starting(snapshots):
    set_gauges(await read_run(snapshots))
    assert value("tidemill_run_status", status="starting") == 1
    assert value("tidemill_stream_lag", stream="prompts", group="rollout") == 0
    assert value("tidemill_workers", role="trainer", state="alive") == 0
    assert value("tidemill_redis_up") == 1


async def test_what_waits_and_what_is_held_is_counted_on_every_server(broker, keys, snapshots):
    made_at = time.time() - 100
    trajectories = [make_trajectory(0, index, finished_at=made_at + index) for index in range(4)]
    await append(broker, keys.trajectories(), *trajectories)
    set_gauges(await read_run(snapshots))
    where = {"stream": "trajectories", "group": "reward"}
    assert value("tidemill_stream_lag", **where) == 4
    async with consumer(broker, keys, "trajectories") as reward:
        held = await reward.fetch(3, 0)
        await reward.complete([(held[0], None)], keys.scores())
        set_gauges(await read_run(snapshots))
    assert value("tidemill_stream_length", stream="trajectories") == 4
    assert value("tidemill_stream_lag", **where) == 1
    assert value("tidemill_stream_pending", **where) == 2
    assert value("tidemill_stream_consumers", **where) == 1
    assert value("tidemill_stream_oldest_age_seconds", **where, state="waiting") == pytest.approx(97, abs=30)
    held_age_s = value("tidemill_stream_oldest_age_seconds", **where, state="held")
    assert held_age_s == pytest.approx(99, abs=30)
    assert held_age_s > value("tidemill_stream_oldest_age_seconds", **where, state="waiting")
    async with consumer(broker, keys, "trajectories") as reward:
        deliveries = [*held[1:], *await reward.fetch(4, 0)]
        await reward.complete([(delivery, None) for delivery in deliveries], keys.scores())
    set_gauges(await read_run(snapshots))
    for state in ("waiting", "held"):
        assert value("tidemill_stream_oldest_age_seconds", **where, state=state) == 0, "nothing has no age"


async def test_tickets_have_an_age_though_their_ids_are_numbers(broker, keys, snapshots):
    ticket = make_ticket(0).model_copy(update={"issued_at": time.time() - 60})
    await append_numbered(broker, keys.prompts(), [(0, ticket)])
    set_gauges(await read_run(snapshots))
    where = {"stream": "prompts", "group": "rollout", "state": "waiting"}
    assert value("tidemill_stream_oldest_age_seconds", **where) == pytest.approx(60, abs=30)


async def test_progress_is_that_of_commits_and_state(broker, keys, snapshots):
    await publish_config(broker, keys, make_config(trainer={"steps": 9, "max_staleness": 2}))
    await update_state(broker, keys, status="running", version=1)
    commit = make_commit(1, groups=(), finished_at=123.0)
    await append_numbered(broker, keys.commits, [(1, commit)])
    await append(broker, keys.dead, DeadLetter(origin="prompts", entry_id="1-0", fields={}, error="e"))
    set_gauges(await read_run(snapshots))
    assert value("tidemill_run_version") == 2
    assert value("tidemill_run_steps") == 9
    assert value("tidemill_run_max_staleness") == 2
    assert value("tidemill_last_commit_timestamp_seconds") == 123.0
    assert value("tidemill_run_status", status="running") == 1
    assert value("tidemill_run_status", status="starting") == 0
    assert value("tidemill_stream_length", stream="dead") == 1


async def beat(broker: Broker, keys: Keys, name: str, role: str, age_s: float = 0.0, **fields) -> None:
    heartbeat = Heartbeat(name, role, address="10.0.0.7", **fields)
    await publish_heartbeat(broker, keys, heartbeat)
    if age_s:
        heartbeat.at = time.time() - age_s
        await broker.execute("HSET", keys.workers(role), name, json.dumps(asdict(heartbeat)))


async def test_workers_are_counted_by_role_silent_ones_apart_until_they_leave(broker, keys, snapshots):
    shares = {"generate": 0.7, "wait:weights": 0.3}
    await beat(broker, keys, "rollout-0", "rollout", version=4, shares=shares, started_at=55.0)
    await beat(broker, keys, "rollout-1", "rollout", age_s=GONE_AFTER_S + 5, version=3)
    set_gauges(await read_run(snapshots))
    assert value("tidemill_workers", role="rollout", state="alive") == 1
    assert value("tidemill_workers", role="rollout", state="silent") == 1
    assert value("tidemill_worker_version", worker="rollout-0") == 4
    assert value("tidemill_worker_version", worker="rollout-1") is None
    assert value("tidemill_worker_start_timestamp_seconds", role="rollout", worker="rollout-0") == 55.0
    who = {"role": "rollout", "worker": "rollout-0"}
    assert value("tidemill_worker_idle_share", **who, cause="weights") == pytest.approx(0.3)
    assert value("tidemill_worker_idle_share", **who, cause="generate") is None
    await broker.execute("HDEL", keys.workers("rollout"), "rollout-0")
    set_gauges(await read_run(snapshots))
    assert value("tidemill_worker_version", worker="rollout-0") is None, "a worker that left is gone"
    assert value("tidemill_workers", role="rollout", state="alive") == 0


async def test_jobs_are_counted_by_queue_and_state(broker, keys, snapshots, redis_server):
    from rq import Queue
    from rq.serializers import JSONSerializer

    from tidemill.common.redis.blocking_client import make_blocking_client

    queue = Queue(
        keys.sandbox_queue, connection=make_blocking_client(redis_server.url), serializer=JSONSerializer
    )
    queue.enqueue("time.time")
    queue.enqueue("time.time")
    set_gauges(await read_run(snapshots))
    assert value("tidemill_job_queue_length", queue="sandbox", state="queued") == 2
    assert value("tidemill_job_queue_length", queue="sandbox", state="failed") == 0


async def test_targets_are_the_living_workers_the_reward_servers_and_the_exporter(broker, keys, snapshots):
    await publish_config(broker, keys, make_config())
    await announce_replica(broker, keys, "judge", "http://10.0.0.9:8000/v1")
    await announce_replica(broker, keys, "grader", "http://[")
    await beat(broker, keys, "rollout-0", "rollout", port=4711)
    await beat(broker, keys, "reward-0", "reward", port=4712, age_s=GONE_AFTER_S + 5)
    await beat(broker, keys, "odd", "reward", port=0)
    reading = await read_run(snapshots)
    exported = json.loads(exporter.targets_json(keys.run_id, reading, "head:9109"))
    run = {"run_id": keys.run_id}
    assert exported == [
        {"targets": ["head:9109"], "labels": run | {"service": "exporter"}},
        {"targets": ["10.0.0.7:4711"], "labels": run | {"service": "rollout", "worker": "rollout-0"}},
        {"targets": ["10.0.0.9:8000"], "labels": run | {"service": "reward-server", "worker": "judge"}},
    ]


ODD: dict[str, Any] = {
    "at": [None, "soon", [], 10**400, -1e300, float("nan"), float("inf")],
    "started_at": [None, "x", 1e300, float("-inf")],
    "idle_share": [None, [], float("nan")],
    "shares": [5, [1], {"wait:x": "much"}, {"wait:x": None}],
    "counts": [5, {"outstanding": {}}, {"failures:[/x]:\x1b[2J": 1.0}, {"blocking": float("nan")}],
    "detail": [7, "[/bold]", "\x1b]0;title\x07", "\ud800"],
    "state": [{}, "\x1b[2J", "wait:[/x]"],
    "version": ["new", [], 1e400],
    "port": ["80/x", -1, {}],
    "address": [5, "[/x]", "a b"],
    "pid": ["x"],
}
TEXTS = [b"[" * 100_000, b"", b"\xff", b"null", b"[]", b'{"name": "odd"}']


async def test_odd_heartbeats_hide_no_other_and_end_no_reader(broker: Broker, keys: Keys) -> None:
    sound = Heartbeat("sound", "rollout", state="generate")
    well = {"name": "odd", "role": "rollout"}
    fields = [{name: value} for name, values in ODD.items() for value in values]
    for written in (*TEXTS, *(json.dumps(well | {"at": time.time()} | odd).encode() for odd in fields)):
        await publish_heartbeat(broker, keys, sound)
        await broker.execute("HSET", keys.workers("rollout"), "odd", written)
        beats = await read_heartbeats(broker, keys)
        assert [beat.name for beat in beats if beat.is_alive and beat.name != "odd"] == ["sound"], written
        _set_workers(beats, ())
        targets_json(keys.run_id, await read_run(SnapshotReader(broker, keys, 0, 0)), "")
        assert "\x1b" not in drawn(keys, beats), written


async def test_a_name_is_shown_as_it_is(broker: Broker, keys: Keys) -> None:
    await publish_heartbeat(broker, keys, Heartbeat("[/x]\x1b[2J", "rollout", state="generate"))
    assert "[/x]\\x1b[2J" in drawn(keys, await read_heartbeats(broker, keys))


def drawn(keys: Keys, workers: list[Heartbeat]) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(
        dashboard(RunSnapshot(keys.run_id, 10, 1, workers=workers), RunFolder(Path("runs"), keys.run_id))
    )
    return console.file.getvalue()  # type: ignore[attr-defined]
