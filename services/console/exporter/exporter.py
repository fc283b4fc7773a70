"""Reads a run every few seconds and serves what it found.

Guarantees: a scrape sees one reading, never half of two; while Redis is away the last reading stands, the
discovered targets with it, and `tidemill_redis_up` is 0. Nothing is changed by looking.
"""

import asyncio
import contextlib
import json
import signal
import threading
from collections.abc import Iterable
from urllib.parse import urlsplit

import structlog
from prometheus_client import REGISTRY, Metric
from prometheus_client.registry import Collector

from common.errors import UnreachableError
from common.process.http_endpoint import HttpEndpoint
from common.redis.broker import Broker
from common.telemetry import metrics
from common.wire.keys import Keys
from services.console.exporter.reading import MetricsReader, Reading, set_gauges


def as_json(run_id: str, reading: Reading, own_address: str) -> bytes:
    """All living processes, the servers that registered for rewards, and the exporter itself.

    Labels: the run, the service, and the worker's name, which stays the same over restarts that change the
    port. The exporter has no `worker`: its metrics have that label themselves.
    """
    found = [_target(own_address, run_id, "exporter")] if own_address else []
    for beat in reading.snapshot.workers:
        if beat.is_alive and beat.metrics_target:
            found.append(_target(beat.metrics_target, run_id, beat.role, worker=beat.name))
    for reward, urls in reading.replicas.items():
        found += [_target(urlsplit(url).netloc, run_id, "reward-server", worker=reward) for url in urls]
    return json.dumps(found).encode()


def _target(address: str, run_id: str, service: str, **labels: str) -> dict[str, object]:
    return {"targets": [address], "labels": {"run_id": run_id, "service": service, **labels}}


log = structlog.get_logger(__name__)

EVERY_S = 5.0
PATIENCE = 2.0
"""A Redis that has not answered everything within so many intervals counts as away."""


class Exporter:
    """One run's exporter."""

    def __init__(self, keys: Keys, every_s: float = EVERY_S) -> None:
        self.keys, self._every_s = keys, every_s
        self._lock = threading.Lock()
        """Scrapes are answered by threads of their own."""
        self._reading = Reading()

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
        """All families at once."""
        with self._lock:
            return list(metrics.RUN.collect())
