"""Serves /metrics of a run as Redis knows it, and /sd: where Prometheus scrapes every process of the run.

Guarantee: a scrape has all of one reading, never parts of two.
"""

import asyncio
import contextlib
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import structlog
from prometheus_client import REGISTRY, Gauge, Metric
from prometheus_client.registry import Collector

from tidemill.common.errors import UnreachableError
from tidemill.common.history import StreamName
from tidemill.common.process.activity import WAIT
from tidemill.common.process.heartbeats import Heartbeat
from tidemill.common.process.http_endpoint import HttpEndpoint
from tidemill.common.process.replicas import is_address
from tidemill.common.redis.broker import Broker
from tidemill.common.run.state import STATUSES, UnknownRunError, read_config
from tidemill.common.streams import length
from tidemill.common.streams.backlog import Backlog, backlog
from tidemill.common.streams.entries import Entry, Garbled
from tidemill.common.streams.selection import time_of
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import RQ_STATES, Keys
from tidemill.common.wire.messages import Message
from tidemill.services.console.look.snapshot import JOB_QUEUE, RunSnapshot, SnapshotReader

log = structlog.get_logger(__name__)

EVERY_S = 5.0
PATIENCE = 2.0
"""Redis counts as down if a reading takes more than this many intervals: a call waits while it is away."""
ROLES = ("trainer", "rollout", "reward")
"""Roles that a run needs, exported also when there is no such worker; without generation only the first."""
_LABELLED = (
    metrics.RUN_STATUS,
    metrics.STREAM_LENGTH,
    metrics.STREAM_LAG,
    metrics.STREAM_PENDING,
    metrics.STREAM_OLDEST_AGE_SECONDS,
    metrics.STREAM_CONSUMERS,
    metrics.WORKERS,
    metrics.WORKER_VERSION,
    metrics.WORKER_START_TIMESTAMP,
    metrics.WORKER_IDLE_SHARE,
    metrics.JOB_QUEUE_LENGTH,
)
"""Gauges with labels, which are emptied before each reading: what is gone must not be exported any longer."""

GaugeValue = tuple[Gauge, tuple[str, ...], float]
"""A gauge, the values of its labels, and its value."""


@dataclass(frozen=True, slots=True)
class RunReading:
    """What one look at a run has found: its snapshot, and values that only Prometheus shows."""

    snapshot: RunSnapshot = field(default_factory=lambda: RunSnapshot("", 0, 0))
    gauges: Sequence[GaugeValue] = ()
    """Of Redis's memory and of the run's streams."""
    roles: tuple[str, ...] = ROLES


async def read_run(snapshots: SnapshotReader) -> RunReading:
    """The run as it is now; an empty one while Redis does not know it."""
    broker = snapshots.broker
    keys = snapshots.keys
    roles: tuple[str, ...] = ROLES
    with contextlib.suppress(UnknownRunError):  # read each time: a resumed run may have more steps
        config = await read_config(broker, keys)
        snapshots.steps = config.trainer.steps
        snapshots.max_staleness = config.trainer.max_staleness
        roles = ROLES if config.generates else ROLES[:1]
    snapshot = await snapshots.read()
    memory = await broker.info("memory")
    gauges: list[GaugeValue] = [
        (metrics.REDIS_MEMORY_BYTES, (), int(memory["used_memory"])),
        (metrics.REDIS_MAX_MEMORY_BYTES, (), int(memory["maxmemory"])),
    ]
    for stream in StreamName:
        key = stream.key(keys)
        gauges.append((metrics.STREAM_LENGTH, (stream.value,), await length(broker, key)))
        # A run without rollout and reward workers has no consumer groups.
        if not stream.group or roles != ROLES:
            continue
        labels = (stream.value, stream.group)
        stream_backlog: Backlog[Message] = await backlog(broker, key, stream.group, stream.message_type)
        gauges += [
            (metrics.STREAM_LAG, labels, stream_backlog.lag),
            (metrics.STREAM_PENDING, labels, stream_backlog.pending),
            (metrics.STREAM_CONSUMERS, labels, stream_backlog.consumers),
            (metrics.STREAM_OLDEST_AGE_SECONDS, (*labels, "waiting"), _age_s(stream_backlog.oldest_waiting)),
            (metrics.STREAM_OLDEST_AGE_SECONDS, (*labels, "held"), _age_s(stream_backlog.oldest_held)),
        ]
    return RunReading(snapshot, gauges, roles)


def _age_s(entry: Entry[Message] | Garbled | None) -> float:
    """Seconds since the entry's message was made; 0 where there is no entry, or no time in it."""
    made_at = time_of(entry.message) if isinstance(entry, Entry) else None
    return max(0.0, time.time() - made_at) if made_at else 0.0


def set_gauges(reading: RunReading) -> None:
    """Replace the previous reading."""
    for gauge in _LABELLED:
        gauge.clear()
    metrics.REDIS_UP.set(1)
    for gauge, labels, value in reading.gauges:
        (gauge.labels(*labels) if labels else gauge).set(value)
    run = reading.snapshot
    for status in STATUSES:
        metrics.RUN_STATUS.labels(status).set(run.status == status)
    metrics.RUN_VERSION.set(run.version)
    metrics.RUN_STEPS.set(run.steps)
    metrics.RUN_MAX_STALENESS.set(run.max_staleness)
    metrics.LAST_COMMIT_TIMESTAMP.set(run.points[-1].finished_at if run.points else 0.0)
    for state in RQ_STATES:
        metrics.JOB_QUEUE_LENGTH.labels(JOB_QUEUE, state).set(run.jobs.get(JOB_QUEUE, {}).get(state, 0))
    _set_workers(run.workers, reading.roles)


def _set_workers(workers: list[Heartbeat], roles: tuple[str, ...]) -> None:
    counts = Counter((beat.role, beat.is_alive) for beat in workers)
    # Also a role that has no worker: its 0 is what an alert looks for.
    for role in {*roles, *(beat.role for beat in workers)}:
        metrics.WORKERS.labels(role, "alive").set(counts[role, True])
        metrics.WORKERS.labels(role, "silent").set(counts[role, False])
    for beat in workers:
        metrics.WORKER_START_TIMESTAMP.labels(beat.role, beat.name).set(beat.started_at)
        if not beat.is_alive:
            continue
        if beat.role == "rollout":
            metrics.WORKER_VERSION.labels(beat.name).set(beat.version)
        for state, share in beat.shares.items():
            if state.startswith(WAIT):
                cause = state.removeprefix(WAIT)
                metrics.WORKER_IDLE_SHARE.labels(beat.role, beat.name, cause).set(share)


def targets_json(run_id: str, reading: RunReading, own_address: str) -> bytes:
    """Targets for Prometheus: all living processes, the servers that registered, and the exporter itself at
    `own_address`, where that is known.

    Labels: the run, the service, and the worker's name, which stays the same over restarts that change the
    port. The exporter has no `worker`: its metrics have that label themselves.
    """
    addresses: list[tuple[str, dict[str, str]]] = (
        [(own_address, {"service": "exporter"})] if own_address else []
    )
    alive = [beat for beat in reading.snapshot.workers if beat.is_alive]
    for beat in alive:
        if beat.metrics_target:
            addresses.append((beat.metrics_target, {"service": beat.role, "worker": beat.name}))
    for beat in alive:
        if is_address(beat.url):
            addresses.append(
                (urlsplit(beat.url).netloc, {"service": "reward-server", "worker": beat.servers})
            )
    targets = [
        {"targets": [address], "labels": {"run_id": run_id, **labels}} for address, labels in addresses
    ]
    return json.dumps(targets).encode()


class Exporter:
    def __init__(self, keys: Keys, every_s: float = EVERY_S) -> None:
        self.keys = keys
        self._every_s = every_s
        self._lock = threading.Lock()
        """Held while gauges change: other threads answer scrapes."""
        self._reading = RunReading()

    async def serve(self, port: int, host: str) -> int:
        """Serve until a signal comes; returns the exit code.

        Raises:
            ConfigError: the port cannot be opened.
            BrokerError: Redis refuses this client.
        """
        endpoint = HttpEndpoint(port, host, [REGISTRY, _Whole(self._lock)], {"/sd": self._discover})
        log.info("serving", url=f"http://{host}:{endpoint.port}/metrics", run=self.keys.run_id)
        following = asyncio.create_task(self._follow(endpoint))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, following.cancel)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await following
        finally:
            endpoint.close()
        return 0

    async def _follow(self, endpoint: HttpEndpoint) -> None:
        metrics.RUN_INFO.labels(self.keys.run_id, "exporter").set(1)
        metrics.REDIS_UP.set(0)
        broker = await self._connected(endpoint)
        try:
            # Its numbers of steps and staleness come with the run's config (`read_run`).
            snapshots = SnapshotReader(broker, self.keys, steps=0, max_staleness=0)
            while True:
                endpoint.beat()
                try:
                    async with asyncio.timeout(PATIENCE * self._every_s):
                        reading = await read_run(snapshots)
                    with self._lock:  # a scrape between clearing and setting would miss workers
                        self._reading = reading
                        set_gauges(reading)
                except TimeoutError:
                    metrics.REDIS_UP.set(0)
                await asyncio.sleep(self._every_s)
        finally:
            await broker.close()

    async def _connected(self, endpoint: HttpEndpoint) -> Broker:
        while True:
            endpoint.beat()
            try:
                return await Broker.connect()
            except UnreachableError as error:
                log.warning("waiting for Redis", error=str(error))
                await asyncio.sleep(self._every_s)

    def _discover(self, own_address: str) -> tuple[bytes, str]:
        with self._lock:
            reading = self._reading
        return targets_json(self.keys.run_id, reading, own_address), "application/json"


class _Whole(Collector):
    """The metrics of the run (`metrics.RUN`, which `REGISTRY` does not have), all of one reading."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return list(metrics.RUN.collect())
