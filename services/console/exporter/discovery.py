"""Targets for Prometheus's HTTP service discovery: every process of a run that has a /metrics."""

import json
from urllib.parse import urlsplit

from services.console.exporter.reading import Reading


def as_json(run_id: str, reading: Reading, own_address: str) -> bytes:
    """All living processes, the servers that registered for rewards, and the exporter itself.

    Labels: the run, the service, and the worker's name, which stays the same over restarts that change the
    port. The exporter has no `worker`: its metrics have that label themselves.
    """
    found = [_target(own_address, run_id, "exporter")] if own_address else []
    for beat in reading.workers:
        if beat.is_alive and beat.metrics_target:
            found.append(_target(beat.metrics_target, run_id, beat.role, worker=beat.name))
    for reward, urls in reading.replicas.items():
        found += [_target(urlsplit(url).netloc, run_id, "reward-server", worker=reward) for url in urls]
    return json.dumps(found).encode()


def _target(address: str, run_id: str, service: str, **labels: str) -> dict[str, object]:
    return {"targets": [address], "labels": {"run_id": run_id, "service": service, **labels}}
