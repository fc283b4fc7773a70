"""Heartbeats: every process publishes its identity, what it does and what it waits for.

One field per process in its role's hash, rewritten every two seconds. Delivery relies on leases only;
heartbeats are for people, dashboards, and clients that look for replicas. The Redis user of one role cannot
write those of another. Times are those of the Redis server, so that machines' clocks need not agree.
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
from tidemill.common.process.failures import Failure
from tidemill.common.redis.broker import Broker
from tidemill.common.redis.client import URL_VARIABLE
from tidemill.common.wire.keys import Keys

log = structlog.get_logger(__name__)

ROLES = ("trainer", "rollout", "reward", "replica", "sandbox")
"""All roles with heartbeats."""
HEARTBEAT_S = 2.0
GONE_AFTER_S = 10.0
BLOCKING = "blocking"
"""Count in a heartbeat: number of blocked event loops; `detail` names the code that blocks."""
STARVED = "starved"
"""Count in a heartbeat: how often the event loop was short of CPU."""
STARVED_S = "starved_s"
"""Count in a heartbeat: for how many seconds it was, at most."""
DAMAGED_VERSION = "damaged_version"
"""Count in a rollout worker's heartbeat: the version whose bytes are not those announced."""
FAILING_SHARE = "failing_share"
"""Count in a reward worker's heartbeat: the share of the last minute's attempts that failed."""
FAILURES = "failures:"
"""Prefix of the counts `failures:<reward>:<kind>` in a heartbeat: how often a reward failed, and how."""


@dataclass(slots=True)
class Heartbeat:
    """The state of one process, as it publishes it.

    Example: `name` "rollout-0", `role` "rollout", `state` "generate", `version` 7, `shares` {"generate": 0.8,
    "wait:tickets": 0.2} of its time, `counts` {"requests": 48, "groups_train": 12}.
    """

    name: str
    role: str
    state: str = ""
    detail: str = ""
    version: int = -1
    idle_share: float = 0.0
    shares: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    """Attempts that failed since the process started, by what failed and why."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    folder: str = ""
    """For a trainer: the run's folder on its host."""
    port: int = 0
    servers: str = ""
    """For a replica: the section of `servers` that it belongs to."""
    url: str = ""
    """For a replica: where it takes requests; empty while it takes none."""
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
        # A beat from the future was sent before the server's clock was set back, with none since.
        return -GONE_AFTER_S < self.age_s < GONE_AFTER_S

    @property
    def age_s(self) -> float:
        return (self.read_at or time.time()) - self.at


async def publish_heartbeat(broker: Broker, keys: Keys, beat: Heartbeat) -> None:
    beat.at = await broker.server_time_s()
    await broker.execute("HSET", keys.workers(beat.role), beat.name, json.dumps(asdict(beat)))


async def remove_heartbeat(broker: Broker, keys: Keys, beat: Heartbeat) -> None:
    await broker.execute("HDEL", keys.workers(beat.role), beat.name)


async def check_sole_trainer(broker: Broker, keys: Keys, run_dir: Path) -> None:
    """Wait until the trainer with the newest heartbeat is known to be gone, at most `GONE_AFTER_S`. Call it
    before this trainer's first heartbeat, which could replace that of the other.

    A second trainer with another folder would take the first one's tickets for lost.

    Raises:
        ConfigError: the other trainer sent another heartbeat: it is alive.
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
    """The run's folder in a trainer's heartbeat: an absolute path."""
    return str(run_dir.absolute())


async def forget_heartbeats(broker: Broker, keys: Keys, after_s: float) -> int:
    """Remove heartbeats older than `after_s`; returns how many. A process that lives writes its own again."""
    gone = [beat for beat in await read_heartbeats(broker, keys) if beat.age_s > after_s]
    for beat in gone:
        await remove_heartbeat(broker, keys, beat)
    return len(gone)


async def read_heartbeats(broker: Broker, keys: Keys, roles: Sequence[str] = ROLES) -> list[Heartbeat]:
    """Heartbeats that were published and not removed, sorted by role and name."""
    now_s = await broker.server_time_s()
    replies = await broker.pipeline([("HGETALL", keys.workers(role)) for role in roles])
    beats = []
    for role, reply in zip(roles, replies, strict=True):
        for name, value in zip(reply[::2], reply[1::2], strict=True):
            beat = _parsed(value, now_s)
            # Redis users may write into the hash of their role only, so a beat must not name another one.
            if beat and (beat.role, beat.name) == (role, name.decode(errors="replace")):
                beats.append(beat)
    return sorted(beats, key=lambda beat: (beat.role, beat.name))


_HEARTBEAT = TypeAdapter(Heartbeat)


def _parsed(value: bytes, now_s: float) -> Heartbeat | None:
    """None where it is no heartbeat: a process with a worker's password may write anything."""
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
"""Port of a probe that sends nothing: connecting only makes the kernel choose a route."""


def reachable_host(listens_on: str) -> str:
    """The host under which others reach a server that listens on `listens_on`.

    TIDEMILL_ADVERTISE_HOST, where it is set; the address it listens on, if that is one; otherwise the address
    of this machine or container on the route to Redis, which all processes of the run reach.
    """
    chosen = os.environ.get(ADVERTISE_VARIABLE)
    if chosen:
        return chosen
    if listens_on not in ANYWHERE:
        return listens_on
    return _address_towards(_redis_host()) or socket.gethostname()


def _redis_host() -> str:
    """Host of the run's Redis, or of its first Sentinel; empty for a unix socket."""
    address = urlsplit(os.environ.get(URL_VARIABLE, "")).netloc.rpartition("@")[2].split(",")[0]
    return address[1:].partition("]")[0] if address.startswith("[") else address.partition(":")[0]


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
