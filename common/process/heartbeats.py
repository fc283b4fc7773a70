"""Heartbeats: every process tells the run who it is, what it does and what it waits for.

One field per process in its role's hash, rewritten every two seconds. Delivery relies on leases only; people
and dashboards read heartbeats, and those that ask replicas find them there. The Redis user of one role cannot
speak for another. Times of beats are those of the Redis server, so that machines need not agree on theirs.
"""

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import structlog
from pydantic import FiniteFloat, TypeAdapter, ValidationError

from tidemill.common.errors import ConfigError
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.wire.keys import Keys

log = structlog.get_logger(__name__)

ROLES = ("trainer", "rollout", "reward", "replica", "jobs.sandbox")
"""All that have heartbeats."""
HEARTBEAT_S = 2.0
GONE_AFTER_S = 10.0
BLOCKING = "blocking"
"""Count of a heartbeat: event loops that code is holding up; `detail` names it."""
DAMAGED_VERSION = "damaged_version"
"""Count of a rollout worker's heartbeat: the version of the weights whose bytes are not those announced."""
FAILURES = "failures:"
"""Counts of a heartbeat that begin with it say `<reward>:<kind>`: how often a reward failed, and how."""


@dataclass(slots=True)
class Heartbeat:
    """What one process says about itself."""

    name: str
    role: str
    state: str = ""
    detail: str = ""
    version: int = -1
    idle_share: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    folder: str = ""
    """Of a trainer: the run's folder on its host."""
    port: int = 0
    servers: str = ""
    """Of a replica: the section of `servers` that it is one of."""
    url: str = ""
    """Of a replica: where it takes requests; empty while it takes none."""
    address: str = ""
    """Host under which scrapers reach `port`; see `reachable_host`."""
    started_at: FiniteFloat = field(default_factory=time.time)
    at: FiniteFloat = 0.0
    """When it was sent, by the clock of the Redis server."""
    read_at: float = 0.0
    """When it was read, by the same clock; 0 where it was not read from there."""

    @property
    def metrics_target(self) -> str:
        """Where its /metrics is, as host:port; empty where it has none."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}" if self.address and self.port else ""

    @property
    def is_alive(self) -> bool:
        # A beat from the future was sent before the server's clock was set back, and none came since.
        return -GONE_AFTER_S < self.age_s < GONE_AFTER_S

    @property
    def age_s(self) -> float:
        return (self.read_at or time.time()) - self.at


async def publish_heartbeat(broker: Broker, keys: Keys, beat: Heartbeat) -> None:
    beat.at = await broker.server_time_s()
    await broker.execute("HSET", keys.workers(beat.role), beat.name, json.dumps(asdict(beat)))


async def remove_heartbeat(broker: Broker, keys: Keys, beat: Heartbeat) -> None:
    """Leave in an orderly way."""
    await broker.execute("HDEL", keys.workers(beat.role), beat.name)


async def check_sole_trainer(broker: Broker, keys: Keys, run_dir: Path) -> None:
    """Wait until the trainer that spoke last is known to be gone, at most `GONE_AFTER_S`; call it before the
    first heartbeat of this one, which would replace that of the other.

    With a folder of its own, wherever that is, a second one would take the living one's tickets for lost.

    Raises:
        ConfigError: it speaks again: it is alive.
    """

    async def newest() -> Heartbeat | None:
        beats = await read_heartbeats(broker, keys, ROLES[:1])
        return max(beats, key=lambda beat: beat.at, default=None)

    before = await newest()
    # In the same folder, its lock keeps a second trainer out.
    if before is None or (before.host, before.folder) == (socket.gethostname(), folder_name(run_dir)):
        return
    if before.is_alive:
        log.info("waiting to see whether another trainer is alive", host=before.host, pid=before.pid)
    while (now := await newest()) is not None and now.is_alive:
        if now.at > before.at:
            raise ConfigError(
                f"run {keys.run_id} has a trainer already: process {now.pid} on {now.host}, in "
                f"{now.folder or 'a folder that it does not name'}. One run has one trainer: stop that one "
                "first, or give this one a run id of its own"
            )
        await asyncio.sleep(HEARTBEAT_S / 4)


def folder_name(run_dir: Path) -> str:
    """What a trainer's heartbeat calls its run's folder: not relative to where the process was started."""
    return str(run_dir.absolute())


async def forget_heartbeats(broker: Broker, keys: Keys, after_s: float) -> int:
    """Remove those that are older; returns how many. One that speaks again has a heartbeat again."""
    gone = [beat for beat in await read_heartbeats(broker, keys) if beat.age_s > after_s]
    for beat in gone:
        await remove_heartbeat(broker, keys, beat)
    return len(gone)


async def read_heartbeats(broker: Broker, keys: Keys, roles: Sequence[str] = ROLES) -> list[Heartbeat]:
    """All processes that ever spoke and did not leave, by role and name; each for itself only."""
    now_s = await broker.server_time_s()
    replies = await broker.pipeline([("HGETALL", keys.workers(role)) for role in roles])
    beats = [
        beat
        for role, reply in zip(roles, replies, strict=True)
        for name, value in zip(reply[::2], reply[1::2], strict=True)
        # Redis users may write into the hash of their role only, so a beat must not name another one.
        if (beat := _parsed(value, now_s)) and (beat.role, beat.name) == (role, name.decode(errors="replace"))
    ]
    return sorted(beats, key=lambda beat: (beat.role, beat.name))


_HEARTBEAT = TypeAdapter(Heartbeat)


def _parsed(value: bytes, now_s: float) -> Heartbeat | None:
    """None where it is no heartbeat: whoever has a worker's password may write what it likes."""
    try:
        beat = _HEARTBEAT.validate_json(value)
    except ValidationError:
        return None
    beat.read_at = now_s
    return beat


Reporter = Callable[[Heartbeat], None]
"""Fills in the service's own part of a heartbeat just before it is sent."""


ADVERTISE_VARIABLE = "TIDEMILL_ADVERTISE_HOST"
LOOPBACK = "127.0.0.1"
ANYWHERE = ("", "0.0.0.0", "::")
ANY_PORT = 9
"""Nothing is sent to it: it only makes the kernel choose a route."""


def reachable_host(listens_on: str) -> str:
    """The host to tell others, for a server that listens on `listens_on`.

    TIDEMILL_ADVERTISE_HOST, where it is set; the address it listens on, if that is one; otherwise the address
    of this machine or container on the way to Redis, where everybody else is too.
    """
    if chosen := os.environ.get(ADVERTISE_VARIABLE):
        return chosen
    if listens_on not in ANYWHERE:
        return listens_on
    return _address_towards(_redis_host()) or socket.gethostname()


def _redis_host() -> str:
    """Host of the run's Redis, or of its first Sentinel; empty for a unix socket."""
    place = urlsplit(os.environ.get(URL_VARIABLE, "")).netloc.rpartition("@")[2].split(",")[0]
    return place[1:].partition("]")[0] if place.startswith("[") else place.partition(":")[0]


def _address_towards(host: str) -> str:
    """This machine's own address on the route to `host`; empty where there is no route."""
    if not host:
        return LOOPBACK
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return ""
