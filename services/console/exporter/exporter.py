"""What the exporter reads of a run at one time."""

import asyncio
import contextlib
import itertools
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import structlog
from prometheus_client import REGISTRY, Metric
from prometheus_client.registry import Collector

from tidemill.common.config import RunConfig
from tidemill.common.errors import UnreachableError
from tidemill.common.history import StreamName
from tidemill.common.process.activity import WAIT
from tidemill.common.process.heartbeats import Heartbeat
from tidemill.common.process.http_endpoint import HttpEndpoint
from tidemill.common.redis.broker import Broker
from tidemill.common.run.replicas import ReplicaRegistry
from tidemill.common.run.state import UnknownRunError, read_config
from tidemill.common.streams import Backlog, backlog, length
from tidemill.common.streams.entries import Entry, Garbled
from tidemill.common.streams.selection import time_of
from tidemill.common.telemetry import metrics
from tidemill.common.wire.keys import REWARD_GROUP, ROLLOUT_GROUP, RQ_STATES, Keys
from tidemill.common.wire.messages import Message
from tidemill.services.console.status.snapshot import JOB_QUEUES, RunSnapshot, SnapshotReader

GROUPS = {
    StreamName.PROMPTS: ROLLOUT_GROUP,
    StreamName.PROMPTS_EVAL: ROLLOUT_GROUP,
    StreamName.TRAJECTORIES: REWARD_GROUP,
    StreamName.TRAJECTORIES_EVAL: REWARD_GROUP,
}
"""The streams that a consumer group takes from; the trainer reads the others by offset."""


@dataclass(frozen=True, slots=True)
class GroupReading:
    """A consumer group on a stream; ages are in seconds, 0 where nothing waits or is held."""

    stream: str
    group: str
    lag: int
    pending: int
    consumers: int
    waiting_age_s: float
    held_age_s: float


@dataclass(frozen=True, slots=True)
class RunReading:
    """A run as Redis had it at one time: its snapshot, and what only Prometheus shows."""

    snapshot: RunSnapshot = field(default_factory=lambda: RunSnapshot("", 0, 0))
    lengths: dict[str, int] = field(default_factory=dict)
    groups: list[GroupReading] = field(default_factory=list)
    replicas: dict[str, list[str]] = field(default_factory=dict)
    """Addresses of the servers that registered for a reward, by its name."""
    memory_bytes: int = 0
    max_memory_bytes: int = 0


class MetricsReader:
    """Reads one run again and again; each commit is read once."""

    def __init__(self, broker: Broker, keys: Keys) -> None:
        self.broker, self.keys = broker, keys
        self.snapshots = SnapshotReader(broker, keys, 0, 0)

    async def read(self) -> RunReading:
        """The run as it is now; an empty one while Redis does not know it."""
        config: RunConfig | None = None
        with contextlib.suppress(UnknownRunError):  # read each time: a resumed run may have more steps
            config = await read_config(self.broker, self.keys)
            self.snapshots.steps = config.trainer.steps
            self.snapshots.max_staleness = config.trainer.max_staleness
        memory = await self.broker.info("memory")
        return RunReading(
            await self.snapshots.read(),
            lengths={name: await length(self.broker, name.key(self.keys)) for name in StreamName},
            groups=[await self._group(stream, group) for stream, group in GROUPS.items()],
            replicas=await self._replicas(config),
            memory_bytes=int(memory["used_memory"]),
            max_memory_bytes=int(memory["maxmemory"]),
        )

    async def _group(self, stream: StreamName, group: str) -> GroupReading:
        found: Backlog[Message] = await backlog(
            self.broker, stream.key(self.keys), group, stream.message_type
        )
        ages = _age_s(found.oldest_waiting), _age_s(found.oldest_held)
        return GroupReading(stream.value, group, found.lag, found.pending, found.consumers, *ages)

    async def _replicas(self, config: RunConfig | None) -> dict[str, list[str]]:
        names = config.servers if config else ()
        return {name: await ReplicaRegistry(self.broker, self.keys, name).urls() for name in names}


def _age_s(entry: Entry[Message] | Garbled | None) -> float:
    """Seconds since the entry's message was made; 0 where there is none that tells."""
    made_at = time_of(entry.message) if isinstance(entry, Entry) else None
    return max(0.0, time.time() - made_at) if made_at else 0.0


STATUSES = ("starting", "running", "finished", "stopped", "failed")
ROLES = ("trainer", "rollout", "reward")
"""Roles that every run needs: exported also when there is no such worker."""
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


def set_gauges(reading: RunReading) -> None:
    """Replace the previous reading: a worker that left must not be exported any longer."""
    for gauge in _LABELLED:
        gauge.clear()
    metrics.REDIS_UP.set(1)
    metrics.REDIS_MEMORY_BYTES.set(reading.memory_bytes)
    metrics.REDIS_MAX_MEMORY_BYTES.set(reading.max_memory_bytes)
    run = reading.snapshot
    for status in STATUSES:
        metrics.RUN_STATUS.labels(status).set(run.status == status)
    metrics.RUN_VERSION.set(run.version)
    metrics.RUN_STEPS.set(run.steps)
    metrics.RUN_MAX_STALENESS.set(run.max_staleness)
    metrics.LAST_COMMIT_TIMESTAMP.set(run.points[-1].finished_at if run.points else 0.0)
    for stream, entries in reading.lengths.items():
        metrics.STREAM_LENGTH.labels(stream).set(entries)
    for found in reading.groups:
        where = (found.stream, found.group)
        metrics.STREAM_LAG.labels(*where).set(found.lag)
        metrics.STREAM_PENDING.labels(*where).set(found.pending)
        metrics.STREAM_CONSUMERS.labels(*where).set(found.consumers)
        metrics.STREAM_OLDEST_AGE_SECONDS.labels(*where, "waiting").set(found.waiting_age_s)
        metrics.STREAM_OLDEST_AGE_SECONDS.labels(*where, "held").set(found.held_age_s)
    for queue, state in itertools.product(JOB_QUEUES, RQ_STATES):
        metrics.JOB_QUEUE_LENGTH.labels(queue, state).set(run.jobs.get(queue, {}).get(state, 0))
    _set_workers(run.workers)


def _set_workers(workers: list[Heartbeat]) -> None:
    alive = Counter(beat.role for beat in workers if beat.is_alive)
    silent = Counter(beat.role for beat in workers if not beat.is_alive)
    for role in {*ROLES, *alive, *silent}:
        metrics.WORKERS.labels(role, "alive").set(alive[role])
        metrics.WORKERS.labels(role, "silent").set(silent[role])
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


def as_json(run_id: str, reading: RunReading, own_address: str) -> bytes:
    """All living processes, the servers that registered, and the exporter itself.

    Labels: the run, the service, and the worker's name, which stays the same over restarts that change the
    port. The exporter has no `worker`: its metrics have that label themselves.
    """
    found = [_target(own_address, run_id, "exporter")] if own_address else []
    for beat in reading.snapshot.workers:
        if beat.is_alive and beat.metrics_target:
            found.append(_target(beat.metrics_target, run_id, beat.role, worker=beat.name))
    for servers, urls in reading.replicas.items():
        found += [_target(urlsplit(url).netloc, run_id, "reward-server", worker=servers) for url in urls]
    return json.dumps(found).encode()


def _target(address: str, run_id: str, service: str, **labels: str) -> dict[str, object]:
    return {"targets": [address], "labels": {"run_id": run_id, "service": service, **labels}}


log = structlog.get_logger(__name__)

EVERY_S = 5.0
PATIENCE = 2.0
"""Redis counts as down if a reading takes more than this many intervals."""


class Exporter:
    def __init__(self, keys: Keys, every_s: float = EVERY_S) -> None:
        self.keys, self._every_s = keys, every_s
        self._lock = threading.Lock()
        """Scrapes are answered by threads of their own."""
        self._reading = RunReading()

    async def serve(self, port: int, host: str) -> int:
        """Serve until a signal comes; returns the exit code.

        Raises:
            ConfigError: the port cannot be had.
            BrokerError: Redis refuses this client.
        """
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        whole = _Whole(self._lock)
        endpoint = HttpEndpoint(port, host, [REGISTRY, whole], {"/sd": self._discover})
        log.info("serving", url=f"http://{host}:{endpoint.port}/metrics", run=self.keys.run_id)
        try:
            following = asyncio.create_task(self._follow(endpoint))
            stopped = asyncio.create_task(stopping.wait())
            await asyncio.wait({following, stopped}, return_when=asyncio.FIRST_COMPLETED)
            following.cancel()
            stopped.cancel()
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
            reader = MetricsReader(broker, self.keys)
            while True:
                endpoint.beat()
                await self._read(reader)
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

    async def _read(self, reader: MetricsReader) -> None:
        try:
            async with asyncio.timeout(PATIENCE * self._every_s):
                reading = await reader.read()
        except TimeoutError:
            metrics.REDIS_UP.set(0)
            return
        with self._lock:
            self._reading = reading
            set_gauges(reading)

    def _discover(self, own_address: str) -> tuple[bytes, str]:
        with self._lock:
            reading = self._reading
        return as_json(self.keys.run_id, reading, own_address), "application/json"


class _Whole(Collector):
    """The metrics of the run, all of one reading."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return list(metrics.RUN.collect())
