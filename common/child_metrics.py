"""Metrics of a process together with those of its children: prometheus_client's multiprocess mode.

A child that was started with `ChildMetrics.environment` writes its metrics into files, which outlive it and
the processes that it forks; /metrics of the parent has the sum. Gauges are the parent's alone: they say how
something is now, and a file cannot tell whether its writer still lives.
"""

import tempfile
from collections.abc import Iterable
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Read by prometheus_client when it is imported."""
ADDABLE = ("counter", "histogram", "summary")


class ChildMetrics(Collector):
    """Collects what this process and its children have counted; `close` forgets the children."""

    def __init__(self, own: CollectorRegistry = REGISTRY) -> None:
        self._own = own
        self._folder = tempfile.TemporaryDirectory(prefix="tidemill-metrics-", ignore_cleanup_errors=True)

    @property
    def environment(self) -> dict[str, str]:
        """What a child needs in its environment."""
        return {FOLDER_VARIABLE: self._folder.name}

    def close(self) -> None:
        """Remove the children's files."""
        self._folder.cleanup()

    def collect(self) -> Iterable[Metric]:
        """The sum of all processes."""
        # prometheus_client gives no types to these two calls.
        reader: Any = MultiProcessCollector(None, path=self._folder.name)  # type: ignore[no-untyped-call]
        theirs = {family.name: family for family in reader.collect() if family.type in ADDABLE}
        for family in self._own.collect():
            yield _sum(family, theirs.pop(family.name, None))
        yield from theirs.values()


def _sum(own: Metric, theirs: Metric | None) -> Metric:
    if theirs is None:
        return own
    found: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
    for sample in (*own.samples, *theirs.samples):
        key = (sample.name, frozenset(sample.labels.items()))
        before = found[key].value if key in found else 0.0
        found[key] = sample._replace(value=before + sample.value)
    family = Metric(own.name, own.documentation, own.type, own.unit)
    family.samples = list(found.values())
    return family
