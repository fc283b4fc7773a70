"""Heartbeats of somebody who has the password of a worker: they hide no other, and end no reader."""

import io
import json
import time
from typing import Any

from rich.console import Console

from tidemill.common.process.heartbeats import Heartbeat, publish_heartbeat, read_heartbeats
from tidemill.common.redis.broker import Broker
from tidemill.common.wire.keys import Keys
from tidemill.services.console.exporter.exporter import _set_workers, as_json, read_run
from tidemill.services.console.status.dashboard import dashboard
from tidemill.services.console.status.snapshot import RunSnapshot, SnapshotReader

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
    sound, well = Heartbeat("sound", "rollout", state="generate"), {"name": "odd", "role": "rollout"}
    fields = [{name: value} for name, values in ODD.items() for value in values]
    for written in (*TEXTS, *(json.dumps(well | {"at": time.time()} | odd).encode() for odd in fields)):
        await publish_heartbeat(broker, keys, sound)
        await broker.execute("HSET", keys.workers("rollout"), "odd", written)
        beats = await read_heartbeats(broker, keys)
        assert [beat.name for beat in beats if beat.is_alive and beat.name != "odd"] == ["sound"], written
        _set_workers(beats, ())
        as_json(keys.run_id, await read_run(SnapshotReader(broker, keys, 0, 0)), "")
        assert "\x1b" not in drawn(keys, beats), written


async def test_a_name_is_shown_as_it_is(broker: Broker, keys: Keys) -> None:
    await publish_heartbeat(broker, keys, Heartbeat("[/x]\x1b[2J", "rollout", state="generate"))
    assert "[/x]\\x1b[2J" in drawn(keys, await read_heartbeats(broker, keys))


def drawn(keys: Keys, workers: list[Heartbeat]) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    console.print(dashboard(RunSnapshot(keys.run_id, 10, 1, workers=workers)))
    return console.file.getvalue()  # type: ignore[attr-defined]
