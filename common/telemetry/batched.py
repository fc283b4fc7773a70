"""Many small observations, told to Prometheus many at a time.

Counting costs about a microsecond a metric, too much for ten thousand records in a second. So observations
are kept until the registry is read, or until `MOST` are there. Guarantee: a read of the registry has every
observation that was made before it, each once.
"""

import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import prometheus_client
from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

MOST = 1024
"""Observations that are kept at most."""

T = TypeVar("T")


class Batched(Generic[T]):
    """Observations of one kind. `book` is given those that were kept, and counts them."""

    def __init__(self, book: Callable[[Sequence[T]], None]) -> None:
        self._book = book
        self._items: deque[T] = deque()
        self._booking = threading.Lock()
        """Scrapes come from threads of their own."""
        _all_batched.all.append(self)

    def add(self, item: T) -> None:
        self._items.append(item)
        if len(self._items) >= MOST:
            self.book()

    def book(self) -> None:
        with self._booking:
            items = []
            while self._items:  # appending and taking are atomic, and nobody else takes
                items.append(self._items.popleft())
            if items:
                self._book(items)


class Histogram(prometheus_client.Histogram):
    """With observations that come many at a time."""

    def observe_many(self, values: Sequence[float]) -> None:
        """The same as `observe` for each, at a fraction of the cost."""
        me: Any = self  # prometheus_client gives its own fields no types
        me._raise_if_not_observable()
        places = np.searchsorted(me._upper_bounds, values)
        for place, count in enumerate(np.bincount(places).tolist()):
            if count:
                me._buckets[place].inc(count)
        me._sum.inc(float(np.sum(values)))


class _AllBatched(Collector):
    """Stands first in the registry, so that those behind it are complete when they are looked at."""

    def __init__(self) -> None:
        self.all: list[Batched[Any]] = []

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        for batched in list(self.all):
            batched.book()
        return ()


_all_batched = _AllBatched()
REGISTRY.register(_all_batched)


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
        self._folder.cleanup()

    def collect(self) -> Iterable[Metric]:
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
